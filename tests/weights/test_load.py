from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_ops.nn import Experts, MoE, MoEConfig, RouterConfig
from moe_ops.parallel import ParallelLayout, fully_shard_moe
from moe_ops.testing import assert_close, assert_equal
from moe_ops.weights import config_of, load_experts

from ..ranks import run_on_ranks
from .checkpoints import FAMILIES, PREFIX, E, F, H, expert_weights, hf_config, layer_state

NAMINGS = [(family, fused) for family in FAMILIES for fused in (True, False)]
NAMINGS.remove(("gpt_oss", False))  # never apart
IDS = [f"{family}-{'fused' if fused else 'apart'}" for family, fused in NAMINGS]


def full_weights(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """In our layout: w13 [E, 2, F, H], w2 [E, H, F], b13 [E, 2, F], b2 [E, H]."""
    return {
        "w13": torch.stack([weights["gate"], weights["up"]], 1),
        "w2": weights["down"],
        "b13": torch.stack([weights["gate_bias"], weights["up_bias"]], 1),
        "b2": weights["down_bias"],
    }


def load(family: str, state: dict[str, torch.Tensor], group: Any = None) -> MoE:
    moe = MoE(config_of(hf_config(family)), group)
    load_experts(moe, state, prefix=PREFIX, family=family)
    return moe


@pytest.mark.parametrize(("family", "fused"), NAMINGS, ids=IDS)
def test_every_tensor_arrives(family: str, fused: bool) -> None:
    weights = expert_weights()
    state = layer_state(family, weights, fused)
    moe = load(family, state)
    for name, expected in full_weights(weights).items():
        if (found := getattr(moe.experts, name)) is not None:
            assert_equal(name, found.reshape(expected.shape), expected)
    state = {name.removeprefix(PREFIX): tensor for name, tensor in state.items()}
    router = "router" if family == "gpt_oss" else "gate"
    assert_equal("router.weight", moe.router.weight, state[f"{router}.weight"])
    if "gate.e_score_correction_bias" in state:
        bias = state["gate.e_score_correction_bias"]
        assert_equal("expert_bias", moe.router.expert_bias, bias)
    shared = "shared_expert" if family.startswith("qwen") else "shared_experts"
    if moe.shared_experts is not None:
        up = [state[f"{shared}.{name}.weight"] for name in ("gate_proj", "up_proj")]
        assert_equal("shared.up", moe.shared_experts.up.weight, torch.cat(up))
        down = state[f"{shared}.down_proj.weight"]
        assert_equal("shared.down", moe.shared_experts.down.weight, down)
    if "shared_expert_gate.weight" in state:
        gate = state["shared_expert_gate.weight"]
        assert_equal("shared.gate", moe.shared_experts.gate.weight, gate)


def test_experts_alone_and_cast() -> None:
    weights = expert_weights()
    experts = Experts(H, F, E, dtype=torch.float64)
    state = layer_state("mixtral", weights, fused=False)
    load_experts(experts, state, prefix=PREFIX.removesuffix("."), family="mixtral")
    expected = full_weights(weights)["w13"].flatten(1, 2).double()
    assert_equal("w13", experts.w13, expected)


def test_router_bias_moves_choice_and_weights() -> None:
    moe = MoE(config_of(hf_config("gpt_oss")), dtype=torch.float64)
    state = layer_state("gpt_oss", expert_weights())
    load_experts(moe, state, prefix=PREFIX, family="gpt_oss")
    x = torch.randn(7, H, dtype=torch.float64)
    routing = moe.router(x)
    bias = state[f"{PREFIX}router.bias"].double()
    values, ids = (x @ moe.router.weight.T + bias).topk(2)
    assert_equal("ids", routing.ids_TK, ids.int())
    assert_close("weights", routing.weights_TK, values.softmax(-1))
    assert "router.bias" in dict(moe.named_parameters())
    assert_equal("bias", moe.router.bias.detach(), bias)
    moe.reset_parameters()
    assert not moe.router.bias.any()


# Ranks.


class _Recorded(dict[str, torch.Tensor]):
    """Remembers which tensors were read."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> torch.Tensor:
        self.read.add(name)
        return super().__getitem__(name)


def _loads_own_experts(rank: int, family: str, fused: bool) -> None:
    torch.manual_seed(0)
    weights = expert_weights()
    state = _Recorded(layer_state(family, weights, fused))
    mine = range(2 * rank, 2 * rank + 2)
    if not fused:  # other ranks' may be missing, and are never read
        lost = PREFIX + f"experts.{3 - 3 * rank}."
        state = _Recorded({name: t for name, t in state.items() if not name.startswith(lost)})
    moe = load(family, state, dist.group.WORLD)
    for name, expected in full_weights(weights).items():
        if (found := getattr(moe.experts, name)) is not None:
            expected = expected[mine.start : mine.stop]
            assert_equal(name, found.reshape(expected.shape), expected)
    read = {int(name.split(".")[5]) for name in state.read if ".experts." in name and not fused}
    assert read == (set() if fused else set(mine))


@pytest.mark.dist
@pytest.mark.parametrize(
    ("family", "fused"), [("mixtral", True), ("qwen3_moe", False), ("gpt_oss", True)]
)
def test_loads_own_experts(family: str, fused: bool) -> None:
    run_on_ranks(2, _loads_own_experts, family, fused)


def _loads_own_parts(rank: int, family: str, fused: bool) -> None:
    torch.manual_seed(0)
    weights = expert_weights()
    mesh = ParallelLayout(world=4, ep=2, etp=2).meshes("cpu").experts
    moe = load(family, layer_state(family, weights, fused), mesh)
    for name, expected in full_weights(weights).items():
        if (found := getattr(moe.experts, name)) is not None:
            assert_equal(name, found.full_tensor(), expected)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("family", "fused"), [("qwen3_moe", True), ("deepseek_v3", False), ("gpt_oss", True)]
)
def test_loads_own_parts_on_a_mesh(family: str, fused: bool) -> None:
    run_on_ranks(4, _loads_own_parts, family, fused)


def _rejects_sharded(rank: int) -> None:
    meshes = ParallelLayout(world=2).meshes("cpu")
    model = torch.nn.Sequential(MoE(config_of(hf_config("mixtral")), meshes.experts))
    fully_shard_moe(model, meshes)
    state = layer_state("mixtral", expert_weights())
    with pytest.raises(ValueError, match=r"router.weight must not be sharded any further"):
        load_experts(model[0], state, prefix=PREFIX, family="mixtral")


@pytest.mark.dist
def test_rejects_what_fully_shard_has() -> None:
    run_on_ranks(2, _rejects_sharded)


# Errors.


@pytest.mark.parametrize(
    ("fused", "changes", "error", "message"),
    [
        (True, {"gate.weight": None}, ValueError, f"got none of {PREFIX}gate.weight$"),
        (True, {"experts.down_proj": None}, ValueError, f"none of {PREFIX}experts.down_proj$"),
        (False, {"experts.3.w2.weight": None}, ValueError, f"none of {PREFIX}experts.3.w2.weight$"),
        (True, {"gate.bias": torch.zeros(E)}, ValueError, f"alone, got {PREFIX}gate.bias$"),
        (False, {"experts.4.w1.weight": torch.zeros(F, H)}, ValueError, r"got .*experts.4.w1"),
        (
            False,
            {"experts.1.w1.weight_scale_inv": torch.zeros(1)},
            ValueError,
            "got .*experts.1.w1.weight_scale_inv$",
        ),
        (True, {"gate.weight": torch.zeros(H, E)}, ValueError, r"gate.weight must have shape"),
        (True, {"gate.weight": torch.ones(E, H, device="meta")}, ValueError, "got it meta"),
        (
            True,
            {"gate.weight": torch.ones(E, H).to_sparse()},
            ValueError,
            "got it torch.sparse_coo",
        ),
        (
            True,
            {"experts.gate_up_proj": torch.zeros(E, H, 2 * F)},
            ValueError,
            r"experts.gate_up_proj must have shape \(4, 12, 8\), got \(4, 8, 12\)",
        ),
        (
            False,
            {"experts.0.w3.weight": torch.zeros(F, H, dtype=torch.int8)},
            TypeError,
            r"experts.0.w3.weight must be torch.float32 .* got torch.int8",
        ),
    ],
    ids=[
        *("router", "fused", "apart", "bias", "expert", "scale", "shape"),
        *("meta", "sparse", "turned", "dtype"),
    ],
)
def test_rejects_state_and_changes_nothing(
    fused: bool, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    moe = MoE(config_of(hf_config("mixtral")))
    before = {name: tensor.clone() for name, tensor in moe.state_dict().items()}
    state = {**layer_state("mixtral", expert_weights(), fused)}
    state |= {PREFIX + name: tensor for name, tensor in changes.items()}
    state = {name: tensor for name, tensor in state.items() if tensor is not None}
    with pytest.raises(error, match=message):
        load_experts(moe, state, prefix=PREFIX, family="mixtral")
    for name, tensor in moe.state_dict().items():
        assert_equal(name, tensor, before[name])


@pytest.mark.parametrize("width", [0, 3])
def test_shared_expert_of_no_width_is_none(width: int) -> None:
    """transformers keeps its empty tensors, and its gate; others are not passed over."""
    moe = MoE(config_of(hf_config("qwen2_moe", shared_expert_intermediate_size=0)))
    state = layer_state("qwen2_moe", expert_weights())
    shared = f"{PREFIX}shared_expert."
    state = {name: tensor for name, tensor in state.items() if not name.startswith(shared)}
    state[f"{shared}down_proj.weight"] = torch.ones(H, width)
    if width:
        with pytest.raises(ValueError, match=r"layer alone, got .*shared_expert.down_proj.weight"):
            load_experts(moe, state, prefix=PREFIX, family="qwen2_moe")
    else:
        load_experts(moe, state, prefix=PREFIX, family="qwen2_moe")
        assert_equal("gate", moe.router.weight, state[f"{PREFIX}gate.weight"])


def test_failed_load_changes_nothing() -> None:
    moe = MoE(config_of(hf_config("gpt_oss")))
    state = layer_state("gpt_oss", expert_weights())
    del state[f"{PREFIX}router.bias"]
    with pytest.raises(ValueError, match=r"got none of .*router\.bias"):
        load_experts(moe, state, prefix=PREFIX, family="gpt_oss")
    assert not moe.router.bias.any()


_SIZES: Any = {"hidden_size": H, "ffn_hidden_size": F, "num_experts": E, "top_k": 2}


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("llama4", {}, "family must be one of .* got 'llama4'"),
        ("mixtral", {"activation": "relu2"}, r"activation for 'mixtral' must be one of"),
        ("gpt_oss", {}, r"activation for 'gpt_oss' must be one of \['swiglu_clamped'\]"),
        ("mixtral", {"bias": True}, r"bias of experts for 'mixtral' must be one of \[False\]"),
        ("gpt_oss", {"activation": "swiglu_clamped", "bias": True}, "logit_bias for 'gpt_oss'"),
        ("mixtral", {"shared_ffn_hidden_size": 4}, "no shared expert for 'mixtral'"),
        ("qwen2_moe", {"shared_ffn_hidden_size": 10}, r"shared_gate for 'qwen2_moe'"),
        ("deepseek_v3", {"shared_ffn_hidden_size": 12}, "alone, got .*e_score_correction_bias"),
        ("qwen2_moe", {}, "alone, got .*shared_expert.down_proj.weight"),
    ],
    ids=[
        "family",
        "relu2",
        "clamped",
        "bias",
        "logits",
        "shared",
        "gate",
        "correction",
        "no shared",
    ],
)
def test_rejects_module(family: str, fields: dict[str, Any], message: str) -> None:
    known = family in FAMILIES
    state = layer_state(family if known else "mixtral", expert_weights())
    with pytest.raises(ValueError, match=message):
        load_experts(MoE(MoEConfig(**_SIZES, **fields)), state, prefix=PREFIX, family=family)


def test_rejects_meta_and_other_modules() -> None:
    state = layer_state("mixtral", expert_weights())
    moe = MoE(config_of(hf_config("mixtral")), device="meta")
    with pytest.raises(ValueError, match=r"router.weight must not be on the meta device"):
        load_experts(moe, state, prefix=PREFIX, family="mixtral")
    other: Any = torch.nn.Linear(1, 1)
    with pytest.raises(TypeError, match="module must be MoE or Experts, got Linear"):
        load_experts(other, state, prefix=PREFIX, family="mixtral")


# Configs.


def test_configs() -> None:
    sizes: Any = _SIZES
    sigmoid = RouterConfig(
        score="sigmoid",
        scale=2.5,
        num_groups=2,
        expert_bias=True,
        group_score_top=2,
    )
    plain = RouterConfig(normalize=False)
    grouped = RouterConfig(normalize=False, scale=2.5, num_groups=2, group_score_top=1)
    one_group = RouterConfig(score="sigmoid", scale=2.5, expert_bias=True, group_score_top=2)
    shared = {"shared_ffn_hidden_size": 10, "shared_gate": True}
    clamped = {"activation": "swiglu_clamped", "bias": True}
    expected = {
        "mixtral": MoEConfig(**sizes),
        "qwen2_moe": MoEConfig(**sizes, **shared, router=plain),
        "qwen3_moe": MoEConfig(**sizes),
        "qwen3_next": MoEConfig(**sizes, **shared),
        "olmoe": MoEConfig(**sizes, router=plain),
        "deepseek_v2": MoEConfig(**sizes, shared_ffn_hidden_size=12, router=grouped),
        "deepseek_v3": MoEConfig(**sizes, shared_ffn_hidden_size=12, router=sigmoid),
        "glm4_moe": MoEConfig(**sizes, shared_ffn_hidden_size=12, router=one_group),
        "gpt_oss": MoEConfig(
            **sizes,
            **clamped,
            router=RouterConfig(score_first=False, normalize=False, logit_bias=True),
        ),
    }
    assert {family: config_of(hf_config(family)) for family in FAMILIES} == expected
    greedy = {"topk_method": "greedy", "n_group": None, "topk_group": None}
    config = config_of(hf_config("deepseek_v2", **greedy))
    assert config.router == RouterConfig(normalize=False, scale=2.5)
    assert config_of(hf_config("olmoe", hidden_act="gelu")).activation == "geglu"


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("mixtral", {"hidden_act": "relu"}, "hidden_act must be one of"),
        ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok must be over 1"),
        ("gpt_oss", {"swiglu_limit": 5.0}, r"swiglu_limit must be one of \[7.0\], got 5.0"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob must be one of"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method must be one of"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias must be one of"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func must be one of"),
        ("glm4_moe", {"model_type": "llama"}, "model_type must be one of"),
    ],
)
def test_config_of_rejects(family: str, fields: dict[str, Any], message: str) -> None:
    config = hf_config(family)
    vars(config).update(fields)
    with pytest.raises(ValueError, match=message):
        config_of(config)
