"""Initial values are a function of seed, name and index, whatever the layout."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from models.deepseek_v3 import DEEPSEEK_V3_PROXY
from models.initialization import (
    Normal,
    Ones,
    collect_inits,
    fan_in,
    generate_rows,
    initialize,
    make_parameter,
)
from tests.models.helpers import build

SHAPES = [(300,), (300, 8), (10, 6, 4)]


@settings(max_examples=30, deadline=None)
@given(shape=st.sampled_from(SHAPES), cuts=st.sets(st.integers(1, 299), max_size=4))
def test_any_cut_into_rows_gives_the_same_values(shape: tuple[int, ...], cuts: set[int]) -> None:
    bounds = [0, *sorted(cut for cut in cuts if cut < shape[0]), shape[0]]
    whole = generate_rows("w", shape, Normal(0.5), 3, start=0, stop=shape[0])
    parts = [
        generate_rows("w", shape, Normal(0.5), 3, start=start, stop=stop)
        for start, stop in pairwise(bounds)
    ]

    assert torch.equal(torch.cat(parts), whole)


def test_values_are_normal_with_the_stated_deviation() -> None:
    values = generate_rows("w", (1024, 512), fan_in(64), 0, start=0, stop=1024)

    # 524,288 samples: the standard error of the mean is 1.7e-4, of the deviation 1.2e-4.
    assert abs(values.mean()) < 1e-3
    assert values.std().item() == pytest.approx(0.125, abs=1e-3)


def test_seed_name_and_block_each_matter() -> None:
    def rows(name: str = "w", seed: int = 0, start: int = 0) -> torch.Tensor:
        return generate_rows(name, (256, 4), Normal(1.0), seed, start=start, stop=start + 128)

    others = [rows(name="v"), rows(seed=1), rows(start=128)]
    assert all(not torch.equal(rows(), other) for other in others)


def test_a_model_has_the_values_that_its_rows_are_generated_with() -> None:
    model = build(DEEPSEEK_V3_PROXY, seed=5)
    inits = collect_inits(model)

    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        rows = generate_rows(name, shape, inits[name], 5, start=0, stop=shape[0])
        assert torch.equal(parameter, rows), name


def test_initializing_leaves_nothing_of_what_was_there() -> None:
    """Buffers are cleared, and values written after to_empty are those of a fresh model."""
    with torch.device("meta"):
        model = DEEPSEEK_V3_PROXY.build()
    inits = collect_inits(model)
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(77)
    initialize(model, inits, seed=0)

    fresh = build(DEEPSEEK_V3_PROXY, seed=0)
    for mine, other in zip(model.state_dict().values(), fresh.state_dict().values(), strict=True):
        assert torch.equal(mine, other)
    assert all(not buffer.any() for buffer in model.buffers())


def test_the_dtype_is_the_parameters_own() -> None:
    class Gain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = make_parameter(4, init=Ones())

    model = Gain()
    inits = collect_inits(model)
    initialize(model.bfloat16(), inits, seed=0)

    assert model.gain.dtype == torch.bfloat16 and model.gain.tolist() == [1] * 4


def test_a_parameter_of_unknown_origin_is_named() -> None:
    with pytest.raises(ValueError, match=r"parameter 0\.weight has no initializer"):
        collect_inits(nn.Sequential(nn.Linear(2, 2)))
