"""The ring: what travels, what each rank keeps and computes, with latents as without."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.instruments.collectives import CollectiveCounter
from bench.instruments.memory import TensorBytes
from bench.instruments.observation import Observation
from bench.instruments.operators import OperatorCounter
from models.batch import Context
from models.layers.attention import Expansion
from models.layers.mla import MultiHeadLatentAttention
from parallel.check import check_layout
from parallel.chunks import Chunks
from parallel.context import divide_attention
from parallel.plan import ContextMethod, ParallelPlan, Remat
from tests.models.helpers import pack
from tests.parallel.cases import count_collectives, tiny
from tests.parallel.test_families import FAMILIES, proxy
from tests.rank_pool import RankPool
from workloads.build import build_whole

B, DIM, H, LATENT, NOPE, ROPE, DV = 2, 32, 4, 24, 12, 8, 16
WIDTH = LATENT + ROPE
DOCUMENTS = [[3, 20, 41], [30, 1, 33]]
"""Of 64 tokens, which end within chunks of 8 tokens and go on over several."""


def latent_attention(num_heads: int = H, dtype: torch.dtype = torch.float32) -> Any:
    """Return the same layer whenever it is called."""
    with torch.device("meta"):
        layer = MultiHeadLatentAttention(
            DIM,
            num_heads,
            q_lora_rank=0,
            kv_lora_rank=LATENT,
            qk_nope_head_dim=NOPE,
            qk_rope_head_dim=ROPE,
            v_head_dim=DV,
            norm_eps=1e-6,
            scale=(NOPE + ROPE) ** -0.5,
            output_scale=1.0,
        )
    layer.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(2)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    return layer.to(dtype)


def inputs(positions_BS: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Context]:
    """Return the input of whole sequences and their context."""
    generator = torch.Generator().manual_seed(0)
    x_BSD = torch.randn(*positions_BS.shape, DIM, generator=generator)
    angles_BSR = positions_BS[..., None] / torch.arange(1, 1 + ROPE // 2)
    return x_BSD.to(dtype), Context(positions_BS, angles_BSR.cos(), angles_BSR.sin())


def part(x_BSD: Tensor, context: Context, chunks: Chunks) -> tuple[Tensor, Context]:
    """Return what a rank has of an input and its context."""
    rotations = {name: chunks.take(getattr(context, name)) for name in ("cos_BSR", "sin_BSR")}
    return chunks.take(x_BSD).requires_grad_(), context._replace(**rotations)


def run(layer: Any, x_BSD: Tensor, context: Context, weights_BSD: Tensor) -> list[Tensor]:
    """Return the output and the gradients of the input and of each parameter."""
    out = layer(x_BSD, context)
    wanted = [x_BSD, *layer.parameters()]
    return [out, *torch.autograd.grad(out, wanted, weights_BSD)]


def errors_of_a_divided_layer(method: ContextMethod, dtype: torch.dtype) -> list[float]:
    """Return errors relative to the layer on one rank in float32: output, input, parameters."""
    chunks = Chunks(dist.get_world_size(), dist.get_rank())
    positions = pack(DOCUMENTS, 8).positions_BS
    x, context = inputs(positions)
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    expected = run(latent_attention(), x.requires_grad_(), context, weights)
    layer = latent_attention(dtype=dtype)
    divide_attention(layer.core, chunks, dist.group.WORLD, method)
    mine, context = part(x.detach().to(dtype), context, chunks)
    found = run(layer, mine, context, chunks.take(weights).to(dtype))
    found = [tensor.float() for tensor in found]
    for gradient in found[2:]:
        dist.all_reduce(gradient)
    expected[:2] = [chunks.take(tensor) for tensor in expected[:2]]
    return [float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]


@pytest.mark.distributed
@pytest.mark.parametrize("method", ["ring", "gather", "ulysses"])
def test_a_divided_layer_of_latent_attention_equals_the_whole(
    four_ranks: RankPool, method: ContextMethod
) -> None:
    """Output, and gradients of the input and of each weight, those that expand latents included."""
    for errors in four_ranks.run(errors_of_a_divided_layer, method, torch.float32):
        assert errors == pytest.approx([0] * len(errors), abs=2e-6)


@pytest.mark.distributed
def test_in_bfloat16_the_ring_is_as_exact_as_one_rank(
    one_rank: RankPool, four_ranks: RankPool
) -> None:
    """Blocks are merged and gradients summed in float32: no rounding grows with the ranks."""
    (alone,) = one_rank.run(errors_of_a_divided_layer, "gather", torch.bfloat16)

    for errors in four_ranks.run(errors_of_a_divided_layer, "ring", torch.bfloat16):
        assert errors == pytest.approx([0] * len(errors), abs=1.5 * max(alone))


@pytest.mark.distributed
@pytest.mark.parametrize(("remat", "journeys"), [("selective", 3), ("full", 4)])
def test_the_forward_goes_around_again_only_where_attention_is_not_kept(
    two_ranks: RankPool, remat: Remat, journeys: int
) -> None:
    workload = tiny("deepseek_v3", 2, cp=2, context="ring", remat=remat)
    layers = workload.model.num_layers + workload.model.num_mtp_layers

    for counts in two_ranks.run(count_collectives, workload):
        assert counts["cp"]["send"]["count"] == journeys * layers


class Core:
    """The attention of a layer on one of ``num_ranks``, and what its gradients are of."""

    def __init__(self, method: ContextMethod, num_ranks: int, S: int) -> None:
        self.method = method
        self.layer = latent_attention()
        self.positions = torch.arange(S).repeat(B, 1)
        shapes = (H, NOPE + ROPE), (LATENT,), (1, ROPE)
        tokens = [torch.randn(B, S // num_ranks, *shape) for shape in shapes]
        self.leaves = [x.requires_grad_() for x in (*tokens, self.layer.kv_up_proj.weight)]

    def attend(self, chunks: Chunks) -> Tensor:
        """Return the output for the tokens of a rank."""
        core, layer = self.layer.core, self.layer
        divide_attention(core, chunks, dist.group.WORLD, self.method)
        q, *sources, _ = self.leaves
        expansion = Expansion(layer.kv_up_proj, layer.keys_and_values)
        empty = torch.empty(0)
        return core.mix(q, tuple(sources), Context(self.positions, empty, empty), expansion)


@contextmanager
def fake_rank(rank: int, num_ranks: int) -> Iterator[Chunks]:
    """One rank of a group whose others do not exist: whatever it receives is arbitrary."""
    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
    try:
        yield Chunks(num_ranks, rank)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("num_heads", [2, 4])
@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 2), (torch.float32, 4)], ids=str)
def test_latents_and_their_gradients_travel_however_many_heads_there_are(
    num_heads: int, dtype: torch.dtype, size: int
) -> None:
    """N - 1 times each: sources in forward, again in backward, and float32 gradients there."""
    S, N = 32, 4
    x, context = inputs(torch.arange(S).repeat(B, 1), dtype)
    counter = CollectiveCounter()
    with fake_rank(1, N) as chunks, Observation([counter]):
        layer = latent_attention(num_heads, dtype)
        divide_attention(layer.core, chunks, dist.group.WORLD, "ring")
        layer(*part(x, context, chunks)).sum().backward()
        (counts,) = counter.report().values()
    values = (N - 1) * (B * S // N) * WIDTH
    moved = {"count": 3 * (N - 1), "bytes": values * (2 * size + 4)}

    assert counts == {"send": moved, "recv": moved}


def test_a_backward_in_two_parts_goes_around_once() -> None:
    """As zero-bubble schedules split it: the weight's gradient is kept until it is asked for."""
    counter = OperatorCounter()
    core = Core("ring", 1, 32)
    grad, other = (torch.randn(B, 32, H, DV) for _ in range(2))
    with fake_rank(0, 1) as chunks:
        out = core.attend(chunks)
        *inputs, weight = core.leaves

        def backward(asked: list[Tensor], of: Tensor) -> tuple[Tensor, ...]:
            return torch.autograd.grad(out, asked, of, retain_graph=True)

        expected, (another,) = backward([*inputs, weight], grad), backward([weight], other)
        first = backward(inputs, grad)
        with Observation([counter]):
            second = backward([weight], grad)
        backward(inputs, grad)
        (unrelated,) = backward([weight], other)

    assert all(a.equal(b) for a, b in zip((*first, *second), expected, strict=True))
    assert unrelated.equal(another)
    assert "titanbench::attention_backward" not in counter.report()["by_operator"]


