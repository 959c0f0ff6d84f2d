"""From a run's specification to the workload that it means, checked before any rank starts."""

from pathlib import Path

import msgspec

from bench.errors import UsageError
from bench.spec import RunSpec, nearest, override, parse_overrides
from parallel.plan import ParallelPlan
from workloads import registry
from workloads.workload import Workload

GENERATED_DATA = ("text", "synthetic")
WORKLOAD_KEYS = ("sequence_length", "global_batch_size", "data", "routing")
GROUPS = ("model", "plan", "precision", "training")


def resolve(spec: RunSpec) -> Workload:
    """Return the workload of ``spec`` with its overrides and with its plan filled in.

    The launcher calls it before it starts a rank, and every rank calls it for the same answer.

    Raises:
        UsageError: if the workload or a key is unknown, a value does not fit, the plan does not
            fit the ranks, the batch, the sequence, the heads or the experts, the FLOPs of a
            sequence cannot be counted, or the data does not exist.
    """
    try:
        workload = override(registry.load(spec.workload), _workload_changes(spec.set))
        plan = workload.plan.resolve(spec.ranks)
        plan.check_batch(workload.global_batch_size)
        plan.check_stages(workload.model.num_layers, workload.model.num_mtp_layers)
        plan.check_sequence(workload.sequence_length)
        workload.model.flops_per_token(workload.sequence_length)
        num_experts = getattr(workload.model, "num_experts", None)
        if num_experts is not None:
            plan.check_experts(num_experts)
        if max(plan.tp, plan.cp, plan.pp) > 1:
            _check_layout(workload, plan)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if workload.data not in GENERATED_DATA and not Path(workload.data).exists():
        raise UsageError(
            f"workload.data={workload.data}: no such file or folder",
            hint=f"give a path, or one of {', '.join(GENERATED_DATA)}",
        )
    return msgspec.structs.replace(workload, plan=plan)


def _check_layout(workload: Workload, plan: ParallelPlan) -> None:
    # Imported here: it needs the model's layers, and with them torch.
    from parallel.check import check_layout
    from workloads.build import build_whole

    check_layout(build_whole(workload), plan)


def _workload_changes(texts: list[str]) -> dict[str, object]:
    """Return the overrides keyed as the fields of ``Workload``: ``workload.`` itself falls away."""
    changes = {}
    for key, value in parse_overrides(texts).items():
        group, _, rest = key.partition(".")
        if group == "workload" and rest in WORKLOAD_KEYS:
            changes[rest] = value
        elif group in GROUPS:
            changes[key] = value
        else:
            known = [f"workload.{name}" for name in WORKLOAD_KEYS] + [f"{name}." for name in GROUPS]
            raise UsageError(f"unknown key {key}", hint=nearest(key, known, what="keys begin with"))
    return changes


def resolve_device(spec: RunSpec) -> str:
    """Return ``cpu`` or ``cuda``: the device that ``spec`` means on this machine.

    Raises:
        UsageError: if it wants CUDA devices that this machine does not have.
    """
    import torch

    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if spec.device == "cpu" or (spec.device == "auto" and num_devices == 0):
        return "cpu"
    if spec.ranks > num_devices:
        raise UsageError(
            f"ranks={spec.ranks} on device cuda: this machine has {num_devices} CUDA devices",
            hint="lower --ranks or give --device cpu",
        )
    return "cuda"
