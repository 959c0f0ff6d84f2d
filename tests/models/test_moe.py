"""Routers and experts against dense loops; balance."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.initialization import collect_inits, fan_in, initialize
from models.layers.moe import GroupedExperts, LocalDispatcher, MoE, gather_rows
from models.layers.router import Router, RouterConfig, spreading_stride
from tests.models.helpers import relative_error

T, D, E, K = 60, 16, 12, 3


def make_moe(routing: str = "learned", **changes: object) -> MoE:
    config = RouterConfig(num_experts=E, num_experts_per_token=K, **changes)
    moe = MoE(Router(D, config, routing=routing, init=fan_in(D)), GroupedExperts(E, D, 24))
    initialize(moe, collect_inits(moe), seed=0)
    return moe


def make_tokens(requires_grad: bool = False) -> Tensor:
    tokens = torch.randn(T, D, generator=torch.Generator().manual_seed(1))
    return tokens.requires_grad_(requires_grad)


def dense_loop(moe: MoE, x_TD: Tensor) -> Tensor:
    """Every expert on every token, weighted by zero where it was not chosen."""
    weights_TK, experts_TK = moe.router(x_TD)
    weights_TE = torch.zeros(len(x_TD), E).scatter(1, experts_TK, weights_TK)
    out = torch.zeros_like(x_TD)
    for expert in range(E):
        gate, up = F.linear(x_TD, moe.experts.gate_up[expert]).chunk(2, dim=-1)
        y = F.linear(F.silu(gate) * up, moe.experts.down[expert])
        out = out + weights_TE[:, expert, None] * y
    return out


def test_output_and_gradients_equal_a_dense_loop() -> None:
    moe, x = make_moe(), make_tokens(requires_grad=True)
    grad = torch.randn(T, D, generator=torch.Generator().manual_seed(2))
    targets = [x, *moe.parameters()]

    ours, expected = moe(x), dense_loop(moe, x)
    gradients = torch.autograd.grad(ours, targets, grad)
    expected_gradients = torch.autograd.grad(expected, targets, grad)

    assert relative_error(ours, expected) < 1e-5
    for mine, other in zip(gradients, expected_gradients, strict=True):
        assert relative_error(mine, other) < 1e-5


def test_biases_of_experts_are_those_of_a_dense_loop() -> None:
    """Every expert with an activation of its own and two biases, forward and gradients."""

    def activation(gate: Tensor, up: Tensor) -> Tensor:
        return torch.tanh(gate) * (up + 1)

    config = RouterConfig(num_experts=E, num_experts_per_token=K)
    moe = MoE(
        Router(D, config, routing="learned", init=fan_in(D)),
        GroupedExperts(E, D, 24, activation=activation, bias=True),
    )
    initialize(moe, collect_inits(moe), seed=0)
    generator = torch.Generator().manual_seed(5)
    experts = moe.experts
    with torch.no_grad():
        for bias in (experts.gate_up_bias, experts.down_bias):
            bias.copy_(torch.randn(bias.shape, generator=generator))
    x, grad = make_tokens(requires_grad=True), torch.randn(T, D, generator=generator)
    targets = [x, *moe.parameters()]

    weights_TK, experts_TK = moe.router(x)
    expected = torch.zeros(T, D)
    for expert in range(E):
        weight = (weights_TK * (experts_TK == expert)).sum(1, keepdim=True)
        hidden = F.linear(x, experts.gate_up[expert], experts.gate_up_bias[expert])
        y = F.linear(activation(*hidden.chunk(2, -1)), experts.down[expert])
        expected = expected + weight * (y + experts.down_bias[expert])
    ours = moe(x)

    assert relative_error(ours, expected) < 1e-5
    pairs = (torch.autograd.grad(out, targets, grad) for out in (ours, expected))
    for mine, other in zip(*pairs, strict=True):
        assert relative_error(mine, other) < 1e-5


def test_dispatch_sorts_stably_and_combine_restores() -> None:
    experts = torch.tensor([[2, 0], [2, 1], [0, 2]])
    x = torch.arange(3.0)[:, None] * torch.ones(3, 2)
    dispatcher = LocalDispatcher(num_experts=4)

    rows, offsets, state = dispatcher.dispatch(x, experts)
    out = dispatcher.combine(rows, torch.tensor([[1.0, 2.0]] * 3), state)

    assert rows[:, 0].tolist() == [0, 2, 1, 0, 1, 2]
    assert offsets.tolist() == [2, 3, 6, 6] and offsets.dtype == torch.int32
    assert torch.equal(out, 3 * x)


def test_gathered_rows_have_the_gradients_of_indexing() -> None:
    x = torch.randn(5, 4, requires_grad=True)
    order = torch.randperm(10, generator=torch.Generator().manual_seed(0))
    inverse = torch.argsort(order)
    grad = torch.randn(10, 4)

    ours = torch.autograd.grad(gather_rows(x, order // 2, inverse, 2), x, grad)[0]

    torch.testing.assert_close(ours, torch.autograd.grad(x[order // 2], x, grad)[0])


@pytest.mark.parametrize("routing", ["balanced", "balanced_strided"])
def test_balanced_routing_loads_every_expert_alike(routing: str) -> None:
    moe = make_moe(routing)
    moe(make_tokens())

    assert moe.router.tokens_per_expert.tolist() == [T * K // E] * E


def test_balanced_routing_takes_neighbours_and_strided_takes_distant_experts() -> None:
    """12 experts, 3 per token: a stride of 4 has a factor in common with 12, so it is 5."""
    neighbours = make_moe("balanced").router(make_tokens()).experts_TK
    distant = make_moe("balanced_strided").router(make_tokens()).experts_TK

    assert neighbours[:3].tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert distant[:3].tolist() == [[0, 5, 10], [3, 8, 1], [6, 11, 4]]


@pytest.mark.parametrize(
    ("num_experts", "per_token", "ranks", "neighbours", "distant"),
    [
        (256, 8, 64, 2, 8),  # DeepSeek V3: the published forced balance touches 2 ranks of 64
        (384, 8, 64, 2, 8),  # Kimi K2 has 6 experts on a rank
        (128, 8, 32, 2, 8),  # Qwen3 MoE
        (160, 6, 32, 2, 6),  # DeepSeek V2
        (64, 6, 8, 2, 6),  # 8 experts on a rank
        (32, 4, 8, 1, 4),  # GPT-OSS 20B
        (7, 7, 7, 7, 7),
    ],
)
def test_strides_spread_a_token_over_as_many_ranks_as_it_has_experts(
    num_experts: int, per_token: int, ranks: int, neighbours: int, distant: int
) -> None:
    """The largest number of ranks that a token visits, over a whole round of turns."""
    per_rank = num_experts // ranks
    for stride, expected in ((1, neighbours), (spreading_stride(num_experts, per_token), distant)):
        turns = torch.arange(num_experts * per_token).view(-1, per_token) * stride % num_experts
        visited = [len(set(row)) for row in (turns // per_rank).tolist()]
        chosen = [len(set(row)) for row in turns.tolist()]
        assert max(visited) == expected and set(chosen) == {per_token}
        assert torch.bincount(turns.flatten()).tolist() == [per_token] * num_experts
        if stride > 1:
            assert min(visited) == expected


def test_random_routing_is_the_same_again_and_visits_distinct_experts() -> None:
    router = make_moe("random").router
    first, second = router(make_tokens()), router(make_tokens())

    assert torch.equal(first.experts_TK, second.experts_TK)
    assert all(len(set(row)) == K for row in first.experts_TK.tolist())
    # The counts of 60 tokens each choosing 3 of 12 have mean 15 and standard deviation 3.4.
    counts = router.tokens_per_expert / 2
    assert counts.sum() == T * K and (counts - 15).abs().max() < 4 * 3.4


def test_balanced_and_random_routing_weigh_by_the_real_scores() -> None:
    router = make_moe("balanced", normalize_weights=False).router
    weights, experts = router(make_tokens())

    scores = F.linear(make_tokens(), router.weight).sigmoid()
    torch.testing.assert_close(weights, scores.gather(1, experts))


def test_group_limited_routing_keeps_to_the_best_groups() -> None:
    """Against the definition: the groups with the largest sums of two, then the best in them."""
    router = make_moe(num_groups=4, num_limited_groups=2).router
    with torch.no_grad():
        router.expert_bias.copy_(0.1 * torch.randn(E, generator=torch.Generator().manual_seed(3)))
    _, experts = router(make_tokens())

    preferences = F.linear(make_tokens(), router.weight).sigmoid() + router.expert_bias
    for row, chosen in zip(preferences.tolist(), experts.tolist(), strict=True):
        groups = [row[start : start + 3] for start in range(0, E, 3)]
        sums = [sum(sorted(group)[-2:]) for group in groups]
        kept = sorted(range(4), key=lambda g: sums[g])[-2:]
        candidates = [e for e in range(E) if e // 3 in kept]
        assert set(chosen) == set(sorted(candidates, key=lambda e: row[e])[-K:])


def test_a_group_may_be_judged_by_its_best_expert_alone() -> None:
    """As in DeepSeek V2: the best expert is in the best group, so it is always chosen."""
    router = make_moe(
        num_groups=4, num_limited_groups=2, num_group_votes=1, score_function="softmax"
    ).router
    _, experts = router(make_tokens())

    scores = F.linear(make_tokens(), router.weight).softmax(-1)
    for row, chosen in zip(scores.tolist(), experts.tolist(), strict=True):
        best = [max(row[start : start + 3]) for start in range(0, E, 3)]
        kept = sorted(range(4), key=lambda g: best[g])[-2:]
        candidates = [e for e in range(E) if e // 3 in kept]
        assert set(chosen) == set(sorted(candidates, key=lambda e: row[e])[-K:])


def test_a_learned_bias_moves_choice_and_weights_alike() -> None:
    """A softmax over the logits of the chosen experts, bias included, as in GPT-OSS."""
    router = make_moe(score_function="softmax", bias=True, normalize_eps=0.0).router
    with torch.no_grad():
        router.bias.copy_(torch.randn(E, generator=torch.Generator().manual_seed(6)))
    weights, experts = router(make_tokens())

    logits = F.linear(make_tokens(), router.weight, router.bias)
    chosen = logits.topk(K, sorted=False)
    assert torch.equal(experts.sort().values, chosen.indices.sort().values)
    torch.testing.assert_close(weights, logits.gather(1, experts).softmax(-1))


def test_softmax_scores_are_used_as_they_are() -> None:
    router = make_moe(score_function="softmax", normalize_weights=False).router
    weights, experts = router(make_tokens())

    scores = F.linear(make_tokens(), router.weight).softmax(-1)
    torch.testing.assert_close(weights, scores.topk(K, sorted=False).values)
    assert torch.equal(scores.gather(1, experts), weights)


def test_bias_updates_even_the_load() -> None:
    router = make_moe().router
    tokens = torch.randn(2000, D, generator=torch.Generator().manual_seed(4)) + 0.5

    def spread() -> float:
        router.tokens_per_expert.zero_()
        router(tokens)
        counts = router.tokens_per_expert.float()
        return (counts.max() / counts.mean()).item()

    before = spread()
    for _ in range(60):
        router.update_bias(router.tokens_per_expert, 1e-2)
        spread()

    assert before > 1.5
    assert spread() < 1.1
    assert router.expert_bias.sum().abs() < 1e-4


def test_the_bias_changes_the_choice_and_not_the_weights() -> None:
    router = make_moe(normalize_weights=False).router
    router.expert_bias[5] = 10.0
    weights, experts = router(make_tokens())

    assert (experts == 5).any(dim=1).all()
    assert weights.max() <= 1.0


def test_tokens_are_counted_in_training_only() -> None:
    router = make_moe().router.eval()
    router(make_tokens())
    assert router.tokens_per_expert.sum() == 0

    router.train()(make_tokens())
    assert router.tokens_per_expert.sum() == T * K


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_groups": 5}, "12 experts do not divide into 5 groups"),
        ({"num_groups": 4, "num_limited_groups": 5}, "5 limited groups out of 4"),
        ({"num_groups": 12, "num_limited_groups": 2}, "3 experts per token out of the 2"),
        ({"num_groups": 4, "num_group_votes": 0}, "judged by its 0 best experts"),
    ],
)
def test_impossible_routers_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RouterConfig(num_experts=E, num_experts_per_token=K, **changes)