class Scores:
    """Counts the products of a query with a key that causality leaves, by call of the operator."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def see(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> None:
        if operator is torch.ops.titanbench.attention.default:
            q, k, _, positions, *_ = args
            first = positions.shape[1] - q.shape[1]
            num_keys = k.shape[1]
            self.calls.append(sum(min(first + i + 1, num_keys) for i in range(q.shape[1])))


def scores_of(method: ContextMethod, rank: int, num_ranks: int, S: int) -> list[int]:
    """Return what one rank's forward computes."""
    x, context = inputs(torch.arange(S)[None])
    scores = Scores()
    with fake_rank(rank, num_ranks) as chunks, Observation([scores]), torch.no_grad():
        layer = latent_attention()
        divide_attention(layer.core, chunks, dist.group.WORLD, method)
        layer(*part(x, context, chunks))
    return scores.calls


@pytest.mark.parametrize("num_ranks", [2, 5])
def test_every_rank_computes_as_many_scores_of_gathered_keys(num_ranks: int) -> None:
    S = 4 * 2 * num_ranks
    by_rank = [sum(scores_of("gather", rank, num_ranks, S)) for rank in range(num_ranks)]

    assert by_rank == [S * (S + 1) // 2 // num_ranks] * num_ranks


@pytest.mark.parametrize("num_ranks", [2, 5])
def test_every_rank_of_the_ring_computes_as_many_scores_at_each_step(num_ranks: int) -> None:
    """Two chunks that see themselves and one between them, then two whole chunks at each step."""
    c = 4
    own, whole = c * (c + 1) // 2, c * c

    for rank in range(num_ranks):
        calls = scores_of("ring", rank, num_ranks, c * 2 * num_ranks)
        assert calls == [own, own, whole] + [whole, whole] * (num_ranks - 1)


class Memory:
    """What a rank's attention keeps for backward, and its peak over forward and backward, bytes."""

    def __init__(self, method: ContextMethod, num_ranks: int, S: int) -> None:
        core = Core(method, num_ranks, S)
        standing = TensorBytes([core.positions, *core.leaves])
        with fake_rank(num_ranks // 2, num_ranks) as chunks, standing, Observation([standing]):
            out = core.attend(chunks)
            self.kept = standing.live_bytes - standing.standing_bytes
            out.sum().backward()
        self.peak = standing.report()["peak_tensor_bytes"] - standing.standing_bytes


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_a_rank_of_the_ring_keeps_its_own_tokens_alone(num_ranks: int) -> None:
    """Beside its inputs: the output and the log-sum-exp of each head."""
    S = 256

    assert Memory("ring", num_ranks, S).kept == 4 * B * S // num_ranks * H * (DV + 1)


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_gathered_keys_are_kept_whole_on_every_rank(num_ranks: int) -> None:
    """The latents of all tokens, what they expand to, the keys put together; outputs by chunk."""
    S = 256
    s = S // num_ranks
    whole = WIDTH + H * (NOPE + DV) + H * (NOPE + ROPE)
    own = H * (2 * DV + 1)

    assert Memory("gather", num_ranks, S).kept == 4 * B * (S * whole + s * own)


def test_the_peak_falls_with_the_ranks_of_the_ring_and_not_with_those_of_gather() -> None:
    """But for what no division makes smaller: positions, the gradient of the expansion."""
    S = 256
    keys_and_values = 4 * B * S * H * (NOPE + ROPE + DV)
    alone, ring, gather = Memory("ring", 1, S), Memory("ring", 8, S), Memory("gather", 8, S)

    assert ring.peak < 1.4 * alone.peak / 8
    assert ring.peak < keys_and_values < gather.peak


def test_attention_with_sinks_refuses_to_go_around() -> None:
    plan = ParallelPlan(cp=2, context="ring").resolve(2)

    with pytest.raises(ValueError, match=r"plan\.context=ring: .* per head.*plan\.context=gather"):
        check_layout(build_whole(proxy(FAMILIES["gpt_oss"], 2)), plan)
