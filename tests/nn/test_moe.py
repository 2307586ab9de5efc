"""The layer: every dispatcher, size mode and option against one float64 oracle."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from moe_ops.nn import MoE, MoEConfig, RouterConfig
from tests.nn.layers import capacity_fields, check_alone, check_layer, make_config, make_layer
from tests.ranks import run_on_ranks

DISPATCHERS = ("flex", "alltoall", "allgather")
MODES = {"exact": {}, "capacity": capacity_fields(64)}
OPTIONS = {
    "geglu": {"activation": "geglu"},
    "relu2": {"activation": "relu2"},
    "clamped": {"activation": "swiglu_clamped"},
    "bias": {"bias": True},
    "bias-unpermute": {"bias": True, "weights_at": "unpermute"},
    "unpermute": {"weights_at": "unpermute"},
    "sigmoid": {"router": {"score": "sigmoid", "scale": 2.5}},
    "softmax-last": {"router": {"score_first": False}},
    "top-1": {"top_k": 1, "router": {"normalize": False}},
    "top-8": {"top_k": 8},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_moe_matches_oracle(name: str) -> None:
    config = make_config(**OPTIONS[name])
    layer = make_layer(config, None, torch.float64)
    check_alone(layer, layer, 13)


@pytest.mark.dist
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_moe_matches_oracle_on_ranks(dispatcher: str, mode: str) -> None:
    config = make_config(dispatcher=dispatcher, **MODES[mode])
    for tokens in ((7, 13), (5, 0), (0, 0), (17, 64)):
        run_on_ranks(2, check_layer, config, tokens)
    run_on_ranks(4, check_layer, config, (7, 0, 13, 64))


@pytest.mark.dist
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("name", OPTIONS)
def test_moe_options_match_oracle_on_ranks(name: str, dispatcher: str) -> None:
    run_on_ranks(2, check_layer, make_config(dispatcher=dispatcher, **OPTIONS[name]), (7, 5))


@pytest.mark.dist
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_moe_routes_itself_on_ranks(dispatcher: str) -> None:
    run_on_ranks(2, check_layer, make_config(dispatcher=dispatcher), (9, 6), torch.float64, False)


@pytest.mark.dist
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_moe_on_a_subgroup(dispatcher: str) -> None:
    config = make_config(dispatcher=dispatcher)
    run_on_ranks(4, check_layer, config, (7, 5), torch.float64, True, None, [1, 3])


@pytest.mark.dist
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_moe_low_precision_on_ranks(dispatcher: str, dtype: torch.dtype) -> None:
    run_on_ranks(2, check_layer, make_config(dispatcher=dispatcher), (7, 13), dtype)


@pytest.mark.dist
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_moe_compiles_fullgraph_on_ranks(dispatcher: str, mode: str) -> None:
    config = make_config(dispatcher=dispatcher, **MODES[mode])
    run_on_ranks(2, check_layer, config, (7, 13), torch.float64, True, "aot_eager")


@pytest.mark.dist
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_moe_pads_to_capacity(dispatcher: str) -> None:
    """Padding changes the rows' layout, not a value."""
    router = {"expert_capacity_factor": 8.0, "pad_to_capacity": True}
    padded = make_config(router, dispatcher=dispatcher, max_tokens=16)
    run_on_ranks(2, check_layer, padded, (7, 16))
    run_on_ranks(2, check_layer, padded, (0, 3))


def test_moe_padding_mask_keeps_padding_out() -> None:
    layer = make_layer(make_config(shared_ffn_hidden_size=4), None, torch.float64)
    x = torch.randn(8, 8, dtype=torch.float64)
    mask = torch.tensor([True] * 5 + [False] * 3)
    x[5:] = torch.nan
    x.requires_grad_()
    y = layer(x, padding_mask=mask)
    y.sum().backward()
    assert torch.equal(y[5:], torch.zeros_like(y[5:]))
    assert (layer.ids_TK[5:] == -1).all() and int(layer.stats()["tokens_per_expert"].sum()) == 10
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    assert torch.equal(x.grad[5:], torch.zeros_like(x.grad[5:]))
    torch.testing.assert_close(y[:5], layer(x[:5].detach()))


def test_moe_zero_weights_and_unit_bias_give_the_gate_weights() -> None:
    for weights_at in ("activation", "unpermute"):
        config = make_config({"scale": 3.0}, bias=True, weights_at=weights_at)
        layer = make_layer(config, None, torch.float32)
        with torch.no_grad():
            for parameter in (layer.experts.w13, layer.experts.w2, layer.experts.b13):
                parameter.zero_()
            layer.experts.b2.fill_(1)
        torch.testing.assert_close(layer(torch.randn(5, 8)), torch.full((5, 8), 3.0))


def test_moe_keeps_float32_gate_weights_in_bf16() -> None:
    """Weights of 1/3 keep their float32 value up to the sum; gradients of the weights exist."""
    config = make_config(top_k=3, bias=True, weights_at="unpermute")
    layer = make_layer(config, None, torch.float32)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.experts.b2.fill_(1)
    y = layer(torch.randn(4, 8))
    assert (y - 1).abs().max() < 1e-6
    y.sum().backward()
    assert layer.router.weight.grad is not None


