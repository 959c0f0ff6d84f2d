"""Pipeline parallelism: this rank's stages, their schedule, and one training step of both.

B sequences of one microbatch, S sequence, D model width.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    _Action,
    _ComputationType,
    _PipelineContext,
    _PipelineScheduleRuntime,
    get_schedule_class,
)

from models.batch import Batch
from models.layers.linear import local
from models.protocol import Model, State
from parallel.actions import schedule_actions
from parallel.bubble import Durations, bubble_fraction
from parallel.fsdp import reduce_now
from parallel.plan import ParallelPlan
from parallel.remat import replace_forward
from parallel.schedules import RULES, rank_of_stage
from parallel.stages import Boundary, StageModel


class Shapes(NamedTuple):
    """What one microbatch's stream looks like on a rank; see models.protocol.State."""

    shape_BSD: tuple[int, int, int]
    compute_dtype: torch.dtype
    device: torch.device


class Stage(PipelineStage):
    """A stage whose backward reshards parameters and reduces gradients when the plan says so."""

    plan: ParallelPlan

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]] | None]:
        """As torch's, which leaves blocks gathered and gradients whole until the step ends."""
        plan = self.plan
        torchs = super().backward_maybe_with_nosync
        if backward_type == "input" or (plan.reduces_once and not plan.reshards):
            return torchs(backward_type, bwd_kwargs, last_backward)
        if backward_type == "weight":
            torchs(backward_type, bwd_kwargs, last_backward)
            # Those gradients come out of torch.autograd.grad, which runs no hooks of FSDP.
            self._prepare(last_backward)
            reduce_now(self.submod)
            return (), None
        self._prepare(last_backward)
        return stage_backward(**bwd_kwargs), None

    def _prepare(self, last_backward: bool) -> None:
        """Say what happens to gradients and parameters once gradients of a microbatch are there."""
        assert isinstance(self.submod, FSDPModule)
        self.submod.set_is_last_backward(False)
        self.submod.set_reshard_after_backward(self.plan.reshards)
        self.submod.set_requires_gradient_sync(not self.plan.reduces_once)
        self.submod.set_requires_all_reduce(last_backward)


