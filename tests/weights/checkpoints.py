"""Small layers' state dicts as Hugging Face checkpoints hold them, written down by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

H, F, E, K, SHARED = 8, 6, 4, 2, 10
_COMMON = {
    "hidden_size": H,
    "num_experts_per_tok": K,
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "moe_intermediate_size": F,
    "intermediate_size": 99,  # of dense layers
    "num_attention_heads": 2,
}
_DEEPSEEK = {
    "n_routed_experts": E,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
    "n_group": 2,
    "topk_group": 1,
}
# What a config of each family has beside `_COMMON`.
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": E, "intermediate_size": F},
    "qwen2_moe": {
        "num_experts": E,
        "shared_expert_intermediate_size": SHARED,
        "norm_topk_prob": False,
    },
    "qwen3_moe": {"num_experts": E},
    "qwen3_next": {"num_experts": E, "shared_expert_intermediate_size": SHARED},
    "olmoe": {"num_experts": E, "intermediate_size": F, "norm_topk_prob": False},
    "deepseek_v2": {**_DEEPSEEK, "norm_topk_prob": False, "topk_method": "group_limited_greedy"},
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe": {**_DEEPSEEK, "n_group": 1},
    "gpt_oss": {"num_local_experts": E, "intermediate_size": F},
}
FAMILIES = tuple(CONFIGS)
PREFIX = "model.layers.3.mlp."


def config_fields(family: str) -> dict[str, Any]:
    """Fields of a small config."""
    return {**_COMMON, **CONFIGS[family]}


def hf_config(family: str, **fields: Any) -> Any:
    """A config with the attributes alone; `fields` replace some."""
    return SimpleNamespace(model_type=family, **{**config_fields(family), **fields})


def expert_weights() -> dict[str, torch.Tensor]:
    """gate, up [E, F, H], down [E, H, F] and biases of gpt-oss's experts, all numbers different."""
    shapes = {"gate": (E, F, H), "up": (E, F, H), "down": (E, H, F)}
    shapes |= {"gate_bias": (E, F), "up_bias": (E, F), "down_bias": (E, H)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def expert_state(family: str, weights: dict[str, torch.Tensor], fused: bool) -> Any:
    """Names of experts under a layer -> tensors."""
    gate, up, down = weights["gate"], weights["up"], weights["down"]
    if family == "gpt_oss":
        both, bias = torch.empty(E, H, 2 * F), torch.empty(E, 2 * F)
        both[..., ::2], both[..., 1::2] = gate.mT, up.mT
        bias[:, ::2], bias[:, 1::2] = weights["gate_bias"], weights["up_bias"]
        return {
            "experts.gate_up_proj": both,
            "experts.gate_up_proj_bias": bias,
            "experts.down_proj": down.mT.contiguous(),
            "experts.down_proj_bias": weights["down_bias"],
        }
    if fused:
        return {"experts.gate_up_proj": torch.cat([gate, up], 1), "experts.down_proj": down}
    names = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    return {
        f"experts.{expert}.{name}.weight": tensor[expert].clone()
        for name, tensor in zip(names, (gate, up, down))
        for expert in range(E)
    }


def dense_state(family: str) -> dict[str, torch.Tensor]:
    """Names of the router's and the shared expert's tensors under a layer -> tensors."""
    router = "router" if family == "gpt_oss" else "gate"
    state = {f"{router}.weight": torch.randn(E, H)}
    if family == "gpt_oss":
        state["router.bias"] = torch.randn(E)
    if family in ("deepseek_v3", "glm4_moe"):
        state["gate.e_score_correction_bias"] = torch.randn(E)
    shared, width = "", 0
    if family.startswith("deepseek") or family == "glm4_moe":
        shared, width = "shared_experts", 2 * F
    if family in ("qwen2_moe", "qwen3_next"):
        shared, width = "shared_expert", SHARED
        state["shared_expert_gate.weight"] = torch.randn(1, H)
    if shared:
        state[f"{shared}.gate_proj.weight"] = torch.randn(width, H)
        state[f"{shared}.up_proj.weight"] = torch.randn(width, H)
        state[f"{shared}.down_proj.weight"] = torch.randn(H, width)
    return state


def layer_state(
    family: str, weights: dict[str, torch.Tensor], fused: bool = True
) -> dict[str, torch.Tensor]:
    """A checkpoint with one sparse layer under `PREFIX` and a tensor of another."""
    state = {**expert_state(family, weights, fused), **dense_state(family)}
    named = {PREFIX + name: tensor for name, tensor in state.items()}
    return {**named, "model.layers.33.mlp.gate.weight": torch.randn(E, H)}
