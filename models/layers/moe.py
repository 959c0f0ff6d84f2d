"""A mixture of experts: router, dispatcher, grouped experts, and what a family puts around them.

T tokens, D width of the experts' input, E experts, K experts per token, F hidden width of an
expert, R rows: one for each pair of a token and an expert that it visits.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from models.initialization import Zeros, fan_in, make_parameter
from models.layers.feed_forward import Activation, swiglu
from models.layers.linear import local
from models.layers.router import Router, Routes
from models.layers.tensor_plan import TensorPlan
from models.ops.grouped_mm import grouped_mm

Product = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(rows (R,K), weight (E,N,K), offsets (E,) int32) to (R,N)."""


class Dispatched(NamedTuple):
    """Rows sorted by expert, and how to undo it."""

    rows_RD: Tensor
    offsets_E: Tensor
    """int32 cumulative ends of the experts' rows."""
    state: Any
    """What `combine` needs; only the dispatcher that made it reads it."""


class Parts(NamedTuple):
    """What a mixture adds up, (T,...) each."""

    routed: Tensor
    """Of the chosen experts, at the width at which they work."""
    shared: Tensor | None


class Dispatcher(Protocol):
    """Moves tokens to their experts and the results back. Expert parallelism replaces it."""

    def __call__(self, moe: "MoE", inputs_TD: Tensor, routes: Routes, x_TD: Tensor) -> Parts:
        """The parts of a mixture.

        `inputs_TD` are those of the experts, whose width may be another than that of `x_TD`.
        """
        ...


