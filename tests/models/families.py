"""The families by their proxies: what every network has to hold is tested on each of them."""

import importlib
from pathlib import Path

import models
from models.protocol import ModelConfig


def proxies() -> dict[str, ModelConfig]:
    """Every `<FAMILY>_PROXY` of a module in models/, by the family's name in small letters.

    A new family is found by itself.
    """
    found = {}
    for path in sorted(Path(models.__file__).parent.glob("*.py")):
        module = importlib.import_module(f"models.{path.stem}")
        for name, value in vars(module).items():
            # A preset made from another module's proxy has that one's name in its module, too.
            if name.endswith("_PROXY") and name.startswith(path.stem.upper()):
                found[name.removesuffix("_PROXY").lower()] = value
    return found


PROXIES = proxies()
MIXTURES = [name for name, config in PROXIES.items() if getattr(config, "num_experts", 0)]
