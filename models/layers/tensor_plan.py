"""How the work of a layer divides over tensor-parallel ranks: a table that the layer declares."""

from typing import NamedTuple, Protocol, runtime_checkable


class TensorPlan(NamedTuple):
    """What to divide and where the sequence is whole; names are those of submodules.

    Between layers each rank holds its part of the sequence (sequence parallelism). A rank sees the
    whole sequence from a gather on and returns to its part at the sum over the ranks that follows
    the row products. What a plan does not name is not divided and works on the tokens that it gets.
    """

    heads: tuple[int, ...] = ()
    """Numbers of heads that ranks must divide, each for itself."""
    columns: tuple[str, ...] = ()
    """Linear maps whose outputs (heads, hidden units) are divided."""
    vectors: tuple[str, ...] = ()
    """Parameters whose first dimension is divided likewise: biases of columns, values per head."""
    rows: tuple[str, ...] = ()
    """Linear maps whose inputs are divided: their outputs are summed over ranks and scattered."""
    gather_inputs: tuple[str, ...] = ()
    """Modules ("" is the layer itself) whose first argument is gathered along the sequence."""
    gather_outputs: tuple[str, ...] = ()
    """Modules whose result is gathered: narrow latents, cheaper to send than what they are from."""


@runtime_checkable
class TensorDivisible(Protocol):
    """A layer with a plan; the plans of layers inside it are then not looked at."""

    @property
    def tensor_plan(self) -> TensorPlan:
        """How this layer divides; an empty plan keeps all of it on every rank."""
        ...
