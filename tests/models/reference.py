"""Comparing a network with that of transformers: values copied, then loss and every gradient."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.batch import Batch
from models.protocol import Model
from tests.models.helpers import relative_error

TOLERANCE = 5e-5
"""What float32 leaves is below 2e-5; the epsilon of a norm that is wrong shows at 1e-4."""


class Pair(NamedTuple):
    """A parameter of ours, its counterpart, and how to lay the counterpart out as ours."""

    ours: str
    theirs: str
    convert: Callable[[Tensor], Tensor] = lambda tensor: tensor


TOP = [Pair("embedding.weight", "embed_tokens.weight"), Pair("norm.weight", "norm.weight")]
EXPERTS = {
    "feed_forward.router.weight": "mlp.gate.weight",
    "feed_forward.experts.gate_up": "mlp.experts.gate_up_proj",
    "feed_forward.experts.down": "mlp.experts.down_proj",
}
DENSE = {
    "feed_forward.gate_proj.weight": "mlp.gate_proj.weight",
    "feed_forward.up_proj.weight": "mlp.up_proj.weight",
    "feed_forward.down_proj.weight": "mlp.down_proj.weight",
}


def layer_pairs(
    layer: int, names: dict[str, str], converts: dict[str, Callable[[Tensor], Tensor]] | None = None
) -> list[Pair]:
    """The pairs of a layer from the names inside it."""
    converts = converts or {}
    return [
        Pair(f"layers.{layer}.{ours}", f"layers.{layer}.{theirs}")._replace(
            **({"convert": converts[ours]} if ours in converts else {})
        )
        for ours, theirs in names.items()
    ]


def compare(
    ours: Model,
    theirs: nn.Module,
    pairs: list[Pair],
    batch: Batch,
    *,
    multiplier: float = 1.0,
    cap: float = 0.0,
) -> None:
    """Same loss, same gradients, for the same values and tokens."""
    _scatter_values(theirs)
    _copy_values(ours, theirs, pairs)
    losses = ours(*batch)
    losses.total.backward()

    hidden = theirs(input_ids=batch.tokens_BS, position_ids=batch.positions_BS).last_hidden_state
    if ours.ties_embedding:
        weight = theirs.get_parameter("embed_tokens.weight")
    else:
        weight = ours.head.weight.detach().clone().requires_grad_()
    logits = nn.functional.linear(hidden, weight) * multiplier
    if cap:
        logits = cap * torch.tanh(logits / cap)
    loss = nn.functional.cross_entropy(
        logits.flatten(0, 1), batch.labels_BS.flatten(), reduction="sum"
    )
    loss.backward()

    assert relative_error(losses.total.detach(), loss.detach()) <= TOLERANCE
    assert relative_error(ours.head.weight.grad, weight.grad) <= TOLERANCE
    mine, other = dict(ours.named_parameters()), dict(theirs.named_parameters())
    errors = {a: relative_error(mine[a].grad, convert(other[b].grad)) for a, b, convert in pairs}
    assert max(errors.values()) <= TOLERANCE, errors


def _scatter_values(module: nn.Module) -> None:
    """Random values everywhere, around 1 for gains, so that no parameter hides behind a default."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            fan_in = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
            shift = 1.0 if name.endswith("norm.weight") or "layernorm" in name else 0.0
            parameter.copy_(shift + fan_in * noise)
        for name, buffer in module.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))


def _copy_values(ours: Model, theirs: nn.Module, pairs: list[Pair]) -> None:
    """Copy every parameter and router bias; each of ours and of theirs must have a counterpart."""
    mine, other = dict(ours.named_parameters()), dict(theirs.named_parameters())
    own_head = set() if ours.ties_embedding else {"head.weight"}
    assert set(mine) == {pair.ours for pair in pairs} | own_head
    assert set(other) == {pair.theirs for pair in pairs}
    biases = {
        name: bias for name, bias in theirs.named_buffers() if name.endswith("correction_bias")
    }
    with torch.no_grad():
        for name, counterpart, convert in pairs:
            mine[name].copy_(convert(other[counterpart]))
        for name, moe in ours.moe_layers():
            gate = f"{name.removesuffix('.feed_forward')}.mlp.gate.e_score_correction_bias"
            if gate in biases:
                moe.router.expert_bias.copy_(biases.pop(gate))
    assert not biases
