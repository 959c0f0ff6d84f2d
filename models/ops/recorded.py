"""Gradients within an operator: kernels that PyTorch differentiates, used below its autograd.

The forward and the backward of a custom operator run below autograd, which records nothing there.
A kernel whose gradients only autograd knows runs again in the operator's backward, recorded.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._C import DispatchKey

AUTOGRAD_KEYS = (
    DispatchKey.AutogradCPU,
    DispatchKey.AutogradCUDA,
    DispatchKey.AutogradOther,
    DispatchKey.AutogradFunctionality,
)


@contextmanager
def recorded() -> Iterator[None]:
    """Let autograd record what runs in the context, within an operator too."""
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in AUTOGRAD_KEYS:
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


def leaves(*tensors: Tensor) -> list[Tensor]:
    """The same tensors, each a leaf that gradients are asked of."""
    return [tensor.detach().requires_grad_() for tensor in tensors]
