"""Compressed attention against masked softmaxes and pooling written out block by block."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from models.batch import Context
from models.deepseek_v4 import DEEPSEEK_V4_PROXY
from models.initialization import collect_inits, initialize
from models.layers.compressed_attention import CompressedAttention
from models.layers.compression import Compressor, EntryMap, map_entries
from models.ops import choose_entries as choosing
from models.ops import chosen_attention as chosen_ops
from models.ops import entry_attention as entry_ops
from models.ops.choose_entries import choose_entries
from models.ops.joint_attention import Seen, joint_attention
from tests.models.helpers import pack, relative_error

DOCUMENTS = [[150, 3, 47], [20, 8, 172]]
KINDS = [0, 4, 32]
BLOCK, WINDOW, H, D = 8, 30, 3, 16


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def entry_map(positions: Tensor, block: int = BLOCK) -> EntryMap:
    return map_entries(positions, block, 8, 10_000.0, None)


def entries_by_hand(documents: list[list[int]], block: int) -> list[list[tuple[int, int]]]:
    """Of each row, (document, last token in the row) of every complete block in turn."""
    rows = []
    for row in documents:
        starts = [sum(row[:i]) for i in range(len(row))]
        rows.append(
            [
                (number, start + (w + 1) * block - 1)
                for number, (start, length) in enumerate(zip(starts, row, strict=True))
                for w in range(length // block)
            ]
        )
    return rows


def visible_by_hand(documents: list[list[int]], block: int) -> Tensor:
    """(B,S,E) bool: the entry's block is in the query's document and has ended."""
    S = sum(documents[0])
    seen = torch.zeros(len(documents), S, S // block, dtype=torch.bool)
    for row, entries in enumerate(entries_by_hand(documents, block)):
        document = torch.repeat_interleave(
            torch.arange(len(documents[row])), torch.tensor(documents[row])
        )
        for e, (number, end) in enumerate(entries):
            seen[row, :, e] = (document == number) & (torch.arange(S) >= end)
    return seen


@pytest.mark.parametrize("block", [1, 4, 8, 128])
def test_a_token_sees_the_blocks_of_its_document_that_have_closed(block: int) -> None:
    entries = entry_map(pack(DOCUMENTS, 8).positions_BS, block)
    E = sum(DOCUMENTS[0]) // block
    number = torch.arange(E)
    first, last = entries.first_BS[..., None], entries.last_BS[..., None]

    assert entries.ends_BE.shape == (2, E)
    assert ((number >= first) & (number < last)).equal(visible_by_hand(DOCUMENTS, block))
    for row, expected in enumerate(entries_by_hand(DOCUMENTS, block)):
        assert entries.ends_BE[row, : len(expected)].tolist() == [end for _, end in expected]
        number = [number for number, _ in expected]
        follows = [a == b for a, b in zip(number[1:], number, strict=False)]
        assert entries.follows_BE[row, : len(expected)].tolist() == [False, *follows][: len(number)]


@pytest.mark.parametrize("overlapping", [False, True])
def test_an_entry_is_the_softmax_of_its_block_and_of_the_one_before(overlapping: bool) -> None:
    """Pooling written out: packed documents have the entries that they have apart."""
    compressor = Compressor(24, 12, block=BLOCK, overlapping=overlapping, norm_eps=1e-6)
    initialize(compressor, collect_inits(compressor), 0)
    with torch.no_grad():
        compressor.position_bias.copy_(random(*compressor.position_bias.shape))
    x = random(2, 200, 24)
    table = compressor(x, entry_map(pack(DOCUMENTS, 8).positions_BS))
    values, gates = compressor.value_proj(x), compressor.gate_proj(x)
    for row, expected in enumerate(entries_by_hand(DOCUMENTS, BLOCK)):
        for e, (number, end) in enumerate(expected):
            block = slice(end + 1 - BLOCK, end + 1)
            slots = values[row, block, -12:]
            logits = gates[row, block, -12:] + compressor.position_bias[:, -12:]
            if overlapping and e and expected[e - 1][0] == number:
                before = slice(block.start - BLOCK, block.start)
                slots = torch.cat((values[row, before, :12], slots))
                earlier = gates[row, before, :12] + compressor.position_bias[:, :12]
                logits = torch.cat((earlier, logits))
            pooled = compressor.norm((logits.softmax(0) * slots).sum(0))
            torch.testing.assert_close(table[row, e], pooled)


def plain_attention(
    q: Tensor, kv: Tensor, entries: Tensor, sinks: Tensor, positions: Tensor, seen: Tensor
) -> Tensor:
    """One softmax over a window, the entries in `seen` (B,S,E) and a sink, over S x S masks."""
    token = torch.arange(q.shape[1])
    back = token[:, None] - token
    near = (back >= 0) & (back < WINDOW) & (back <= positions[..., None])
    mask = torch.cat((near, seen), dim=-1)[:, None]
    keys = torch.cat((kv, entries), dim=1)
    scores = torch.einsum("bshd,bkd->bhsk", q, keys) * D**-0.5
    scores = scores.masked_fill(~mask, float("-inf"))
    sinks = sinks[:, None, None].expand(*scores.shape[:-1], 1)
    weights = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
    return torch.einsum("bhsk,bkd->bshd", weights, keys)


def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few hundred tokens are many tiles."""
    monkeypatch.setattr(entry_ops, "TILE_SCORES", 2000)
    monkeypatch.setattr(chosen_ops, "TILE_VALUES", 2000)
    monkeypatch.setattr(choosing, "TILE_PRODUCTS", 2000)


