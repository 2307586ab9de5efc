"""Run an expert-parallel layer on a rank and compare it with the float64 oracle over all ranks'
tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from moe_ops.nn import MoE, MoEConfig, RouterConfig
from moe_ops.ops.topk_route import topk_route
from moe_ops.parallel import ParallelLayout
from moe_ops.testing import assert_close, moe_oracle

SIZES = {"hidden_size": 8, "ffn_hidden_size": 6, "num_experts": 8, "top_k": 2}


def make_config(router: dict[str, Any] | None = None, **fields: Any) -> MoEConfig:
    """A small config; `fields` and `router` replace its fields."""
    return MoEConfig(**{**SIZES, "router": RouterConfig(**(router or {})), **fields})


def capacity_fields(num_tokens: int, **fields: Any) -> dict[str, Any]:
    """Fields of a config in capacity mode for at most `num_tokens` a rank."""
    return {"size_mode": "capacity", "max_tokens": num_tokens, **fields}


def make_layer(config: MoEConfig, group: Any, dtype: torch.dtype, device: str = "cpu") -> MoE:
    """The same layer under every group."""
    torch.manual_seed(0)
    return MoE(config, group=group, dtype=dtype, device=device)


def inputs_of_rank(
    rank: int, num_tokens: int, config: MoEConfig, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [T, H], the gradient of the output, and a choice [T, K] with 20 % none, from the rank's
    seed.
    """
    stream = torch.Generator().manual_seed(100 + rank)
    shape = (num_tokens, config.hidden_size)
    x = torch.randn(shape, generator=stream, dtype=torch.float64).to(dtype)
    grad = torch.randn(shape, generator=stream, dtype=torch.float64).to(dtype)
    keys = torch.rand(num_tokens, config.num_experts, generator=stream)
    ids = keys.argsort(1)[:, : config.top_k]
    none = torch.rand(ids.shape, generator=stream) < 0.2
    return x, grad, torch.where(none, -1, ids)


def oracle_step(
    full: MoE, x: torch.Tensor, grad: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Output and gradients, float64, of one rank's tokens through the layer that holds all
    experts.
    """
    leaves = {name: p.detach().double().requires_grad_() for name, p in full.named_parameters()}
    leaves["x"] = x.detach().double().requires_grad_()
    router = full.config.router
    weights, _ = topk_route(
        leaves["x"] @ leaves["router.weight"].T,
        None,
        ids,
        None,
        top_k=full.config.top_k,
        score=router.score,
        score_first=router.score_first,
        normalize=router.normalize,
        scale=router.scale,
    )
    y = moe_oracle(
        leaves["x"],
        ids,
        weights,
        leaves["experts.w13"],
        leaves["experts.w2"],
        leaves.get("experts.b13"),
        leaves.get("experts.b2"),
        full.config.activation,
    )
    y.backward(grad.double())
    zero = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    return y.detach(), {n: zero[n] if p.grad is None else p.grad for n, p in leaves.items()}


def check_alone(layer: MoE, step: Any, num_tokens: int, device: str = "cpu") -> None:
    """Output and every gradient of `step`, the layer or a compiled form of it, on one process."""
    dtype = layer.experts.w13.dtype
    x, grad, ids = (t.to(device) for t in inputs_of_rank(0, num_tokens, layer.config, dtype))
    x.requires_grad_()
    y = step(x, router_ids=ids)
    y.backward(grad)
    expected_y, expected = oracle_step(layer, x, grad, ids)
    assert_close("y", y, expected_y)
    assert_close("x.grad", x.grad, expected["x"])
    for name, parameter in layer.named_parameters():
        assert_close(f"{name}.grad", parameter.grad, expected[name])


def check_never_syncs(layer: MoE, rank: int = 0) -> None:
    """After a warm-up, forward and backward on the GPU wait for nothing (case 28)."""
    dtype = layer.experts.w13.dtype
    x, grad, _ = (t.cuda() for t in inputs_of_rank(rank, 33, layer.config, dtype))
    layer(x).backward(grad)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x).backward(grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    layer.check_overflow()


def check_layer(
    rank: int,
    config: MoEConfig,
    num_tokens: tuple[int, ...],
    dtype: torch.dtype = torch.float64,
    replay: bool = True,
    compiled: str | None = None,
    group_ranks: list[int] | None = None,
    axes: dict[str, int] | None = None,
    device: str = "cpu",
) -> None:
    """Output and every gradient of this rank equal the oracle's; expert gradients sum over all
    ranks' tokens. `axes`: of a mesh for the layer.
    """
    group: Any = dist.group.WORLD
    if group_ranks is not None:
        group = dist.new_group(group_ranks)
        if rank not in group_ranks:
            return
        rank = group_ranks.index(rank)
    size = dist.get_world_size(group)
    mesh = None
    if axes is not None:
        mesh = ParallelLayout(world=size, **axes).meshes(device).experts
    layer = make_layer(config, mesh or group, dtype, device)
    full = make_layer(config, None, dtype, device)
    step = torch.compile(layer, fullgraph=True, backend=compiled) if compiled else layer
    x, grad, ids = (t.to(device) for t in inputs_of_rank(rank, num_tokens[rank], config, dtype))
    x.requires_grad_()
    y = step(x, router_ids=ids if replay else None)
    y.backward(grad)
    layer.check_overflow()
    chosen = layer.ids_TK
    if replay:
        assert torch.equal(chosen, ids.int())
    expected_y, expected = oracle_step(full, x, grad, chosen)
    assert_close("y", y, expected_y)
    assert_close("x.grad", x.grad, expected["x"])
    assert_close("router.weight.grad", layer.router.weight.grad, expected["router.weight"])
    totals = dict.fromkeys(("w13", "w2", "b13", "b2"))
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, chosen, group=group)
    for source in range(size):
        x, grad, _ = inputs_of_rank(source, num_tokens[source], config, dtype)
        _, grads = oracle_step(full, x.to(device), grad.to(device), everyone[source].to(device))
        for name in totals:
            if f"experts.{name}" in grads:
                total = totals[name]
                grad_e = grads[f"experts.{name}"]
                totals[name] = grad_e if total is None else total + grad_e
    here = config.num_experts // size
    for name, parameter in layer.experts.named_parameters():
        mine, grad = totals[name], parameter.grad
        if mesh is None:
            mine = mine[rank * here : (rank + 1) * here]
        else:
            grad = grad.full_tensor()
            mine = mine.reshape(grad.shape)
        assert_close(f"{name}.grad", grad, mine)