def test_moe_state_survives_copy_pickle_meta() -> None:
    config = make_config(
        {"expert_bias": True}, shared_ffn_hidden_size=4, shared_gate=True, bias=True
    )
    layer = make_layer(config, None, torch.float32)
    x = torch.randn(5, 8)
    expected = layer(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), expected)
    meta = MoE(config, device="meta")
    assert all(t.is_meta for t in meta.state_dict().values())
    empty = meta.to_empty(device="cpu")
    torch.manual_seed(0)
    empty.reset_parameters()
    assert not any(t.isnan().any() for t in empty.state_dict().values())
    empty.load_state_dict(layer.state_dict())
    assert torch.equal(empty(x), expected)
    assert sorted(layer.state_dict()) == [
        "experts.b13",
        "experts.b2",
        "experts.w13",
        "experts.w2",
        "router.expert_bias",
        "router.weight",
        "shared_experts.down.weight",
        "shared_experts.gate.weight",
        "shared_experts.up.weight",
    ]


def test_moe_works_under_autocast() -> None:
    layer = make_layer(make_config(shared_ffn_hidden_size=4, bias=True), None, torch.float32)
    x = torch.randn(5, 8, requires_grad=True)
    expected = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), expected, rtol=5e-2, atol=2e-2)
    y.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())


def test_moe_trains_and_evaluates_with_equal_outputs() -> None:
    layer = make_layer(make_config(), None, torch.float32)
    x = torch.randn(5, 8)
    assert torch.equal(layer(x), layer.eval()(x))


def test_moe_runs_on_meta() -> None:
    layer = MoE(make_config(), device="meta")
    assert layer(torch.randn(5, 8, device="meta")).shape == (5, 8)
    with torch.device("meta"):
        assert MoE(make_config()).experts.w13.is_meta


@pytest.mark.parametrize("transform", ["jvp", "grad", "vmap"])
def test_moe_refuses_function_transforms(transform: str) -> None:
    layer = make_layer(make_config(), None, torch.float32)
    x = torch.randn(5, 8)
    calls = {
        "jvp": lambda: torch.func.jvp(layer, (x,), (x,)),
        "grad": lambda: torch.func.grad(lambda x: layer(x).sum())(x),
        "vmap": lambda: torch.vmap(layer)(x[None]),
    }
    with pytest.raises(NotImplementedError, match=r"router_linear: must be called outside"):
        calls[transform]()


def test_moe_refuses_float64_under_autocast() -> None:
    layer = make_layer(make_config(), None, torch.float32)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(TypeError, match="x must have the experts' dtype"),
    ):
        layer(torch.randn(5, 8, dtype=torch.float64))


BAD_TYPES = {
    "top_k": 2.0,
    "num_experts": "8",
    "bias": "no",
    "max_tokens": None,
    "router": {"top_k": 2},
}


@pytest.mark.parametrize("field", BAD_TYPES)
def test_moe_rejects_wrong_types_in_config(field: str) -> None:
    with pytest.raises(TypeError, match=f"MoEConfig: {field} must be .*, got"):
        MoEConfig(**{**make_config().__dict__, field: BAD_TYPES[field]})


BAD_CONFIGS = {
    "K over E": {"top_k": 9},
    "no experts": {"num_experts": 0},
    "negative capacity": {**capacity_fields(4), "row_capacity": -1},
    "capacity without max_tokens": {"size_mode": "capacity"},
    "capacity in exact mode": {"row_capacity": 4},
    "capacity and padding": {
        **capacity_fields(4),
        "copy_capacity": 3,
        "router": RouterConfig(expert_capacity_factor=1.0, pad_to_capacity=True),
    },
    "unknown activation": {"activation": "tanh"},
    "unknown dispatcher": {"dispatcher": "magic"},
    "unknown wire": {"wire": "int4"},
    "fp8 wire without flex": {"wire": "fp8", "dispatcher": "alltoall"},
    "gate without shared expert": {"shared_gate": True},
    "groups do not divide": {"router": RouterConfig(num_groups=3)},
    "K over groups": {"top_k": 5, "router": RouterConfig(num_groups=2, top_groups=1)},
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_moe_rejects_impossible_config(name: str) -> None:
    with pytest.raises(ValueError, match="must"):
        MoEConfig(**{**make_config().__dict__, **BAD_CONFIGS[name]})


def test_moe_rejects_bad_input() -> None:
    layer = make_layer(
        make_config({"balancing": ("seq_aux",), "aux_loss_coeff": 1.0}), None, torch.float32
    )
    good = torch.randn(1, 5, 8)
    cases = [
        (ValueError, "x must have shape", {"x": torch.randn(1, 5, 7)}),
        (ValueError, "seq_aux", {"x": torch.randn(5, 8)}),
        (TypeError, "x must have the experts' dtype", {"x": good.double()}),
        (TypeError, "padding_mask must be torch.bool", {"padding_mask": torch.ones(1, 5)}),
        (
            ValueError,
            "padding_mask must have shape",
            {"padding_mask": torch.ones(5, 1, dtype=torch.bool)},
        ),
        (TypeError, "router_ids must be", {"router_ids": torch.rand(5, 2)}),
        (
            ValueError,
            "router_ids must have shape",
            {"router_ids": torch.ones(5, 3, dtype=torch.int)},
        ),
        (RuntimeError, "router_ids must be in -1", {"router_ids": torch.full((5, 2), 8)}),
    ]
    for kind, message, arguments in cases:
        with pytest.raises(kind, match=message):
            layer(**{"x": good, **arguments})
    with pytest.raises(ValueError, match="MoE: group must name an initialised process group"):
        MoE(make_config(), group="nobody")
