"""Routers and experts against dense loops; balance."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.initialization import collect_inits, fan_in, initialize
from models.layers.moe import GroupedExperts, LocalDispatcher, MoE, gather_rows
from models.layers.router import Router, RouterConfig
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


def test_balanced_routing_loads_every_expert_alike() -> None:
    moe = make_moe("balanced")
    moe(make_tokens())

    assert moe.router.tokens_per_expert.tolist() == [T * K // E] * E


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
    ],
)
def test_impossible_routers_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RouterConfig(num_experts=E, num_experts_per_token=K, **changes)
