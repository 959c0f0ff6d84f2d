"""Linear attention of chunks on several ranks equals that of the whole sequence."""

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from bench.instruments.collectives import CollectiveCounter
from bench.instruments.memory import TensorBytes
from bench.instruments.observation import Observation
from bench.instruments.operators import OperatorCounter
from models.batch import Context
from models.kimi_k3 import KIMI_K3_PROXY
from models.layers.delta_rule import DeltaRuleCore
from models.protocol import ModelConfig
from models.qwen3_5 import QWEN3_5_PROXY
from parallel.check import check_layout
from parallel.chunks import Chunks
from parallel.linear_attention import divided_delta_rule
from parallel.plan import ContextMethod, ParallelPlan
from parallel.states import carry
from tests.models.helpers import pack, relative_error
from tests.parallel.cases import FP32, train
from tests.parallel.test_divided_sequences import SMOOTH
from tests.parallel.test_equivalence import assert_same
from tests.rank_pool import RankPool
from workloads.build import build_whole
from workloads.workload import Workload

pytestmark = pytest.mark.distributed
D, DV = 16, 8
FLOAT32_BYTES = 4
# Documents that begin within a chunk, at the edges of chunks, and one over all of them.
TWO_RANKS = [[3, 9, 20], [8, 8, 16], [32]]
FOUR_RANKS = [[3, 20, 41], [16, 24, 24], [64]]
LONG = [[700, 2000, 1700]]
"""Two ranks: chunks of 1,100 tokens, more than what an operator has in memory at once."""
ZERO_BUBBLE = {
    "cp": 2,
    "pp": 2,
    "schedule": "ZBVZeroBubble",
    "stages_per_rank": 2,
    "microbatches": 4,
}
FAMILIES: dict[str, ModelConfig] = {"qwen3_5": QWEN3_5_PROXY, "kimi_k3": KIMI_K3_PROXY}


