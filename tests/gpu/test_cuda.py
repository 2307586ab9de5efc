"""The same layer on one GPU: against the oracle, compiled, without a sync, in a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from moe_ops.nn import MoEConfig
from tests.gpu import captured
from tests.nn.layers import (
    capacity_fields,
    check_alone,
    check_never_syncs,
    inputs_of_rank,
    make_config,
    make_layer,
)

pytestmark = pytest.mark.gpu

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SIZES = {"hidden_size": 16, "ffn_hidden_size": 8}
BOUNDED = capacity_fields(64, copy_capacity=64, row_capacity=128, **SIZES)


def _check(config: MoEConfig, dtype: torch.dtype, backend: str | None) -> None:
    layer = make_layer(config, None, dtype, "cuda")
    step = torch.compile(layer, fullgraph=True, backend=backend) if backend else layer
    check_alone(layer, step, 33, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", [None, "inductor"], ids=str)
def test_moe_matches_oracle_on_gpu(backend: str | None, dtype: torch.dtype) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    _check(make_config(bias=True, **SIZES), dtype, backend)


@pytest.mark.parametrize("dispatcher", ["flex", "alltoall", "allgather"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_moe_capacity_mode_never_syncs(dispatcher: str, dtype: torch.dtype) -> None:
    config = make_config(dispatcher=dispatcher, **BOUNDED)
    check_never_syncs(make_layer(config, None, dtype, "cuda"))


@pytest.mark.parametrize("dispatcher", ["flex", "alltoall", "allgather"])
def test_moe_replays_in_a_cuda_graph(dispatcher: str) -> None:
    config = make_config(dispatcher=dispatcher, **BOUNDED)
    layer = make_layer(config, None, torch.bfloat16, "cuda").eval()
    x, _, ids = (t.cuda() for t in inputs_of_rank(0, 33, config, torch.bfloat16))
    with torch.no_grad():
        (y,), replay = captured(lambda: [layer(x, router_ids=ids)])
    for routing in (torch.full_like(ids, 3), torch.full_like(ids, -1), (ids + 1) % 8):
        ids.copy_(routing)
        replay()
        torch.testing.assert_close(y, layer(x, router_ids=routing), rtol=0, atol=0)
