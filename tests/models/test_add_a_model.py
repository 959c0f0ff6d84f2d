"""The family of docs/add-a-model.md: it counts, trains and is found as the document says."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from models.protocol import ModelConfig
from tests.models.helpers import build, pack
from workloads import registry
from workloads.workload import Workload

DOCUMENT = Path(__file__).parents[2] / "docs" / "add-a-model.md"
FAMILY, WORKLOAD = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)


def run(source: str, name: str) -> ModuleType:
    module = ModuleType(name)
    module.__dict__["__file__"] = name
    sys.modules[name] = module
    exec(compile(source, name, "exec"), module.__dict__)
    return module


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> ModelConfig:
    monkeypatch.setitem(sys.modules, "models.multi_query", None)
    return run(FAMILY, "models.multi_query").MULTI_QUERY_PROXY


def test_the_example_is_about_40_lines_of_code() -> None:
    lines = [line for line in FAMILY.splitlines() if line.strip()]

    assert len(lines) <= 45
    assert max(map(len, FAMILY.splitlines())) <= 100


def test_the_family_counts_its_parameters_and_its_operators(config: ModelConfig) -> None:
    """FLOPs that run, with attention's recomputed scores taken off and gains put on."""
    model, S = build(config), 256
    assert isinstance(config, ModelConfig)
    assert config.counts().total == sum(p.numel() for p in model.parameters())

    with FlopCounterMode(display=False) as counter:
        model(*pack([[S]], config.vocab_size)).total.backward()
    scores = config.num_layers * 2 * config.num_heads * S * S * config.head_dim
    gains = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    executed = counter.get_total_flops() - scores + 6 * gains * S
    assert executed == config.flops_per_token(S).full * S


def test_the_family_trains(config: ModelConfig) -> None:
    """Ten steps on one batch: from the loss of a uniform guess to well below it."""
    model, batch = build(config), pack([[100, 28]], config.vocab_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(10):
        loss = model(*batch).total / 127
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    assert losses[-1] < losses[0] - 1


def test_the_workload_is_found_and_is_what_it_says(config: ModelConfig, tmp_path: Path) -> None:
    folder = tmp_path / "workloads"
    folder.mkdir()
    (folder / "multi_query.py").write_text(WORKLOAD)

    workload = run(WORKLOAD, "multi_query_workloads").multi_query_proxy()
    del sys.modules["multi_query_workloads"]

    assert list(registry.catalogue(folder)) == ["multi_query_proxy"]
    assert isinstance(workload, Workload) and workload.model is config