class Case:
    """A core and what it takes, as a whole and this rank's part of it."""

    def __init__(
        self,
        documents: list[list[int]],
        *,
        num_heads: int = 3,
        num_qk_heads: int = 1,
        num_decays: int = 1,
        method: ContextMethod = "gather",
        dtype: torch.dtype = torch.float64,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        positions = pack(documents, 8).positions_BS
        B, S = positions.shape

        def normal(*shape: int) -> Tensor:
            return torch.randn(B, S, *shape, generator=generator, dtype=dtype)

        q, k = normal(num_qk_heads, D), normal(num_qk_heads, D)
        log_decay = -0.02 * normal(num_heads, num_decays).square()
        # Small steps: a state lasts for several chunks.
        beta = 0.3 * normal(num_heads).sigmoid()
        inputs = (q, k, normal(num_heads, DV), log_decay, beta)
        self.whole = [x.requires_grad_() for x in inputs]
        self.weights = normal(num_heads, DV)
        group = torch.distributed.group.WORLD
        self.chunks = Chunks(group.size(), group.rank())
        self.mine = [self.chunks.take(x).detach().requires_grad_() for x in self.whole]
        self.my_weights = self.chunks.take(self.weights)
        self.context = Context(positions, torch.empty(0), torch.empty(0))
        self.core = DeltaRuleCore(num_heads, qk_head_dim=D, v_head_dim=DV)
        divided = group.size() > 1
        self.divided = (
            divided_delta_rule(self.core, self.chunks, group, method) if divided else self.core
        )

    def step(self) -> list[Tensor]:
        """Return the output and all gradients of this rank's part."""
        out = self.divided(*self.mine, self.context)
        return [out, *torch.autograd.grad(out, self.mine, self.my_weights)]

    def expected(self) -> list[Tensor]:
        """Return the same for the whole sequence, by one call of the operator."""
        out = self.core(*self.whole, self.context)
        return [out, *torch.autograd.grad(out, self.whole, self.weights)]


def errors(*args: Any, **kwargs: Any) -> list[float]:
    case = Case(*args, **kwargs)
    pairs = zip(case.step(), case.expected(), strict=True)
    return [relative_error(ours, case.chunks.take(whole)) for ours, whole in pairs]


def errors_per_channel(documents: list[list[int]]) -> list[float]:
    return errors(documents, num_decays=D)


def errors_of_exchanged_heads(documents: list[list[int]]) -> list[float]:
    return errors(documents, num_heads=4, num_qk_heads=2, method="ulysses")


@pytest.mark.parametrize("case", [errors, errors_per_channel], ids=lambda case: case.__name__)
@pytest.mark.parametrize("documents", [TWO_RANKS, LONG], ids=["short", "long"])
def test_two_ranks_pass_states_of_any_number_of_heads(
    two_ranks: RankPool, case: Any, documents: list[list[int]]
) -> None:
    """Output and the gradients of all five inputs, in float64; three heads on two ranks."""
    for found in two_ranks.run(case, documents):
        assert max(found) < 1e-11


@pytest.mark.parametrize("case", [errors, errors_per_channel], ids=lambda case: case.__name__)
def test_four_ranks_pass_states(four_ranks: RankPool, case: Any) -> None:
    for found in four_ranks.run(case, FOUR_RANKS):
        assert max(found) < 1e-11


def test_exchanged_heads_see_the_whole_sequence(two_ranks: RankPool) -> None:
    for found in two_ranks.run(errors_of_exchanged_heads, TWO_RANKS):
        assert max(found) < 1e-11


def errors_in_bfloat16(documents: list[list[int]]) -> list[float]:
    return errors(documents, num_decays=D, dtype=torch.bfloat16)


def test_in_bfloat16_results_differ_by_their_rounding_alone(two_ranks: RankPool) -> None:
    """States travel in float32, whatever the dtype of the tokens."""
    for found in two_ranks.run(errors_in_bfloat16, TWO_RANKS):
        assert max(found) <= 2**-7


def test_only_an_exchange_needs_heads_that_the_ranks_divide() -> None:
    model = replace(QWEN3_5_PROXY, num_linear_heads=3, num_linear_qk_heads=1)
    network = build_whole(replace(workload("qwen3_5", 1, "text"), model=model))
    check_layout(network, ParallelPlan(cp=2).resolve(2))
    check_layout(network, ParallelPlan(cp=2, context="ring").resolve(2))

    with pytest.raises(ValueError, match=r"plan\.cp=2 does not divide the 1 \(of tp=1\) heads"):
        check_layout(network, ParallelPlan(cp=2, context="ulysses").resolve(2))


def test_carrying_states_is_applying_one_map_after_the_other() -> None:
    """From zero: b0, then M1 b0 + b1, then M2 (M1 b0 + b1) + b2 before the fourth."""
    maps = torch.randn(2, 4, 3, 5, 5 + 2, dtype=torch.float64)
    (M1, M2), (b0, b1, b2) = maps[:, 1:3, ..., :5].unbind(1), maps[:, :3, ..., 5:].unbind(1)
    states = carry(maps)

    expected = (torch.zeros_like(b0), b0, M1 @ b0 + b1, M2 @ (M1 @ b0 + b1) + b2)
    assert relative_error(states, torch.stack(expected, dim=1)) < 1e-14


def counts(sequence_length: int) -> dict[str, dict[str, int]]:
    case = Case([[sequence_length]] * 2, dtype=torch.float32)
    counter = CollectiveCounter()
    with Observation([counter]):
        case.step()
    (by_kind,) = counter.report().values()
    return by_kind


@pytest.mark.parametrize("sequence_length", [128, 256])
def test_what_travels_does_not_grow_with_the_sequence(
    two_ranks: RankPool, four_ranks: RankPool, sequence_length: int
) -> None:
    """One gather forward, one backward: D (D + Dv) values for each of the 2N chunks and heads."""
    for pool, num_ranks in ((two_ranks, 2), (four_ranks, 4)):
        values = 2 * num_ranks * 2 * 3 * D * (D + DV)
        moved = {"count": 2, "bytes": 2 * values * FLOAT32_BYTES}
        assert pool.run(counts, sequence_length) == [{"all_gather": moved}] * num_ranks


def flops(sequence_length: int) -> int:
    case = Case([[sequence_length]], dtype=torch.float32)
    counter = OperatorCounter()
    with Observation([counter]):
        case.step()
    return counter.report()["executed_flops"]


def test_the_second_scans_and_the_sum_over_chunks_are_counted(
    one_rank: RankPool, two_ranks: RankPool
) -> None:
    """Beside half of what one rank executes: three products of D (D + Dv) a token, four of D Dv.

    And forward and backward one product of D D Dv for each chunk but the last.
    """
    S, num_heads = 256, 3
    (alone,) = one_rank.run(flops, S)
    scans = S // 2 * num_heads * (2 * 3 * D * (D + DV) + 2 * 4 * D * DV)
    sums = 2 * 3 * num_heads * 2 * D * D * DV

    assert alone == 4 * S * num_heads * 2 * 4 * D * DV
    assert two_ranks.run(flops, S) == [alone // 2 + scans + sums] * 2


def memory(sequence_length: int) -> tuple[int, int]:
    """Return the bytes kept for backward, and the peak of the tensors of both passes."""
    case = Case([[sequence_length]], dtype=torch.float32)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        TensorBytes([*case.mine, case.my_weights, case.context.positions_BS]) as live,
        Observation([live]),
    ):
        case.step()
    return sum(kept.values()), live.report()["peak_tensor_bytes"]


def test_memory_falls_as_ranks_are_added(
    one_rank: RankPool, two_ranks: RankPool, four_ranks: RankPool
) -> None:
    """A rank keeps its tokens, and for each of its chunks M and a state per span begun."""
    S, num_heads, state = 8192, 3, 3 * D * DV * FLOAT32_BYTES
    token = (2 * D + num_heads * (DV + 1 + 1)) * FLOAT32_BYTES + 8
    ((kept, peak),) = one_rank.run(memory, S)

    assert kept == S * token + S // 1024 * state
    for pool, num_ranks in ((two_ranks, 2), (four_ranks, 4)):
        spans = S // num_ranks // 1024
        matrices = 2 * num_heads * D * D * FLOAT32_BYTES
        for kept_here, peak_here in pool.run(memory, S):
            assert kept_here == S // num_ranks * token + spans * state + matrices
            assert peak_here < 1.1 * peak / num_ranks


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of texts of up to 40 bytes and of 100: beside and across chunks of 16 tokens."""
    folder: Path = tmp_path_factory.mktemp("documents")
    for index in range(40):
        text = "the state that a document leaves is passed on, from one chunk to the next; " * 2
        (folder / f"{index:02}.txt").write_text(text[: 100 if index % 4 == 0 else 5 + index])
    return str(folder)


def workload(family: str, world_size: int, data: str, **plan: Any) -> Workload:
    return Workload(
        name="tiny",
        model=FAMILIES[family],
        sequence_length=64,
        global_batch_size=4,
        data=data,
        precision=FP32,
        training=SMOOTH,
        plan=ParallelPlan(**plan).resolve(world_size),
    )


def assert_steps_equal_one_rank(
    one_rank: RankPool, pool: RankPool, family: str, data: str, plan: dict[str, Any]
) -> None:
    divided = workload(family, pool.world_size, data, **plan)
    check_layout(build_whole(divided), divided.plan)
    (alone,) = one_rank.run(train, workload(family, 1, data))
    assert_same(pool.run(train, divided), alone, relative=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_three_steps_of_two_ranks_equal_one(
    one_rank: RankPool, two_ranks: RankPool, family: str, documents: str
) -> None:
    assert_steps_equal_one_rank(one_rank, two_ranks, family, documents, {"cp": 2})


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "plan",
    [
        {"cp": 2, "context": "ulysses"},
        {"cp": 2, "remat": "full", "microbatches": 2},
        {"cp": 2, "remat": "selective"},
    ],
    ids=str,
)
def test_other_layouts_of_two_ranks_equal_one(
    one_rank: RankPool, two_ranks: RankPool, family: str, documents: str, plan: dict[str, Any]
) -> None:
    assert_steps_equal_one_rank(one_rank, two_ranks, family, documents, plan)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "plan", [{"cp": 4}, {"cp": 2, "tp": 2}, {"cp": 2, "ep": 4}, ZERO_BUBBLE], ids=str
)
def test_four_ranks_equal_one(
    one_rank: RankPool, four_ranks: RankPool, family: str, documents: str, plan: dict[str, Any]
) -> None:
    assert_steps_equal_one_rank(one_rank, four_ranks, family, documents, plan)
