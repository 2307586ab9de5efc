"""Modules: the mixture-of-experts layer and its parts."""

from .checkpoint import per_rank_names, shard_experts
from .config import MoEConfig, RouterConfig
from .experts import Experts, SharedExperts
from .moe import MoE
from .router import Router, update_expert_bias

__all__ = [
    "Experts",
    "MoE",
    "MoEConfig",
    "Router",
    "RouterConfig",
    "SharedExperts",
    "per_rank_names",
    "shard_experts",
    "update_expert_bias",
]
