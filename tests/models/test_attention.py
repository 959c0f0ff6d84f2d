"""The attention operator against a masked softmax written out in float64."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from models.ops import attention_flash, attention_tiles
from models.ops.attention import attention, attention_backward
from tests.models.helpers import pack, relative_error

CASES = {
    # (B, H, Hkv, D, Dv, window, documents of each row)
    "full": (2, 4, 4, 16, 16, 0, [[300], [300]]),
    "mla_widths": (2, 3, 3, 24, 16, 0, [[300], [300]]),
    "shared_keys": (2, 6, 2, 16, 16, 0, [[257], [257]]),
    "documents": (2, 4, 2, 16, 8, 0, [[1, 99, 200], [140, 160]]),
    "same_documents": (2, 4, 2, 16, 8, 0, [[130, 170], [130, 170]]),
    "window": (2, 4, 4, 16, 16, 50, [[300], [300]]),
    "window_beyond_tile": (1, 4, 1, 16, 16, 200, [[500]]),
    "window_documents": (2, 4, 2, 16, 16, 50, [[20, 280], [150, 150]]),
    "window_longer_than_sequence": (1, 2, 2, 16, 16, 1000, [[200]]),
    "window_of_itself": (1, 2, 2, 16, 16, 1, [[200]]),
}
LAST_QUERIES = {
    # Queries of the last tokens only: of the sequence, of one document, across documents.
    "full": 100,
    "shared_keys": 129,
    "documents": 120,
    "same_documents": 180,
    "window": 130,
    "window_documents": 170,
    "window_beyond_tile": 1,
}
Inputs = tuple[list[Tensor], Tensor, float, int]


def make_inputs(name: str, dtype: torch.dtype = torch.float32) -> Inputs:
    B, H, Hkv, D, Dv, window, documents = CASES[name]
    S = sum(documents[0])
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, S, H, D), (B, S, Hkv, D), (B, S, Hkv, Dv))
    qkv = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    return qkv, pack(documents, 8).positions_BS, D**-0.5, window


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """Softmax over an S x S mask: allowed where the same document, not later, not too far."""
    q, k, v = q.double(), k.double(), v.double()
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    document = (positions == 0).cumsum(1)
    index = torch.arange(q.shape[1])
    distance = index[:, None] - index
    allowed = (document[:, :, None] == document[:, None]) & (distance >= 0)
    if window:
        allowed &= distance < window
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    scores = scores.masked_fill(~allowed[:, None], float("-inf"))
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v), scores.logsumexp(-1)


@pytest.mark.parametrize("name", CASES)
def test_forward_and_gradients_equal_the_plain_formula(name: str) -> None:
    qkv, positions, scale, window = make_inputs(name)
    out, lse = attention(*qkv, positions, scale, window)
    expected, expected_lse = plain_attention(*qkv, positions, scale, window)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))

    ours = torch.autograd.grad(out, qkv, grad)
    theirs = torch.autograd.grad(expected, qkv, grad.double())

    assert relative_error(out, expected) < 1e-5
    assert relative_error(lse, expected_lse) < 1e-5
    for mine, other in zip(ours, theirs, strict=True):
        # A query that sees itself alone has gradients of zero to both q and k.
        assert (mine - other).abs().max() < 1e-5 * max(1.0, other.abs().max())


@pytest.mark.parametrize("name", LAST_QUERIES)
def test_queries_of_the_last_tokens_see_what_they_see_among_all(name: str) -> None:
    """As context parallelism asks: fewer queries than keys, the same outputs and gradients."""
    qkv, positions, scale, window = make_inputs(name)
    last = slice(-LAST_QUERIES[name], None)
    out, lse = attention(qkv[0][:, last], *qkv[1:], positions, scale, window)
    expected, expected_lse = attention(*qkv, positions, scale, window)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))

    ours = torch.autograd.grad(out, qkv, grad)
    theirs = torch.autograd.grad(expected[:, last], qkv, grad)

    assert relative_error(out, expected[:, last]) < 1e-5
    assert relative_error(lse, expected_lse[..., last]) < 1e-5
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine - other).abs().max() < 1e-5 * max(1.0, other.abs().max())


@pytest.mark.parametrize("num_keys", [1, 60, 150])
@pytest.mark.parametrize("name", ["full", "shared_keys", "mla_widths", "documents"])
def test_parts_of_the_keys_merge_to_all_of_them(name: str, num_keys: int) -> None:
    """As ring attention asks: queries at the end, of what they see the first keys and the rest."""
    qkv, positions, scale, _ = make_inputs(name)
    last = slice(-100, None)
    q, k, v = (x.detach() for x in qkv)
    q = q[:, last]
    whole = attention(q, k, v, positions, scale, 0)
    dout = torch.randn(whole[0].shape, generator=torch.Generator().manual_seed(1))
    expected = attention_backward(dout, q, k, v, *whole, positions, scale, 0)
    parts = [(slice(num_keys), positions), (slice(num_keys, None), positions[:, num_keys:])]

    seen = [attention(q, k[:, keys], v[:, keys], where, scale, 0) for keys, where in parts]
    shares = torch.stack([lse for _, lse in seen]).softmax(0).transpose(2, 3)[..., None]
    gradients = [
        attention_backward(dout, q, k[:, keys], v[:, keys], *whole, where, scale, 0)
        for keys, where in parts
    ]

    merged = shares[0] * seen[0][0] + shares[1] * seen[1][0]
    assert relative_error(merged, whole[0]) < 1e-5
    assert relative_error(torch.logaddexp(seen[0][1], seen[1][1]), whole[1]) < 1e-5
    dq, dk, dv = zip(*gradients, strict=True)
    assert relative_error(sum(dq), expected[0]) < 1e-5
    assert relative_error(torch.cat(dk, dim=1), expected[1]) < 1e-5
    assert relative_error(torch.cat(dv, dim=1), expected[2]) < 1e-5


def test_a_query_without_keys_has_an_output_of_zero() -> None:
    """Rows of documents of 20 + 44 and of 64 tokens: queries 40 to 64 of the first see no key."""
    positions = pack([[20, 44], [64]], 8).positions_BS
    q, k, v = torch.randn(2, 24, 2, 8), torch.randn(2, 20, 2, 8), torch.randn(2, 20, 2, 8)
    out, lse = attention(q, k, v, positions, 1.0, 0)

    assert out[0].eq(0).all() and lse[0].eq(float("-inf")).all()
    # In the other row all queries see all keys.
    scores = torch.einsum("ihd,jhd->hij", q[1], k[1])
    assert torch.allclose(lse[1], scores.logsumexp(-1), atol=1e-5)
    assert torch.allclose(out[1], torch.einsum("hij,jhd->ihd", scores.softmax(-1), v[1]), atol=1e-5)


def test_a_batch_without_rows_gives_none_and_gradients_of_none() -> None:
    """The images of a batch that has none."""
    q, k, v = (torch.randn(0, 5, 2, width, requires_grad=True) for width in (8, 8, 4))
    out, lse = attention(q, k, v, torch.zeros(0, 5, dtype=torch.int64), 1.0, 0)
    out.sum().backward()

    assert (out.shape, lse.shape) == ((0, 5, 2, 4), (0, 2, 5))
    assert [x.grad.shape for x in (q, k, v)] == [x.shape for x in (q, k, v)]


@pytest.mark.parametrize("name", ["documents", "window_documents"])
def test_bfloat16_is_as_near_to_the_formula_as_its_rounding(name: str) -> None:
    qkv, positions, scale, window = make_inputs(name, torch.bfloat16)
    out, _ = attention(*qkv, positions, scale, window)
    expected, _ = plain_attention(*qkv, positions, scale, window)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()

    ours = torch.autograd.grad(out, qkv, grad)
    theirs = torch.autograd.grad(expected, qkv, grad.double())

    assert out.dtype == torch.bfloat16
    assert relative_error(out, expected) < 2e-2
    assert max(relative_error(a, b) for a, b in zip(ours, theirs, strict=True)) < 2e-2


@pytest.mark.parametrize("name", ["mla_widths", "window_documents"])
def test_the_operator_keeps_the_rules_of_custom_operators(name: str) -> None:
    qkv, positions, scale, window = make_inputs(name)

    torch.library.opcheck(torch.ops.titanbench.attention.default, (*qkv, positions, scale, window))


class LargestTensor(TorchDispatchMode):
    """The most elements that any operator's output had."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


