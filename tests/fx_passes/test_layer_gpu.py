"""The compiled layer on a GPU, through Inductor: numbers, memory, no waiting for the device."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import fx_passes
from fx_passes.graph import name_of
from moe_ops import _library
from moe_ops.nn import MoE
from moe_ops.testing import assert_close
from tests.gpu import never_waiting
from tests.nn.layers import check_alone

from .compiled import OFF, Backend, SavedBytes, make_layer, step

pytestmark = pytest.mark.gpu

LAYERS: dict[str, dict[str, Any]] = {
    "swiglu": {},
    "geglu": {"activation": "geglu"},
    "relu2": {"activation": "relu2"},
    "bias": {"bias": True, "activation": "swiglu_clamped"},
    "unpermute": {"weights_at": "unpermute"},
    "capacity": {"size_mode": "capacity", "max_tokens": 512, "row_capacity": 1024},
}
SIZES = {"hidden_size": 256, "ffn_hidden_size": 128, "num_experts": 8, "top_k": 4}


def compiled(layer: MoE, **overrides: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(layer, fullgraph=True, options=fx_passes.options(**overrides))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_layer_matches_eager_on_gpu(name: str, dtype: torch.dtype) -> None:
    layer = make_layer(dtype, "cuda", **{**SIZES, **LAYERS[name]})
    exact = make_layer(torch.float64, "cuda", **{**SIZES, **LAYERS[name]})
    exact.load_state_dict(layer.state_dict())
    ids = torch.rand(200, 8).argsort(1)[:, :4].cuda()
    expected = step(exact, exact, 200, router_ids=ids)
    eager = step(layer, layer, 200, router_ids=ids)
    for key, value in step(layer, compiled(layer), 200, router_ids=ids).items():
        assert_close(key, value, expected[key], eager[key])


def test_layer_equals_the_oracle_on_gpu() -> None:
    layer = make_layer(torch.float32, "cuda")
    check_alone(layer, compiled(layer), 33, "cuda")


def test_layer_under_autocast_on_gpu() -> None:
    layer = make_layer(torch.float32, "cuda", **SIZES)
    expected = step(layer, compiled(layer, **OFF), 200, autocast=True)
    for name, value in step(layer, compiled(layer), 200, autocast=True).items():
        assert value.dtype == expected[name].dtype
        scale = expected[name].abs().max().item()
        torch.testing.assert_close(value, expected[name], rtol=0, atol=2e-2 * scale)


@pytest.mark.parametrize("name", ["swiglu", "relu2", "bias"])
def test_layer_keeps_tokens_and_h_alone_on_gpu(name: str) -> None:
    """Whatever kernels there are: what is kept is decided before them."""
    fields = {**SIZES, **LAYERS[name], "ffn_hidden_size": 512}
    layer = make_layer(torch.bfloat16, "cuda", **fields)
    x = torch.randn(512, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    function = compiled(layer)
    with SavedBytes(x, *layer.parameters()) as saved:
        y = function(x)
    floor = 512 * 4 * 512 * (1 if name == "relu2" else 2) * 2
    assert floor <= saved.total <= 1.05 * floor
    y.backward(torch.ones_like(y))


def test_layer_never_waits_for_the_gpu() -> None:
    layer = make_layer(torch.bfloat16, "cuda", **SIZES)
    function = compiled(layer)
    x = torch.randn(200, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    for _ in range(2):
        y = function(x)
        y.backward(y.detach())
    with never_waiting():
        y = function(x)
        y.backward(y.detach())


def test_layer_gives_the_same_bits_twice_on_gpu() -> None:
    layer = make_layer(torch.bfloat16, "cuda", **SIZES)
    function = compiled(layer)
    first, second = (step(layer, function, 200) for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_passes_log_every_kernel(caplog: pytest.LogCaptureFixture) -> None:
    """Each `takes` can be asked of fake tensors."""
    caplog.set_level(logging.DEBUG, logger="fx_passes")
    layer, backend = make_layer(torch.bfloat16, "cuda", **SIZES), Backend()
    step(layer, backend.compile(layer), 200)
    for graph in (*backend.forward, *backend.backward):
        nodes = [node for node in graph.nodes if str(node.target).startswith("moe_ops.")]
        public = [node.name for node in nodes if name_of(node) in _library.OPS]
        assert public
        for name in public:
            assert f"lower: {name} runs " in caplog.text
