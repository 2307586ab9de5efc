"""`fully_shard_moe` as a trainer uses it: from the meta device, block by block, in bf16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

from moe_ops.nn import MoE
from moe_ops.parallel import (
    ParallelLayout,
    ParallelMeshes,
    clip_grad_norm_,
    fully_shard_moe,
    reduce_gradients,
)
from moe_ops.testing import assert_close
from tests.nn.layers import make_config
from tests.ranks import run_on_ranks

from .test_gradients import LAYOUTS, Model, batch, full, part_of_rank

# Three replicas of two times four experts: no other dimension divides by three.
UNEVEN = {"ep 2, edp 3": {"world": 6, "ep": 2}}


def make(sizes: dict[str, int]) -> tuple[ParallelLayout, ParallelMeshes]:
    layout = ParallelLayout(**sizes)
    return layout, layout.meshes("cpu")


def _check_reset(rank: int, sizes: dict[str, int]) -> None:
    _, meshes = make(sizes)
    config = make_config(num_experts=8, ffn_hidden_size=4, bias=True)
    moe = MoE(config, meshes.experts, device="meta")
    fully_shard_moe(moe, meshes).to_empty(device="cpu")
    torch.manual_seed(3)
    moe.experts.reset_parameters()
    plain = MoE(config).experts
    torch.manual_seed(3)
    plain.reset_parameters()
    for name, expected in plain.named_parameters():
        found = full(getattr(moe.experts, name).detach())
        assert torch.equal(found.reshape(expected.shape), expected), name


@pytest.mark.dist
@pytest.mark.parametrize(
    "sizes",
    [LAYOUTS["ep 4"], LAYOUTS["ep 2, edp 2"], LAYOUTS["cp 4, edp 4"], *UNEVEN.values()],
    ids=["ep 4", "ep 2, edp 2", "edp 4", *UNEVEN],
)
def test_reset_parameters_fills_shards(sizes: dict[str, int]) -> None:
    run_on_ranks(sizes["world"], _check_reset, sizes)


def _copy(model: nn.Module, source: nn.Module) -> None:
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), source.parameters()):
            whole = value.reshape(parameter.shape)
            if isinstance(parameter, DTensor):
                whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
            parameter.copy_(whole)


def _losses(model: nn.Module, layout: ParallelLayout, meshes: ParallelMeshes) -> list[torch.Tensor]:
    """Of two micro-batches, each of half the sequences."""
    x, target = (part_of_rank(whole, layout, meshes) for whole in batch(0))
    dtype = next(model.parameters()).dtype
    halves = zip(x.to(dtype).chunk(2), target.to(dtype).chunk(2))
    return [(model(x) - y).square().mean() / layout.tp / 2 for x, y in halves]


def _check_micro_batches(
    rank: int, sizes: dict[str, int], policy: MixedPrecisionPolicy, rtol: float
) -> None:
    layout, meshes = make(sizes)
    dtype = torch.float64 if policy.param_dtype is None else torch.float32
    plain, sharded = Model(meshes, dtype=dtype), Model(meshes, device="meta", dtype=dtype)
    sharded.qkv.weight.requires_grad_(False)
    sharded.moe.experts.b2.requires_grad_(False)
    fully_shard_moe(sharded.moe, meshes, mp_policy=policy)
    fully_shard_moe(sharded, meshes, mp_policy=policy).to_empty(device="cpu")
    for model in (plain, sharded):
        _copy(model, Model(None, dtype=dtype))
        for loss in _losses(model, layout, meshes):
            loss.backward()
    reduce_gradients(plain, meshes)
    for (name, found), reference in zip(sharded.named_parameters(), plain.parameters()):
        assert (found.grad is None) == (not found.requires_grad), name
        if found.grad is not None:
            assert found.grad.dtype == dtype, name
            grad, expected = full(found.grad), full(reference.grad)
            error = (grad - expected).norm() / (expected.norm() + 1e-12)
            assert error <= rtol, (name, error)


@pytest.mark.dist
@pytest.mark.parametrize("name", ["ep 4", "ep 2, edp 2", "tp 2, ep 2, etp 2"])
@pytest.mark.parametrize(
    ("policy", "rtol"),
    [
        (MixedPrecisionPolicy(), 1e-12),
        (MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), 0.05),
    ],
    ids=["f64", "bf16"],
)
def test_micro_batches_of_sharded_blocks_equal_plain_ones(
    name: str, policy: MixedPrecisionPolicy, rtol: float
) -> None:
    """Frozen parameters among them; from the meta device."""
    run_on_ranks(4, _check_micro_batches, LAYOUTS[name], policy, rtol)


def _message(function: Any, *args: Any) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - callers look at the message
        function(*args)
    return str(caught.value)


def _check_errors(rank: int) -> None:
    _, meshes = make({"world": 4, "ep": 2})
    _, others = make({"world": 4, "ep": 4})
    for function in (fully_shard_moe, reduce_gradients):
        assert "must be on meshes.experts" in _message(function, Model(others), meshes)
        config = make_config()
        assert "got no mesh" in _message(function, MoE(config, dist.group.WORLD), meshes)
    sharded = fully_shard_moe(Model(meshes), meshes)
    assert "not be sharded yet" in _message(fully_shard_moe, sharded, meshes)
    split = Model(meshes)
    tp = meshes.attention["tp"]
    split.qkv.weight = nn.Parameter(distribute_tensor(split.qkv.weight, tp, [Replicate()]))
    assert "plain tensors, got weight of Linear" in _message(fully_shard_moe, split, meshes)
    backwards = DeviceMesh("cpu", torch.tensor([3, 2, 1, 0]), mesh_dim_names=("ep",))
    assert "ranks must ascend" in _message(MoE, config, backwards)
    part = DeviceMesh("cpu", torch.tensor([0, 1]), mesh_dim_names=("ep",))
    if rank > 1:
        assert "must hold this rank" in _message(MoE, config, part)


@pytest.mark.dist
def test_wrong_meshes_and_modules_are_refused() -> None:
    run_on_ranks(4, _check_errors)


def _check_orders(rank: int, order: str) -> None:
    """Experts lie as their mesh says, whatever axis is fastest; norms of fp16 hold."""
    _, meshes = make({"world": 4, "ep": 2, "etp": 2, "order": order})
    model = Model(meshes)
    reduce_gradients(model, meshes)
    assert clip_grad_norm_(model.parameters(), 1.0, meshes) == 0
    large = nn.Parameter(torch.zeros(100_000, dtype=torch.float16))
    large.grad = torch.full_like(large, 300)
    norm = clip_grad_norm_([large], 1.0, meshes)
    assert_close("norm", norm, torch.tensor(300 * 100_000**0.5, dtype=torch.float64))
    sharded = fully_shard_moe(model, meshes)
    assert "got what fully_shard wraps" in _message(reduce_gradients, sharded, meshes)


@pytest.mark.dist
@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "ep-tp-cp-dp-pp"])
def test_any_order_of_axes(order: str) -> None:
    run_on_ranks(4, _check_orders, order)


def _check_partial(rank: int) -> None:
    _, meshes = make({"world": 4, "tp": 2})
    tp = meshes.attention["tp"]
    for act in (reduce_gradients, None):
        scale = nn.Parameter(
            distribute_tensor(torch.ones(3, dtype=torch.float64), tp, [Replicate()])
        )
        term = torch.full((3,), float(rank + 1), dtype=torch.float64)
        scale.grad = DTensor.from_local(term, tp, [Partial()])
        expected = torch.full((3,), 3.0 if rank < 2 else 7.0, dtype=torch.float64)
        holder = nn.Module()
        holder.scale = scale
        if act:
            act(holder, meshes)
            expected.fill_(5.0)  # the mean over dp
        norm = clip_grad_norm_([scale], 1.0, meshes)
        assert_close("norm", norm, expected.norm())
        assert_close("gradient", scale.grad.to_local(), expected / (norm + 1e-6))


@pytest.mark.dist
def test_terms_of_gradients_are_summed_first() -> None:
    """As PyTorch's SequenceParallel leaves them."""
    run_on_ranks(4, _check_partial)