def largest_intermediate(S: int, window: int) -> int:
    """Elements of the largest tensor that attention makes of one head of width 8."""
    q, k, v, dout = (torch.randn(1, S, 1, 8) for _ in range(4))
    positions = torch.arange(S)[None]
    with LargestTensor() as mode:
        out, lse = attention_tiles.forward(q, k, v, positions, 1.0, window)
        attention_tiles.backward(dout, q, k, v, out, lse, positions, 1.0, window)
    return mode.largest


def test_memory_of_a_window_is_that_of_its_tile_however_long_the_sequence() -> None:
    tile = attention_tiles.TILE_QUERIES * (attention_tiles.TILE_QUERIES + 256 - 1)

    assert largest_intermediate(2048, 256) == tile
    assert largest_intermediate(4096, 256) == tile


def test_memory_of_full_attention_grows_linearly() -> None:
    for S in (1024, 2048, 4096):
        assert largest_intermediate(S, 0) == attention_tiles.TILE_QUERIES * S


def test_what_a_window_layer_saves_for_backward_grows_linearly() -> None:
    def saved_elements(S: int) -> int:
        q, k, v = (torch.randn(1, S, 2, 8, requires_grad=True) for _ in range(3))
        saved: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            saved[tensor.data_ptr()] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            attention(q, k, v, torch.arange(S)[None], 1.0, 64)
        return sum(saved.values())

    # q, k, v and out of 16 values, two log-sum-exps and the position per token.
    assert saved_elements(256) == 256 * (4 * 16 + 2 + 1)
    assert saved_elements(1024) == 4 * saved_elements(256)


