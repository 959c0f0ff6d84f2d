"""Linear attention token by token: the equations that the operators must compute."""

import torch
from torch import Tensor


def unit(x: Tensor) -> Tensor:
    """x over its length; 1e-6 under the root."""
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def delta_rule_by_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    positions: Tensor,
    state: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(out, last state) of the gated delta rule; arguments as those of the operator."""
    groups = v.shape[2] // k.shape[2]
    q = unit(q).repeat_interleave(groups, dim=2) * scale
    k = unit(k).repeat_interleave(groups, dim=2)
    if state is None:
        state = v.new_zeros(v.shape[0], v.shape[2], q.shape[-1], v.shape[-1])
    outputs = []
    for t in range(v.shape[1]):
        state = state * (positions[:, t] != 0)[:, None, None, None]
        state = state * log_decay[:, t].exp()[..., None]
        held = torch.einsum("bhdv,bhd->bhv", state, k[:, t])
        update = beta[:, t, :, None] * (v[:, t] - held)
        state = state + torch.einsum("bhd,bhv->bhdv", k[:, t], update)
        outputs.append(torch.einsum("bhdv,bhd->bhv", state, q[:, t]))
    return torch.stack(outputs, dim=1), state


def convolution_by_token(
    x: Tensor, weight: Tensor, positions: Tensor, preceding: Tensor | None
) -> Tensor:
    """The short convolution with SiLU; arguments as those of the operator."""
    before = weight.shape[1] - 1
    if preceding is None:
        preceding = x.new_zeros(x.shape[0], before, x.shape[2])
    x = torch.cat((preceding, x), dim=1)
    rows = []
    for b, row in enumerate(positions.tolist()):
        tokens = []
        for t, position in enumerate(row):
            lags = range(min(before, position) + 1)
            terms = [x[b, before + t - lag] * weight[:, before - lag] for lag in lags]
            tokens.append(torch.stack(terms).sum(0))
        rows.append(torch.stack(tokens))
    return torch.nn.functional.silu(torch.stack(rows))
