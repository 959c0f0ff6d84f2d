"""Which gradients the running backward pass asks an operator for."""

from typing import Any

import torch


def asked_gradients(ctx: Any) -> list[bool]:
    """Return, for each tensor among the operator's inputs, whether its gradient is asked for.

    ``ctx.needs_input_grad`` says what the forward pass knew: which inputs have a gradient at all.
    A backward in two parts (``torch.autograd.grad`` for the inputs of a pipeline stage, later for
    its weights) comes by twice and asks for some of them each time.
    """
    return [node is not None and _will_run(node) for node, _ in ctx.next_functions]


def _will_run(node: Any) -> bool:
    """Whether the engine will pass a gradient on to ``node``, of an input."""
    is_leaf = not node.next_functions
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        # torch refuses to say so of a leaf whose gradient is itself what is asked for.
        if not is_leaf:
            raise
        return True
