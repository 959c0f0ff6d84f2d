"""Expert parallelism: experts spread over ranks, tokens exchanged by all-to-all. Drops nothing."""

from torch.distributed.device_mesh import DeviceMesh

from models.protocol import Model
from parallel.expert_per_expert import PerExpertDispatcher
from parallel.expert_per_rank import PerRankDispatcher
from parallel.layout import divide_weight
from parallel.plan import ParallelPlan

DISPATCHERS = {"per_expert": PerExpertDispatcher, "per_rank": PerRankDispatcher}


def spread_experts(model: Model, mesh: DeviceMesh, plan: ParallelPlan) -> None:
    """Spread every expert layer of a meta-device model over ``mesh``, in place."""
    for _, moe in model.moe_layers():
        for name, weight in list(moe.experts.named_parameters(recurse=False)):
            assert weight.dim() > 1, "only stacked weights and biases can be spread"
            setattr(moe.experts, name, divide_weight(weight, mesh, 0))
        moe.dispatcher = DISPATCHERS[plan.expert_exchange](
            moe.dispatcher,
            mesh.get_group(),
            num_chunks=plan.expert_chunks,
            overlap=plan.expert_overlap,
        )
