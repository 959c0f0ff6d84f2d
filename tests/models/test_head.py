"""The chunked loss against the cross-entropy of PyTorch over whole logits."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from models.batch import IGNORE
from models.initialization import collect_inits, fan_in, initialize
from models.layers.head import LogitScaling, OutputHead
from tests.models.helpers import relative_error

B, S, D, V = 2, 50, 32, 72


def make_head(scaling: LogitScaling, chunk_tokens: int = 16) -> OutputHead:
    head = OutputHead(D, V, init=fan_in(D), chunk_tokens=chunk_tokens, scaling=scaling)
    initialize(head, collect_inits(head), seed=0)
    return head


def make_inputs(num_heads: int) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    hidden = [3 * torch.randn(B, S, D, generator=generator) for _ in range(num_heads)]
    labels = [torch.randint(0, V, (B, S), generator=generator) for _ in range(num_heads)]
    for label in labels:
        label[:, ::7] = IGNORE
    return [h.requires_grad_() for h in hidden], labels


def whole_losses(
    head: OutputHead, hidden: list[Tensor], labels: list[Tensor], weight: Tensor
) -> list[Tensor]:
    multiplier, cap = head.scaling
    losses = []
    for states, targets in zip(hidden, labels, strict=True):
        logits = F.linear(states, weight) * multiplier
        logits = cap * torch.tanh(logits / cap) if cap else logits
        losses.append(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
    return losses


@pytest.mark.parametrize("scaling", [LogitScaling(), LogitScaling(0.5, 2.0)])
@pytest.mark.parametrize("num_heads", [1, 3])
def test_losses_and_gradients_equal_whole_logits(scaling: LogitScaling, num_heads: int) -> None:
    """Main loss plus 0.3 times the mean of the further heads, with and without soft cap."""
    head, (hidden, labels) = make_head(scaling), make_inputs(num_heads)
    losses = head(hidden, labels, 0.3)
    weight = head.weight.detach().clone().requires_grad_()
    main, *further = whole_losses(head, hidden, labels, weight)
    mtp = torch.stack(further).mean() if further else torch.zeros(())
    expected = main + 0.3 * mtp

    # Divided as a trainer does, so that the factor from outside is in the gradients.
    ours = torch.autograd.grad(losses.total / 7, [*hidden, head.weight])
    theirs = torch.autograd.grad(expected / 7, [*hidden, weight])

    assert losses.total.item() == pytest.approx(expected.item(), rel=1e-5)
    assert losses.main_sum.item() == pytest.approx(main.item(), rel=1e-5)
    assert losses.mtp_sum.item() == pytest.approx(mtp.item(), rel=1e-5)
    assert not losses.main_sum.requires_grad and not losses.mtp_sum.requires_grad
    for mine, other in zip(ours, theirs, strict=True):
        assert relative_error(mine, other) < 1e-5


def test_bfloat16_reduces_in_float32() -> None:
    """Many chunks add up as well as one does."""
    (hidden,), labels = make_inputs(1)
    gradients = []
    for chunk_tokens in (4, B * S):
        head = make_head(LogitScaling(), chunk_tokens).bfloat16()
        losses = head([hidden.bfloat16()], labels)
        assert losses.total.dtype == torch.float32
        gradients.append(torch.autograd.grad(losses.total, head.weight)[0].float())

    assert relative_error(*gradients) < 2 * torch.finfo(torch.bfloat16).eps


def test_without_gradients_only_the_loss_is_computed() -> None:
    head, (hidden, labels) = make_head(LogitScaling()), make_inputs(1)
    with torch.no_grad():
        losses = head(hidden, labels)

    expected = whole_losses(head, hidden, labels, head.weight)[0].item()
    assert losses.total.item() == pytest.approx(expected, rel=1e-5)
    assert not losses.total.requires_grad


def test_a_second_backward_is_refused_and_not_wrong() -> None:
    head, (hidden, labels) = make_head(LogitScaling()), make_inputs(1)
    total = head(hidden, labels).total
    total.backward(retain_graph=True)

    with pytest.raises(AssertionError, match="second backward"):
        total.backward()


def test_the_logits_of_the_sequence_never_exist() -> None:
    shapes: set[tuple[int, ...]] = set()

    class Shapes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            outputs = out if isinstance(out, tuple | list) else (out,)
            shapes.update(tuple(x.shape) for x in outputs if isinstance(x, Tensor))
            return out

    head, (hidden, labels) = make_head(LogitScaling(0.5, 2.0)), make_inputs(2)
    with Shapes():
        head(hidden, labels, 0.3).total.backward()

    # 200 tokens in chunks of 16, a rest of 8, and the transposed weight.
    assert {shape[0] for shape in shapes if len(shape) == 2 and shape[1] == V} == {16, 8, D}