@pytest.mark.parametrize(("window", "keys"), [(0, 64), (16, 16), (128, 64)])
def test_flops_are_two_products_forward_and_five_backward(window: int, keys: int) -> None:
    B, S, H, D, Dv = 2, 64, 4, 24, 16
    q = torch.randn(B, S, H, D, requires_grad=True)
    k = torch.randn(B, S, 2, D, requires_grad=True)
    v = torch.randn(B, S, 2, Dv, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        out, _ = attention(q, k, v, torch.arange(S).repeat(B, 1), 1.0, window)
        forward = counter.get_total_flops()
        out.sum().backward()

    scores = B * H * S * keys
    assert forward == 2 * scores * (D + Dv)
    assert counter.get_total_flops() - forward == 2 * scores * (3 * D + 2 * Dv)


def test_the_flash_kernel_sees_the_documents_as_one_stream() -> None:
    """Rows of 20 + 44 and of 64 tokens: cumulative lengths, and the longest."""
    positions = pack([[20, 44], [64]], 8).positions_BS
    ends, longest = attention_flash.cumulative_lengths(positions)
    assert (ends.tolist(), longest) == ([0, 20, 64, 128], 64)
    assert ends.dtype == torch.int32

    # The last 30 tokens of each row: none of the first document, 30 of the others.
    ends, longest = attention_flash.cumulative_lengths(positions, slice(-30, None))
    assert (ends.tolist(), longest) == ([0, 0, 30, 60], 30)
    assert ends.dtype == torch.int32

    # The first 30 tokens: all of the first document, 10 of the second.
    ends, longest = attention_flash.cumulative_lengths(positions, slice(30))
    assert (ends.tolist(), longest) == ([0, 20, 30, 60], 30)


@pytest.mark.parametrize("window", [0, 16])
def test_the_flash_kernel_takes_widths_of_mla_and_shared_keys(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shapes on the meta device, as the fake kernels of the operator promise them."""
    q = torch.empty(2, 64, 4, 192, dtype=torch.bfloat16, device="meta")
    k, v = q.new_empty(2, 64, 2, 192), q.new_empty(2, 64, 2, 128)
    positions = torch.empty(2, 64, dtype=torch.int64, device="meta")
    ends = torch.tensor([0, 20, 64, 128], dtype=torch.int32).to("meta")
    monkeypatch.setattr(attention_flash, "cumulative_lengths", lambda _: (ends, 64))

    out, lse = attention_flash.forward(q, k, v, positions, 0.1, window)
    gradients = attention_flash.backward(out, q, k, v, out, lse, positions, 0.1, window)

    assert out.shape == (2, 64, 4, 128) and out.is_contiguous()
    assert lse.shape == (2, 4, 64) and lse.dtype == torch.float32
    assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape]
    assert all(g.is_contiguous() for g in gradients)
