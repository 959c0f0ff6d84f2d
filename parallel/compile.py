"""Compilation: what of a model torch.compile sees."""

import torch

from models.layers.feed_forward import FeedForward
from models.layers.head import ChunkSteps
from models.layers.norm import CentredRMSNorm, InputScaledRMSNorm, RMSNorm, UnitRMSNorm
from models.layers.router import Router
from models.protocol import Model
from parallel.plan import Compile

LOCAL = (RMSNorm, CentredRMSNorm, InputScaledRMSNorm, UnitRMSNorm, FeedForward, Router)
"""Memory-bound chains of small operators, each of which becomes a kernel or two."""


def compile_model(model: Model, policy: Compile, *, backend: str = "inductor") -> None:
    """Compile every block in place (``block``), single functions (``local``), or nothing.

    ``local`` compiles norms, feed-forward layers, routers and the steps of the loss: what fuses
    gains most there, graphs are small and shared by all layers, and nothing else is traced.
    """
    if policy == "block":
        for _, block in model.blocks():
            block.compile(backend=backend)
    elif policy == "local":
        for module in model.modules():
            if isinstance(module, LOCAL):
                module.compile(backend=backend)
        if model.head is not None:
            steps = model.head.steps
            compiled = (torch.compile(step, backend=backend) for step in steps)
            model.head.steps = ChunkSteps._make(compiled)
