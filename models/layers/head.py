"""The output head with its cross-entropy, in chunks: the logits of a sequence never exist at once.

Each chunk of tokens computes its logits, its loss and the gradients of its loss on the spot; all
prediction heads share the weight and go through it as one stack of tokens.

T tokens, D width, V vocabulary (the rows of it that are here), C tokens of a chunk.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.batch import IGNORE, Losses
from models.initialization import Init, make_parameter
from models.layers.linear import local


class LogitScaling(NamedTuple):
    """What turns products into logits: cap * tanh(multiplier * product / cap); cap 0 for none."""

    multiplier: float = 1.0
    soft_cap: float = 0.0


class VocabularyShard(NamedTuple):
    """Which rows of the unembedding are here, and how to see what the other ranks have found."""

    first_row: int = 0
    gather: Callable[[Tensor], Tensor] | None = None
    """Every rank's tensor, stacked on a new first dimension; None where all rows are here."""


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Weighted sum of the tokens' losses (differentiable) and the losses themselves (not)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        labels_T: Tensor,
        weights_T: Tensor,
        scaling: LogitScaling,
        shard: VocabularyShard,
        products: "ChunkProducts",
        steps: "ChunkSteps",
        chunk_tokens: int,
        with_gradients: bool,
        keep_gradients: bool,
    ) -> tuple[Tensor, Tensor]:
        losses_T = torch.empty(len(labels_T), dtype=torch.float32, device=hidden_TD.device)
        dhidden_TD = torch.empty_like(hidden_TD) if with_gradients else None
        # Summed over chunks in float32: bfloat16 would lose what the later chunks add.
        dweight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if with_gradients else None
        for start in range(0, len(labels_T), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            h_CD, labels_C = hidden_TD[chunk], labels_T[chunk]
            logits_CV = steps.logits(products.forward(h_CD, weight_VD), scaling)
            rows_C = labels_C - shard.first_row
            log_sums_C, found_C = steps.log_sums_and_targets(logits_CV, rows_C, shard)
            valid_C = labels_C != IGNORE
            losses_T[chunk] = (log_sums_C - found_C) * valid_C
            if dhidden_TD is not None and dweight_VD is not None:
                dproduct_CV = steps.product_gradient(
                    logits_CV, log_sums_C, rows_C, weights_T[chunk] * valid_C, scaling
                ).to(weight_VD.dtype)
                products.backward(dproduct_CV, h_CD, weight_VD, dhidden_TD[chunk], dweight_VD)
        ctx.dhidden_TD = dhidden_TD
        ctx.dweight_VD = None if dweight_VD is None else dweight_VD.to(weight_VD.dtype)
        ctx.keep_gradients, ctx.scaled = keep_gradients, False
        ctx.mark_non_differentiable(losses_T)
        return torch.dot(losses_T, weights_T), losses_T

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.dhidden_TD is not None, "a loss without gradients, or a second backward"
        if not ctx.scaled:
            ctx.dhidden_TD.mul_(grad)
            ctx.dweight_VD.mul_(grad)
            ctx.scaled = True
        gradients = ctx.dhidden_TD, ctx.dweight_VD
        if not ctx.keep_gradients:
            # Nobody else holds them, so that the weight's can become its .grad without a copy.
            ctx.dhidden_TD = ctx.dweight_VD = None
        return *gradients, *(None,) * 9


class OutputHead(nn.Module):
    """The unembedding (V,D) and the loss of every prediction head."""

    def __init__(
        self,
        dim: int,
        vocab_size: int,
        *,
        init: Init,
        chunk_tokens: int,
        scaling: LogitScaling = LogitScaling(),  # noqa: B008 (immutable)
    ) -> None:
        super().__init__()
        self.weight = make_parameter(vocab_size, dim, init=init)
        self.chunk_tokens = chunk_tokens
        self.scaling = scaling
        self.shard = VocabularyShard()
        self.products = ChunkProducts()
        self.steps = ChunkSteps()
        self.keep_gradients = False
        """Whether backward runs twice with one gradient: for the input, later for the weight."""

    def forward(
        self, hidden: Sequence[Tensor], labels: Sequence[Tensor], mtp_weight: float = 0.0
    ) -> Losses:
        """Losses of the main head (first) and of the MTP depths (the rest).

        hidden: one (B,S,D) per head; labels: one (B,S) int64 per head, IGNORE where no target.
        """
        depths = len(hidden) - 1
        hidden_TD = (
            torch.cat([h.flatten(0, -2) for h in hidden]) if depths else hidden[0].flatten(0, -2)
        )
        labels_T = torch.cat([label.flatten() for label in labels])
        tokens = labels[0].numel()
        weights_T = torch.ones(len(labels_T), dtype=torch.float32, device=labels_T.device)
        if depths:
            weights_T[tokens:] = mtp_weight / depths
        needed = torch.is_grad_enabled() and (hidden_TD.requires_grad or self.weight.requires_grad)
        total, losses_T = _ChunkedCrossEntropy.apply(
            hidden_TD,
            local(self.weight),
            labels_T,
            weights_T,
            self.scaling,
            self.shard,
            self.products,
            self.steps,
            self.chunk_tokens,
            needed,
            self.keep_gradients,
        )
        mtp_sum = losses_T[tokens:].sum() / max(depths, 1)
        return Losses(total, losses_T[:tokens].sum(), mtp_sum)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits (..., V) of the hidden states (..., D), for inference and comparison."""
        return _logits(self.products.forward(hidden, self.weight), self.scaling)


def _logits(product: Tensor, scaling: LogitScaling) -> Tensor:
    logits = product.float()
    if scaling.multiplier != 1.0:
        logits = logits * scaling.multiplier
    if scaling.soft_cap:
        logits = torch.tanh(logits / scaling.soft_cap) * scaling.soft_cap
    return logits


def _log_sums_and_targets(
    logits_CV: Tensor, rows_C: Tensor, shard: VocabularyShard
) -> tuple[Tensor, Tensor]:
    """Log-sum-exp of the whole vocabulary and the targets' logits, from the logits that are here.

    `rows_C` are the targets' rows; one outside of [0, V) has its logit on another rank or nowhere.
    """
    index_C1, here_C1 = _rows_that_are_here(rows_C, logits_CV.shape[1])
    found_C = (logits_CV.gather(1, index_C1) * here_C1).squeeze(1)
    log_sums_C = torch.logsumexp(logits_CV, dim=-1)
    if shard.gather is None:
        return log_sums_C, found_C
    parts_N2C = shard.gather(torch.stack((log_sums_C, found_C)))
    return torch.logsumexp(parts_N2C[:, 0], dim=0), parts_N2C[:, 1].sum(dim=0)


def _rows_that_are_here(rows_C: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """The rows as an index (C,1), 0 for those outside of [0, num_rows), and which are inside."""
    here_C = (rows_C >= 0) & (rows_C < num_rows)
    return rows_C.masked_fill(~here_C, 0)[:, None], here_C[:, None]


def _product_gradient(
    logits_CV: Tensor,
    log_sums_C: Tensor,
    rows_C: Tensor,
    weights_C: Tensor,
    scaling: LogitScaling,
) -> Tensor:
    """The gradient of the weighted losses with respect to hidden @ weight.T; reuses the logits."""
    slope = None
    if scaling.soft_cap:
        slope = 1 - (logits_CV / scaling.soft_cap).square_()
    gradient_CV = logits_CV.sub_(log_sums_C[:, None]).exp_()
    index_C1, here_C1 = _rows_that_are_here(rows_C, logits_CV.shape[1])
    gradient_CV.scatter_add_(1, index_C1, -here_C1.to(gradient_CV.dtype))
    gradient_CV.mul_((weights_C * scaling.multiplier)[:, None])
    return gradient_CV if slope is None else gradient_CV.mul_(slope)


def _backward_products(
    dproduct_CV: Tensor, h_CD: Tensor, weight_VD: Tensor, dhidden_CD: Tensor, dweight_VD: Tensor
) -> None:
    torch.mm(dproduct_CV, weight_VD, out=dhidden_CD)
    _add_product(dweight_VD, dproduct_CV.t(), h_CD)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in the dtype of the total."""
    if a.dtype == total.dtype:
        # Not addmm_: counters of operators have no formula for it.
        torch.addmm(total, a, b, out=total)
    else:
        total.add_(torch.mm(a, b))


class ChunkProducts(NamedTuple):
    """The three products of a chunk; quantized ones can stand in for them."""

    forward: Callable[[Tensor, Tensor], Tensor] = F.linear
    """hidden (C,D), weight (V,D) to (C,V)."""
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None] = _backward_products
    """From the gradient (C,V) of `forward`, hidden and weight: writes the gradient of hidden (C,D)
    into its fourth argument and adds that of the weight to its fifth, (V,D) float32."""


class ChunkSteps(NamedTuple):
    """The pointwise steps of a chunk; compiled ones can stand in for them."""

    logits: Callable[[Tensor, LogitScaling], Tensor] = _logits
    log_sums_and_targets: Callable[[Tensor, Tensor, VocabularyShard], tuple[Tensor, Tensor]] = (
        _log_sums_and_targets
    )
    product_gradient: Callable[[Tensor, Tensor, Tensor, Tensor, LogitScaling], Tensor] = (
        _product_gradient
    )
