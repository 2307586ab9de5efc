"""The same layer on one GPU: against the oracle, compiled, without a sync, in a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from moe_ops.nn import MoEConfig
from moe_ops.testing import assert_close
from tests.nn.layers import capacity_fields, inputs_of_rank, make_config, make_layer, oracle_step

pytestmark = pytest.mark.gpu

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SIZES = {"hidden_size": 16, "ffn_hidden_size": 8}
BOUNDED = capacity_fields(64, copy_capacity=64, row_capacity=128, **SIZES)


def _check(config: MoEConfig, dtype: torch.dtype, backend: str | None) -> None:
    layer = make_layer(config, None, dtype, "cuda")
    step = torch.compile(layer, fullgraph=True, backend=backend) if backend else layer
    x, grad, ids = (t.cuda() for t in inputs_of_rank(0, 33, config, dtype))
    x.requires_grad_()
    y = step(x, router_ids=ids)
    y.backward(grad)
    expected_y, expected = oracle_step(layer, x, grad, ids)
    assert_close("y", y, expected_y)
    assert_close("x.grad", x.grad, expected["x"])
    for name, parameter in layer.named_parameters():
        assert_close(f"{name}.grad", parameter.grad, expected[name])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", [None, "inductor"], ids=str)
def test_moe_matches_oracle_on_gpu(backend: str | None, dtype: torch.dtype) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    _check(make_config(bias=True, **SIZES), dtype, backend)


@pytest.mark.parametrize("dispatcher", ["flex", "alltoall", "allgather"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_moe_capacity_mode_never_syncs(dispatcher: str, dtype: torch.dtype) -> None:
    config = make_config(dispatcher=dispatcher, **BOUNDED)
    layer = make_layer(config, None, dtype, "cuda")
    x, grad, _ = (t.cuda() for t in inputs_of_rank(0, 33, config, dtype))
    layer(x).backward(grad)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x).backward(grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    layer.check_overflow()


@pytest.mark.parametrize("dispatcher", ["flex", "alltoall", "allgather"])
def test_moe_replays_in_a_cuda_graph(dispatcher: str) -> None:
    config = make_config(dispatcher=dispatcher, **BOUNDED)
    layer = make_layer(config, None, torch.bfloat16, "cuda").eval()
    x, _, ids = (t.cuda() for t in inputs_of_rank(0, 33, config, torch.bfloat16))
    layer(x, router_ids=ids)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = layer(x, router_ids=ids)
    for routing in (torch.full_like(ids, 3), torch.full_like(ids, -1), (ids + 1) % 8):
        ids.copy_(routing)
        graph.replay()
        torch.testing.assert_close(y, layer(x, router_ids=routing), rtol=0, atol=0)
