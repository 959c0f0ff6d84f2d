"""Compiling single functions of a model changes no loss and no gradient, for every family."""

import pytest
import torch

from parallel.compile import LOCAL, compile_model
from tests.models.families import PROXIES
from tests.models.helpers import build, pack


@pytest.mark.parametrize("name", ["deepseek_v3", "muse_spark", "gpt_oss"])
def test_local_compilation_computes_the_same(name: str) -> None:
    torch._dynamo.reset()
    config = PROXIES[name]
    batch = pack([[40, 88], [128]], config.vocab_size)
    eager, compiled = build(config), build(config)
    compile_model(compiled, "local", backend="aot_eager")
    totals = []
    for model in (eager, compiled):
        losses = model(*batch)
        losses.total.backward()
        totals.append(losses.total.item())

    assert totals[1] == pytest.approx(totals[0], rel=1e-5)
    for mine, other in zip(compiled.parameters(), eager.parameters(), strict=True):
        assert (mine.grad - other.grad).abs().max() <= 1e-4 * other.grad.abs().max()


def test_local_compilation_touches_the_named_functions_only() -> None:
    model = build(PROXIES["deepseek_v3"])
    before = model.head.steps
    compile_model(model, "local", backend="aot_eager")

    for module in model.modules():
        assert (module._compiled_call_impl is not None) == isinstance(module, LOCAL)
    assert all(new is not old for new, old in zip(model.head.steps, before, strict=True))