class Pipeline:
    """The stages of this rank under a schedule."""

    def __init__(
        self,
        stages: Sequence[StageModel],
        plan: ParallelPlan,
        group: dist.ProcessGroup,
        shapes: Shapes,
        embedding_stages: Sequence[int],
    ) -> None:
        """Set up the schedule over laid out stage models.

        Args:
            stages: those of this rank, in order.
            group: the ranks of this pipeline.
            embedding_stages: every stage that holds the embedding, the first stage first.
        """
        self.plan = plan
        self.group = group
        self.stages = stages
        self.embedding_stages = embedding_stages
        for stage in stages:
            replace_forward(stage.model, _StageForward(stage.model))
            if stage.model.head is not None:
                stage.model.head.keep_gradients = RULES[plan.schedule].splits_backward
        self.rank = dist.get_rank(group)
        self._sums = torch.zeros(2, dtype=torch.float64, device=shapes.device)
        self._schedule = self._build_schedule(shapes)

    def step(self, batches: Sequence[Batch]) -> Tensor:
        """Run forward and backward of every microbatch and reduce the gradients once.

        Returns the sums of the loss and of the MTP loss, (2,) float64: zero but on the rank that
        has the last stage.
        """
        self._sums.zero_()
        whole = Batch(*(torch.cat(fields) for fields in zip(*batches, strict=True)))
        inputs = whole._asdict()
        self._schedule.step(target=whole.labels_BS, return_outputs=False, **inputs)
        self._sum_embedding_gradients()
        return self._sums.clone()

    def bubble(self, durations: Sequence[Durations]) -> float:
        """Return the share of the time in which a rank of this pipeline waits, 0 to 1.

        Args:
            durations: of each stage of the whole pipeline.
        """
        actions = schedule_actions(
            self._schedule, num_ranks=self.plan.pp, microbatches=self.plan.microbatches
        )
        return bubble_fraction(actions, durations)

    def _build_schedule(self, shapes: Shapes) -> Any:
        plan = self.plan
        schedule_class = get_schedule_class(plan.schedule)
        stages = [self._build_stage(stage, shapes) for stage in self.stages]
        single = issubclass(schedule_class, PipelineScheduleSingle)
        schedule = schedule_class(
            stages[0] if single else stages,
            n_microbatches=plan.microbatches,
            loss_fn=self._take_losses,
            scale_grads=False,
        )
        if isinstance(schedule, _PipelineScheduleRuntime) and plan.reshards:
            schedule.register_custom_function(_ComputationType.UNSHARD, _leave_to_blocks)
        return schedule

    def _build_stage(self, stage: StageModel, shapes: Shapes) -> Stage:
        stream = stage.model.stream_dtype(shapes.compute_dtype)

        def state(boundary: Boundary) -> tuple[Tensor, ...]:
            *shape, dim = shapes.shape_BSD
            streams = [_example((*shape, stage.model.stream_width), stream)] * boundary.streams
            hiddens = [_example((*shape, dim), shapes.compute_dtype)] * boundary.hiddens
            return (*streams, *hiddens)

        leaves = stage.leaves
        built = Stage(
            stage.model,
            stage.number,
            self.plan.num_stages,
            shapes.device,
            input_args=state(stage.enters),
            output_args=state(leaves) if leaves else (_example((), torch.float32),) * 3,
            group=self.group,
        )
        built.plan = self.plan
        return built

    def _take_losses(self, losses: tuple[Tensor, ...], _: Tensor) -> Tensor:
        """Return the loss to differentiate; the sums for the record are kept."""
        total, main_sum, mtp_sum = losses
        self._sums += torch.stack((main_sum, mtp_sum))
        return total

    def _sum_embedding_gradients(self) -> None:
        """Give every copy of the embedding the same gradient, the sum of all in stage order."""
        mine = {
            stage.number: _gradient(stage.model.embedding.weight)
            for stage in self.stages
            if stage.model.embedding is not None
        }
        if not mine or len(self.embedding_stages) == 1:
            return
        gradients = {**mine, **self._receive_gradients(mine)}
        first, *others = (gradients[index] for index in self.embedding_stages)
        total = first.clone()
        for gradient in others:
            total += gradient
        for gradient in mine.values():
            gradient.copy_(total)

    def _receive_gradients(self, mine: dict[int, Tensor]) -> dict[int, Tensor]:
        """Send this rank's gradients to the other holders and return theirs, by stage."""
        plan = self.plan
        ranks = {
            index: rank_of_stage(plan.schedule, index, num_ranks=plan.pp)
            for index in self.embedding_stages
        }
        like = next(iter(mine.values()))
        received = {index: torch.empty_like(like) for index in ranks if index not in mine}
        if like.numel() == 0 or not received:
            return received
        peers = sorted(set(ranks.values()) - {self.rank})
        operations = [
            dist.P2POp(dist.isend, gradient, group=self.group, group_peer=peer)
            for peer in peers
            for gradient in mine.values()
        ] + [
            dist.P2POp(dist.irecv, buffer, group=self.group, group_peer=ranks[index])
            for index, buffer in received.items()
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return received


class _StageForward:
    """A stage's forward in place of the whole model's."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def __call__(
        self, *state: Tensor, tokens_BS: Tensor, labels_BS: Tensor, positions_BS: Tensor
    ) -> State:
        """Return the state after the stage, or the losses as a plain tuple."""
        state = self.model.advance(state, tokens_BS, positions_BS)
        if self.model.head is None:
            # torch detaches in place what a stage returns, which a view does not allow.
            return tuple(x.clone() if x._is_view() else x for x in state)
        return tuple(self.model.losses(state, labels_BS, positions_BS))


def _leave_to_blocks(action: _Action, ctx: _PipelineContext) -> None:
    """In place of gathering a whole stage ahead: each block gathers itself when it runs."""
    schedule = ctx.schedule_ref
    assert isinstance(schedule, _PipelineScheduleRuntime)
    schedule.unsharded_stages.add(action.stage_index)


def _gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None, "the embedding takes part in every microbatch"
    return local(weight.grad)


def _example(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