class _GatherRows(torch.autograd.Function):
    """Rows by index whose backward gathers too, where that of indexing would scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        grad = grad.index_select(0, inverse)
        if ctx.copies > 1:
            grad = grad.unflatten(0, (-1, ctx.copies)).sum(dim=1)
        return grad, None, None, None


def gather_rows(x: Tensor, index: Tensor, inverse: Tensor, copies: int = 1) -> Tensor:
    """x[index] for an index that takes every row `copies` times.

    x (T,D); index (T*copies,), in which the j-th copy of row t stands at inverse[t*copies + j].
    """
    return _GatherRows.apply(x, index, inverse, copies)


class LocalDispatcher(nn.Module):
    """Every expert is here: sort the tokens by expert. Drops nothing."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts

    def forward(self, moe: "MoE", inputs_TD: Tensor, routes: Routes, x_TD: Tensor) -> Parts:
        """The chosen experts' part, then the shared one's."""
        (out_TD,) = moe.work(
            [inputs_TD],
            lambda inputs: self.dispatch(inputs, routes.experts_TK),
            lambda rows, state: self.combine(rows, routes.weights_TK, state),
        )
        return Parts(out_TD, moe.share(x_TD))

    def dispatch(self, x_TD: Tensor, experts_TK: Tensor) -> Dispatched:
        """Rows sorted by expert; the state says where the k-th expert of token t put its row."""
        K = experts_TK.shape[1]
        flat = experts_TK.flatten()
        sorted_experts, order = flat.sort(stable=True)
        rows = torch.arange(flat.numel(), device=flat.device)
        inverse = torch.empty_like(order).scatter_(0, order, rows)
        experts = torch.arange(self.num_experts, device=flat.device)
        offsets = torch.searchsorted(sorted_experts, experts, right=True, out_int32=True)
        rows_RD = gather_rows(x_TD, order // K, inverse, K)
        return Dispatched(rows_RD, offsets, inverse)

    def combine(self, rows_RD: Tensor, weights_TK: Tensor, state: Tensor) -> Tensor:
        """Weighted in the dtype of the rows, one small product per token."""
        T, K = weights_TK.shape
        order = torch.empty_like(state)
        order.scatter_(0, state, torch.arange(state.numel(), device=state.device))
        rows_TKD = gather_rows(rows_RD, state, order).unflatten(0, (T, K))
        return torch.bmm(weights_TK.to(rows_RD.dtype)[:, None], rows_TKD).squeeze(1)


class _AddExpertBias(torch.autograd.Function):
    """rows (R,N) + bias (E,N) of each row's expert, with the bias's gradient summed in float32."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor, expert_R: Tensor) -> Tensor:
        ctx.save_for_backward(bias, expert_R)
        return rows + bias.index_select(0, expert_R)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        bias, expert_R = ctx.saved_tensors
        total = torch.zeros(bias.shape, dtype=torch.float32, device=grad.device)
        return grad, total.index_add_(0, expert_R, grad.float()).to(bias.dtype), None


class GroupedExperts(nn.Module):
    """The gated experts of a layer, their weights stacked on dimension 0.

    `product` is the grouped product: a quantized one replaces it. Nothing but stacked weights and
    biases may live here: expert parallelism spreads this module's parameters over ranks.
    """

    product: Product

    def __init__(
        self,
        num_experts: int,
        dim: int,
        hidden_dim: int,
        *,
        output_scale: float = 1.0,
        activation: Activation = swiglu,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.gate_up = make_parameter(num_experts, 2 * hidden_dim, dim, init=fan_in(dim))
        down = fan_in(hidden_dim, scale=output_scale)
        self.down = make_parameter(num_experts, dim, hidden_dim, init=down)
        self.gate_up_bias = self.down_bias = None
        if bias:
            self.gate_up_bias = make_parameter(num_experts, 2 * hidden_dim, init=Zeros())
            self.down_bias = make_parameter(num_experts, dim, init=Zeros())
        self.activation = activation
        self.product = grouped_mm

    def forward(self, work: Callable[[Any], Any], pieces: Sequence[Any]) -> list[Any]:
        """What `work`, which calls `multiply`, returns for each piece.

        Where weights are sharded they are gathered for a call, and so once for all pieces.
        """
        return [work(piece) for piece in pieces]

    def multiply(self, rows_RD: Tensor, offsets_E: Tensor) -> Tensor:
        """Each expert's outputs for its rows; the offsets are int32 cumulative ends."""
        hidden = self._product(rows_RD, self.gate_up, self.gate_up_bias, offsets_E)
        gate, up = hidden.chunk(2, dim=-1)
        return self._product(self.activation(gate, up), self.down, self.down_bias, offsets_E)

    def _product(
        self, rows: Tensor, weight: Tensor, bias: Tensor | None, offsets_E: Tensor
    ) -> Tensor:
        out = self.product(rows, local(weight), offsets_E)
        if bias is None:
            return out
        row = torch.arange(len(out), dtype=torch.int32, device=out.device)
        expert_R = torch.searchsorted(offsets_E, row, right=True, out_int32=True)
        # Rows after the last end belong to no expert and are used by nobody.
        expert_R = expert_R.clamp_max(len(offsets_E) - 1)
        return _AddExpertBias.apply(out, local(bias), expert_R)


class MoE(nn.Module):
    """A mixture of experts, (..., D) to (..., D).

    `shared` is added for every token. `output_norm` acts on each expert's output before it is
    weighted, one gain for all experts. `entry` and `exit` lead to and from the width at which the
    experts work, if it is another than the model's.
    """

    def __init__(
        self,
        router: Router,
        experts: GroupedExperts,
        *,
        shared: nn.Module | None = None,
        output_norm: nn.Module | None = None,
        entry: nn.Module | None = None,
        exit: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.router = router
        self.dispatcher: Any = LocalDispatcher(router.config.num_experts)
        self.experts = experts
        self.shared = shared
        self.output_norm = output_norm
        self.entry = entry
        self.exit = exit

    @property
    def tensor_plan(self) -> TensorPlan:
        """Nothing: tokens are routed from the rank that holds them, expert parallelism divides."""
        return TensorPlan()

    def forward(self, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        """`tokens` (...) are ids, for a router that chooses by them."""
        x_TD = x.flatten(0, -2)
        routes = self.router(x_TD, None if tokens is None else tokens.flatten())
        inputs = x_TD if self.entry is None else self.entry(x_TD)
        out, shared = self.dispatcher(self, inputs, routes, x_TD)
        if self.exit is not None:
            out = self.exit(out)
        if shared is not None:
            out = out + shared
        return out.view_as(x)

    def work(
        self,
        pieces: Sequence[Any],
        receive: Callable[[Any], Dispatched],
        send: Callable[[Tensor, Any], Any],
    ) -> list[Any]:
        """What `send` makes of the experts' outputs for what `receive` makes of each piece.

        Tensors that lead to the rows belong in the pieces: sharded weights reduce their gradients
        once those of the pieces are there.
        """

        def work(piece: Any) -> Any:
            rows, offsets, state = receive(piece)
            rows = self.experts.multiply(rows, offsets)
            return send(rows if self.output_norm is None else self.output_norm(rows), state)

        return self.experts(work, pieces)

    def share(self, x_TD: Tensor) -> Tensor | None:
        """The shared expert's part, if there is one."""
        return None if self.shared is None else self.shared(x_TD)
