"""Model families of transformers with gated experts: their layers' names and configs."""

from __future__ import annotations

import dataclasses
from typing import Any

from .. import checks
from ..nn import MoEConfig, RouterConfig


@dataclasses.dataclass(frozen=True)
class Family:
    """How a family names what its layers hold and what its config says.

    `projections`: gate, up and down of `experts.<number>.<projection>.weight`, empty if its
        checkpoints never have experts apart; `layout`: that of the fused `experts.gate_up_proj` and
        `experts.down_proj`.
    `biases`: of experts and of the router's logits; `correction_bias`: of the choice alone.
    `router`, `shared`, `shared_gate`: names of modules, "" = none.
    `num_experts`, `ffn_hidden_size`: attributes of the config.
    """

    num_experts: str
    ffn_hidden_size: str = "moe_intermediate_size"
    projections: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    layout: str = "gate_up"
    biases: bool = False
    router: str = "gate"
    correction_bias: bool = False
    shared: str = ""
    shared_gate: str = ""


_QWEN = Family("num_experts", shared="shared_expert", shared_gate="shared_expert_gate")
_SIGMOID = Family("n_routed_experts", correction_bias=True, shared="shared_experts")
FAMILIES = {
    "mixtral": Family("num_local_experts", "intermediate_size", ("w1", "w3", "w2")),
    "qwen2_moe": _QWEN,
    "qwen3_moe": Family("num_experts"),
    "qwen3_next": _QWEN,
    "olmoe": Family("num_experts", "intermediate_size"),
    "deepseek_v2": Family("n_routed_experts", shared="shared_experts"),
    "deepseek_v3": _SIGMOID,
    "glm4_moe": _SIGMOID,
    "gpt_oss": Family(
        "num_local_experts",
        "intermediate_size",
        projections=(),
        layout="interleaved_transposed",
        biases=True,
        router="router",
    ),
}
# Of config.json: what transformers' own code leaves unread, and the code of the checkpoint reads.
_SCORING = {"deepseek_v2": "softmax", "deepseek_v3": "sigmoid", "glm4_moe": "sigmoid"}


def config_of(hf_config: Any) -> MoEConfig:
    """The `MoEConfig` of the sparse layers of a transformers config.

    Attributes alone are read, so `types.SimpleNamespace(**json.load(...))` of a config.json will
    do. What matters in training alone (losses, jitter) is left out, and so is what concerns
    exchange: `dataclasses.replace`.

    Args:
        hf_config: its `model_type` is one of `FAMILIES`.

    Raises:
        AttributeError: an attribute of the family's is missing.
        ValueError: another model type, or a setting that `MoE` has not.
    """
    op, kind = "config_of", hf_config.model_type
    checks.one_of(op, "model_type", kind, tuple(FAMILIES))
    family = FAMILIES[kind]
    activation = "swiglu_clamped"
    if kind == "gpt_oss":
        for name, only in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
            checks.one_of(op, name, getattr(hf_config, name, only), (only,))
    else:
        activations = {"silu": "swiglu", "gelu": "geglu"}
        checks.one_of(op, "hidden_act", hf_config.hidden_act, tuple(activations))
        checks.one_of(op, "mlp_bias", getattr(hf_config, "mlp_bias", False), (False,))
        activation = activations[hf_config.hidden_act]
    ffn_hidden_size = getattr(hf_config, family.ffn_hidden_size)
    shared = 0
    if family.shared_gate:
        shared = hf_config.shared_expert_intermediate_size
    elif family.shared:
        shared = ffn_hidden_size * (hf_config.n_shared_experts or 0)
    return MoEConfig(
        hidden_size=hf_config.hidden_size,
        ffn_hidden_size=ffn_hidden_size,
        num_experts=getattr(hf_config, family.num_experts),
        top_k=hf_config.num_experts_per_tok,
        activation=activation,
        bias=family.biases,
        shared_ffn_hidden_size=shared,
        shared_gate=bool(family.shared_gate and shared),
        router=_router_config(op, kind, hf_config),
    )


def _router_config(op: str, kind: str, hf_config: Any) -> RouterConfig:
    if kind == "gpt_oss":
        return RouterConfig(score_first=False, normalize=False, logit_bias=True)
    normalize = kind == "mixtral" or bool(hf_config.norm_topk_prob)
    if normalize and hf_config.num_experts_per_tok == 1:
        raise ValueError(
            f"{op}: num_experts_per_tok must be over 1 if weights are normalized, got 1"
        )
    if kind not in _SCORING:
        return RouterConfig(normalize=normalize)
    scoring = _SCORING[kind]
    checks.one_of(op, "scoring_func", getattr(hf_config, "scoring_func", scoring), (scoring,))
    scale = float(hf_config.routed_scaling_factor)
    groups = {"num_groups": hf_config.n_group, "top_groups": hf_config.topk_group}
    if scoring == "sigmoid":
        return RouterConfig(
            score="sigmoid",
            normalize=normalize,
            scale=scale,
            expert_bias=True,
            group_score_top=2,
            **groups,
        )
    # Of a V2 checkpoint with it transformers and the checkpoint's own code differ.
    checks.one_of(op, "norm_topk_prob", normalize, (False,))
    method = hf_config.topk_method
    checks.one_of(op, "topk_method", method, ("greedy", "group_limited_greedy"))
    if method == "greedy":
        return RouterConfig(normalize=False, scale=scale)
    return RouterConfig(normalize=False, scale=scale, group_score_top=1, **groups)
