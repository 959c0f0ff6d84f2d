"""AdamW whose moments are stored in bfloat16, half of their usual bytes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw


class LowPrecisionAdamW(torch.optim.Optimizer):
    """AdamW (arXiv:1711.05101) on float32 parameters with both moments in bfloat16.

    A step reads the moments of one tensor as float32, runs PyTorch's fused step on them and rounds
    them to the nearest: what is added to float32 at a time is the moments of the largest tensor.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None, "a training step computes its loss once"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        moments = [state["exp_avg"].float(), state["exp_avg_sq"].float()]
        beta1, beta2 = group["betas"]
        adamw(
            [parameter],
            [gradient],
            moments[:1],
            moments[1:],
            [],
            [state["step"]],
            fused=True,
            amsgrad=False,
            maximize=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
        )
        state["exp_avg"].copy_(moments[0])
        state["exp_avg_sq"].copy_(moments[1])
