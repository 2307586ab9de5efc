"""How ranks share a model."""

from .gradients import clip_grad_norm_, fully_shard_moe, parameter_groups, reduce_gradients
from .parallel_layout import ParallelLayout, ParallelMeshes

__all__ = [
    "ParallelLayout",
    "ParallelMeshes",
    "clip_grad_norm_",
    "fully_shard_moe",
    "parameter_groups",
    "reduce_gradients",
]
