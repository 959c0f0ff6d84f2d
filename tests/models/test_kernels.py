"""The decision which kernel serves, and FlexAttention held against the tiles."""

import pytest
import torch
from torch import Tensor

from models.ops import attention as attention_operator
from models.ops import attention_flex, attention_tiles
from models.ops.attention import attention, attention_backward
from models.ops.kernels import (
    Machine,
    attention_kernel,
    delta_rule_kernel,
    find_machine,
    indexer_kernel,
    joint_attention_kernel,
)
from tests.models.helpers import pack, relative_error

BF16 = torch.bfloat16
CPU = Machine("cpu", has_gym=True)
H200 = Machine("cuda", (9, 0), has_gym=True)
A100 = Machine("cuda", (8, 0), has_gym=True)
BARE_H200 = Machine("cuda", (9, 0), has_gym=False)


def test_attention_is_by_flash_where_it_can_be_and_by_flex_on_other_gpus() -> None:
    assert attention_kernel("cuda", BF16, 192) == "flash_varlen"
    assert attention_kernel("cuda", torch.float32, 192) == "flex"
    assert attention_kernel("cuda", BF16, 576) == "flex"
    assert attention_kernel("cpu", BF16, 192) == "tiles"


def test_deepseek_v4_is_by_attention_gym_where_it_is_installed() -> None:
    assert joint_attention_kernel(H200, BF16, 512, chosen=True) == "attn_gym.gather_attn"
    assert joint_attention_kernel(BARE_H200, BF16, 512, chosen=True) == "flex and tiles"
    # All entries are not gathered for each query.
    assert joint_attention_kernel(H200, BF16, 512, chosen=False) == "flex and tiles"
    assert joint_attention_kernel(H200, BF16, 128, chosen=False) == "flash_varlen and tiles"
    assert joint_attention_kernel(H200, torch.float32, 512, chosen=True) == "flex and tiles"
    assert joint_attention_kernel(CPU, BF16, 512, chosen=True) == "tiles"


def test_the_indexer_is_by_attention_gym_from_hopper_on() -> None:
    assert indexer_kernel(H200, BF16, 64, 128) == "attn_gym.lightning_indexer"
    assert indexer_kernel(A100, BF16, 64, 128) == "tiles"
    assert indexer_kernel(H200, BF16, 512, 128) == "tiles"
    assert indexer_kernel(BARE_H200, BF16, 64, 128) == "tiles"
    assert indexer_kernel(CPU, BF16, 64, 128) == "tiles"


@pytest.mark.parametrize(
    ("machine", "dtype", "widths", "num_decays", "grouped", "kernel"),
    [
        (A100, BF16, (128, 128), 1, True, "attn_gym.chunk_gdn"),
        (A100, BF16, (64, 64), 1, False, "attn_gym.chunk_gdn"),
        (A100, BF16, (128, 128), 128, False, "attn_gym.chunk_kda"),
        (A100, BF16, (128, 128), 128, True, "chunks"),
        (A100, BF16, (64, 64), 64, False, "chunks"),
        (A100, BF16, (128, 256), 1, False, "chunks"),
        (A100, torch.float32, (128, 128), 1, False, "chunks"),
        (BARE_H200, BF16, (128, 128), 1, False, "chunks"),
        (CPU, BF16, (128, 128), 1, False, "chunks"),
    ],
)
def test_linear_attention_is_by_attention_gym_for_the_widths_that_it_has(
    machine: Machine,
    dtype: torch.dtype,
    widths: tuple[int, int],
    num_decays: int,
    grouped: bool,
    kernel: str,
) -> None:
    D, Dv = widths
    numbers = {"qk_head_dim": D, "v_head_dim": Dv, "num_decays": num_decays, "grouped": grouped}

    assert delta_rule_kernel(machine, dtype, **numbers) == kernel


def test_a_cpu_has_no_capability() -> None:
    assert find_machine("cpu")[:2] == ("cpu", (0, 0))


@pytest.fixture
def flex_with_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention as the kernel. Its formula has gradients on a CPU, which PyTorch refuses."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    monkeypatch.setattr(attention_operator, "attention_kernel", lambda *_: "flex")


def random_inputs(B: int, S: int, Sk: int, *, H: int, Hkv: int, D: int, Dv: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, S, H, D), (B, Sk, Hkv, D), (B, Sk, Hkv, Dv))
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("window", [0, 11])
@pytest.mark.parametrize("num_queries", [64, 30])
def test_flex_attention_equals_the_tiles(
    window: int, num_queries: int, flex_with_gradients: None
) -> None:
    """Documents, shared keys, widths of keys and values apart; all queries and the last ones.

    Through the operator, below whose autograd the kernel is differentiated.
    """
    positions = pack([[1, 23, 40], [50, 14]], 8).positions_BS
    q, k, v = (
        x.requires_grad_() for x in random_inputs(2, num_queries, 64, H=4, Hkv=2, D=12, Dv=8)
    )
    out, lse = attention(q, k, v, positions, 0.3, window)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(out, (q, k, v), dout)

    inputs = (q.detach(), k.detach(), v.detach())
    expected = attention_tiles.forward(*inputs, positions, 0.3, window)
    theirs = attention_tiles.backward(dout, *inputs, *expected, positions, 0.3, window)

    assert out.is_contiguous()
    assert relative_error(out, expected[0]) < 1e-5
    assert relative_error(lse, expected[1]) < 1e-5
    for mine, other in zip(gradients, theirs, strict=True):
        assert mine.is_contiguous()
        assert relative_error(mine, other) < 1e-5


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_finds_its_share_of_the_gradients_to_a_part_of_the_keys(
    flex_with_gradients: None,
) -> None:
    """As ring attention asks: output and log-sum-exp are those of all keys.

    Some queries see none of these keys: those of later documents.
    """
    positions = pack([[24, 40], [64]], 8).positions_BS
    q, k, v = random_inputs(2, 30, 64, H=2, Hkv=1, D=8, Dv=8)
    whole = attention_tiles.forward(q, k, v, positions, 0.3, 0)
    dout = torch.randn(whole[0].shape, generator=torch.Generator().manual_seed(1))
    part = (q, k[:, :20], v[:, :20])

    out, lse = attention(*part, positions, 0.3, 0)
    gradients = attention_backward(dout, *part, *whole, positions, 0.3, 0)

    assert out[0].eq(0).all() and lse[0].eq(float("-inf")).all()
    expected = attention_tiles.forward(*part, positions, 0.3, 0)
    assert relative_error(out, expected[0]) < 1e-5
    theirs = attention_tiles.backward(dout, *part, *whole, positions, 0.3, 0)
    for mine, other in zip(gradients, theirs, strict=True):
        assert relative_error(mine, other) < 1e-5


def test_flex_attention_visits_the_blocks_that_a_window_or_a_document_leaves() -> None:
    """Blocks of 128 tokens: of 1024 tokens' 64, a window of 128 leaves two per row of blocks."""
    q, k, _ = random_inputs(1, 1024, 1024, H=1, Hkv=1, D=8, Dv=8)
    one = torch.arange(1024)[None]
    four = (torch.arange(1024) % 256)[None]

    def num_blocks(positions: Tensor, window: int) -> int:
        mask = attention_flex.block_mask(q, k, positions, window)
        partly = mask.kv_num_blocks.sum()
        wholly = mask.full_kv_num_blocks
        return int(partly if wholly is None else partly + wholly.sum())

    assert num_blocks(one, 0) == 36
    assert num_blocks(one, 128) == 1 + 7 * 2
    assert num_blocks(four, 0) == 4 * 3
