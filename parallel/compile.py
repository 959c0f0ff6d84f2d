"""Compilation: what of a model torch.compile sees."""

from models.protocol import Model
from parallel.plan import Compile


def compile_model(model: Model, policy: Compile) -> None:
    """Compile every block in place (``block``), or nothing (``none``)."""
    if policy == "block":
        for _, block in model.blocks():
            block.compile()