@pytest.mark.parametrize("choose", [False, True])
@pytest.mark.parametrize("documents", [DOCUMENTS, [[200], [200]], [[7], [7]]])
def test_window_entries_and_sink_share_one_softmax(
    choose: bool, documents: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output and all gradients, for all entries and for chosen ones, also where there are none."""
    small_tiles(monkeypatch)
    positions = pack(documents, 8).positions_BS
    S = positions.shape[1]
    entries = entry_map(positions)
    mask = visible_by_hand(documents, BLOCK)
    chosen = None
    if choose:
        number = torch.arange(S // BLOCK)
        kept = number.where(mask & (random(*mask.shape, seed=5) > 0), torch.tensor(-1))
        chosen = kept.sort(-1, descending=True).values[..., :7].int()
        mask = (chosen[..., None] == number).any(2)
    shapes = ((2, S, H, D), (2, S, D), (2, S // BLOCK, D), (H,))
    inputs = [random(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    seen = Seen(entries.first_BS, entries.last_BS, BLOCK, chosen)

    out = joint_attention(*inputs, positions, seen, scale=D**-0.5, window=WINDOW)
    expected = plain_attention(*inputs, positions, mask)
    grad = random(*out.shape, seed=9)
    ours = torch.autograd.grad(out, inputs, grad)
    theirs = torch.autograd.grad(expected, inputs, grad)

    assert relative_error(out, expected) < 1e-5
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.shape == other.shape
        assert mine.numel() == 0 or relative_error(mine, other) < 1e-5


def test_the_indexer_chooses_the_entries_of_highest_score(monkeypatch: pytest.MonkeyPatch) -> None:
    small_tiles(monkeypatch)
    positions = pack(DOCUMENTS, 8).positions_BS
    entries = entry_map(positions)
    q, keys, weights = random(2, 200, 5, 6), random(2, 25, 6, seed=1), random(2, 200, 5, seed=2)
    seen = (positions, entries.first_BS, entries.last_BS)
    chosen = choose_entries(q, keys, weights, *seen, BLOCK, 4)

    scores = torch.einsum("bshd,bed->bshe", q, keys).relu()
    scores = (scores * weights[..., None]).sum(2)
    visible = visible_by_hand(DOCUMENTS, BLOCK)
    for row, query in ((row, query) for row in range(2) for query in range(200)):
        mine = set(chosen[row, query].tolist()) - {-1}
        best = scores[row, query].masked_fill(~visible[row, query], float("-inf"))
        count = min(4, int(visible[row, query].sum()))
        assert mine == set(best.topk(count).indices.tolist())
        assert (chosen[row, query] >= 0).sum() == count


def operators(S: int) -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Each operator that sees compressed entries, with inputs of two rows of S tokens."""
    positions = torch.arange(S).repeat(2, 1)
    entries = entry_map(positions)
    first, last = entries.first_BS, entries.last_BS
    q, table, lse = random(2, S, H, D), random(2, S // BLOCK, D), random(2, H, S)
    chosen = torch.arange(5, dtype=torch.int32).expand(2, S, 5).contiguous()
    index = (random(2, S, H, D), table, random(2, S, H), positions, first, last, BLOCK, 5)
    return [
        (entry_ops.entry_attention, (q, table, first, last, BLOCK, 0.25)),
        (entry_ops.entry_attention_backward, (q, q, table, q, lse, first, last, BLOCK, 0.25)),
        (chosen_ops.chosen_attention, (q, table, chosen, 0.25)),
        (chosen_ops.chosen_attention_backward, (q, q, table, q, lse, chosen, 0.25)),
        (choose_entries, index),
    ]


@pytest.mark.parametrize("number", range(5))
def test_the_operators_keep_the_rules_of_custom_operators(number: int) -> None:
    operator, arguments = operators(64)[number]
    opcheck = ("test_schema", "test_faketensor")

    torch.library.opcheck(operator._opoverload, arguments, test_utils=opcheck)


class LargestTensor(TorchDispatchMode):
    """The most elements that any operator's output had."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


@pytest.mark.parametrize("number", range(5))
def test_no_operator_has_tokens_times_entries_at_once(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest tensor within an operator is an input, or a tile of a set size."""
    small_tiles(monkeypatch)
    for S in (128, 512):
        operator, arguments = operators(S)[number]
        with LargestTensor() as mode:
            # The kernel itself: under the operator's name a mode sees only the whole.
            operator._init_fn(*arguments)
        largest_input = max(x.numel() for x in arguments if torch.is_tensor(x))
        assert mode.largest <= max(largest_input, 2000, 2 * H * S // BLOCK)


def shared_by(layer_block: int, S: int) -> Any:
    config = DEEPSEEK_V4_PROXY
    with torch.device("meta"):
        context: Context = replace(config, num_mtp_layers=0).build().context
    return context(torch.arange(S)[None]).family[layer_block]


@pytest.mark.parametrize("block", KINDS)
def test_what_a_layer_keeps_for_backward_grows_linearly(block: int) -> None:
    layer = CompressedAttention(DEEPSEEK_V4_PROXY.attention(block), output_scale=1.0)
    initialize(layer, collect_inits(layer), 0)

    def saved_elements(S: int) -> int:
        saved: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        x = random(1, S, DEEPSEEK_V4_PROXY.dim).requires_grad_()
        parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = layer(x, shared_by(block, S))
        del out
        return sum(size for pointer, size in saved.items() if pointer not in parameters)

    constant = 2 * saved_elements(512) - saved_elements(1024)
    assert saved_elements(2048) - constant == 4 * (saved_elements(512) - constant)
    assert saved_elements(2048) < 4.1 * saved_elements(512)
