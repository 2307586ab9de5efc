"""Training steps under many layouts against one process: every parameter, the norm, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from moe_ops.nn import MoE, MoEConfig, RouterConfig, per_rank_names, update_expert_bias
from moe_ops.ops.cp_attention import cp_attention
from moe_ops.ops.cp_split import cp_split
from moe_ops.parallel import (
    ParallelLayout,
    ParallelMeshes,
    clip_grad_norm_,
    fully_shard_moe,
    parameter_groups,
    reduce_gradients,
)
from moe_ops.testing import assert_close, assert_equal
from tests.ranks import run_on_ranks

LAYOUTS: dict[str, dict[str, int]] = {
    "ep 4": {"world": 4, "ep": 4},
    "ep 2, edp 2": {"world": 4, "ep": 2},
    "tp 2, ep 2, etp 2": {"world": 4, "tp": 2, "ep": 2},
    "tp 2, ep 2, edp 2": {"world": 4, "tp": 2, "ep": 2, "etp": 1},
    "cp 2, ep 4": {"world": 4, "cp": 2, "ep": 4},
    "cp 4, edp 4": {"world": 4, "cp": 4},
    "tp 2, cp 2, ep 4, edp 2": {"world": 8, "tp": 2, "cp": 2, "ep": 4, "etp": 1},
    "tp 2, ep 2, etp 2, edp 2": {"world": 8, "tp": 2, "ep": 2},
    "cp 2, ep 2, etp 2, edp 2": {"world": 8, "cp": 2, "ep": 2, "etp": 2},
    "tp 4, cp 2, ep 8": {"world": 8, "tp": 4, "cp": 2, "ep": 8, "etp": 1},
}
NUM_SEQUENCES, LENGTH, HIDDEN, HEADS = 8, 16, 8, 2
STEPS = 3
MAX_NORM = 0.05  # clips
PLAIN = RouterConfig()
BALANCED = RouterConfig(balancing=("global_aux",), aux_loss_coeff=0.1, expert_bias=True)


class Model(nn.Module):
    """Attention over the ranks of `cp`, then experts, each added to what came in."""

    def __init__(
        self,
        meshes: ParallelMeshes | None,
        device: str = "cpu",
        dtype: torch.dtype = torch.float64,
        router: RouterConfig = PLAIN,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        place: Any = {"device": device, "dtype": dtype}
        sizes = {"hidden_size": HIDDEN, "ffn_hidden_size": 8, "num_experts": 8, "top_k": 2}
        config = MoEConfig(**sizes, bias=True, router=router)
        self.cp = None if meshes is None else meshes.attention["cp"].get_group()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, **place)
        self.norm = nn.RMSNorm(HIDDEN, **place)
        self.moe = MoE(config, None if meshes is None else meshes.experts, **place)

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x_BSH).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).chunk(3, dim=1)
        out, _ = cp_attention(q, k, v, group=self.cp)
        x_BSH = x_BSH + out.transpose(1, 2).flatten(2)
        return x_BSH + self.moe(self.norm(x_BSH))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    stream = torch.Generator().manual_seed(step)
    shape = (2, NUM_SEQUENCES, LENGTH, HIDDEN)
    return tuple(torch.randn(shape, generator=stream, dtype=torch.float64).unbind(0))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # A large eps: a gradient that is 0 but for rounding, as of the keys' bias, is not blown up.
    return torch.optim.AdamW(parameter_groups(model), lr=0.01, eps=1e-3, weight_decay=0.1)


def train_alone(router: RouterConfig = PLAIN) -> tuple[Model, list[torch.Tensor]]:
    model = Model(None, router=router)
    optimizer, norms = optimizer_of(model), []
    for step in range(STEPS):
        optimizer.zero_grad()
        x, target = batch(step)
        ((model(x) - target).square().mean() + sum(model.moe.losses.values())).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
        optimizer.step()
        update_expert_bias(model)
    return model, norms


def part_of_rank(whole: torch.Tensor, layout: ParallelLayout, meshes: ParallelMeshes) -> Any:
    """Sequences by dp and tp, their tokens by cp."""
    ranks = {name: meshes.attention.get_local_rank(name) for name in ("dp", "tp")}
    mine = whole.chunk(layout.dp * layout.tp)[ranks["dp"] * layout.tp + ranks["tp"]]
    return cp_split(mine, 1, group=meshes.attention["cp"].get_group())


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Training:
    """A model, its optimizer and its meshes; gradients are reduced in the `way` of that name."""

    def __init__(self, sizes: dict[str, int], way: str, router: RouterConfig = PLAIN) -> None:
        self.layout, self.way, self.router = ParallelLayout(**sizes), way, router
        self.meshes = self.layout.meshes("cpu")
        self.model = Model(self.meshes, router=router)
        if way == "fully_shard":
            fully_shard_moe(self.model, self.meshes)
        if way == "ddp":
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
                self.model, per_rank_names(self.model)
            )
            group = self.meshes.dp_cp.get_group()
            self.wrapped: nn.Module = DistributedDataParallel(self.model, process_group=group)
        else:
            self.wrapped = self.model
        self.optimizer = optimizer_of(self.model)

    def step(self, step: int) -> torch.Tensor:
        """The norm of the gradients."""
        self.optimizer.zero_grad()
        x, target = (part_of_rank(whole, self.layout, self.meshes) for whole in batch(step))
        loss = (self.wrapped(x) - target).square().mean() + sum(self.model.moe.losses.values())
        (loss / self.layout.tp).backward()
        if self.way != "fully_shard":
            reduce_gradients(self.model, self.meshes, dense=self.way == "plain")
        norm = clip_grad_norm_(self.model.parameters(), MAX_NORM, self.meshes)
        self.optimizer.step()
        update_expert_bias(self.model)
        return norm

    def check(self) -> None:
        """Every parameter is that of one process."""
        alone, norms = train_alone(self.router)
        assert all(norm > MAX_NORM for norm in norms)
        expected = dict(alone.named_parameters())
        biases = [model.moe.router.expert_bias for model in (self.model, alone)]
        if self.router.expert_bias:
            assert_equal("expert_bias", *biases)
        for name, parameter in self.model.named_parameters():
            found = full(parameter.detach())
            assert_close(name, found, expected[name].detach().reshape(found.shape))


def _check_training(
    rank: int, sizes: dict[str, int], way: str, router: RouterConfig = PLAIN
) -> None:
    training = Training(sizes, way, router)
    norms = torch.stack([training.step(step) for step in range(STEPS)])
    assert_close("norms", norms, torch.stack(train_alone(router)[1]))
    training.check()
    if way == "fully_shard":
        layout = training.layout
        for name, parameter in training.model.named_parameters():
            moment, shape = (
                training.optimizer.state[parameter]["exp_avg"].to_local(),
                parameter.shape,
            )
            parts = layout.edp * layout.ep if "experts" in name else layout.world
            assert moment.shape == parameter.to_local().shape
            assert moment.numel() <= -(-shape[0] // parts) * shape[1:].numel()


@pytest.mark.dist
@pytest.mark.parametrize("way", ["plain", "fully_shard"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_training_equals_one_process(name: str, way: str) -> None:
    run_on_ranks(LAYOUTS[name]["world"], _check_training, LAYOUTS[name], way)


@pytest.mark.dist
@pytest.mark.parametrize("way", ["plain", "fully_shard"])
@pytest.mark.parametrize("name", ["ep 2, edp 2", "tp 2, ep 2, edp 2", "cp 4, edp 4"])
def test_balanced_training_equals_one_process(name: str, way: str) -> None:
    """The loss and the bias of a router see the tokens of all replicas of the experts."""
    run_on_ranks(4, _check_training, LAYOUTS[name], way, BALANCED)


@pytest.mark.dist
@pytest.mark.parametrize("name", ["ep 2, edp 2", "cp 2, ep 4"])
def test_training_with_ddp_equals_one_process(name: str) -> None:
    run_on_ranks(4, _check_training, LAYOUTS[name], "ddp")


def _save(rank: int, sizes: dict[str, int], way: str, folder: str) -> None:
    training = Training(sizes, way)
    for step in range(STEPS - 1):
        training.step(step)
    model, optimizer = get_state_dict(training.model, training.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)


def _load(rank: int, sizes: dict[str, int], way: str, folder: str) -> None:
    training = Training(sizes, way)
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.fill_(7)
    model, optimizer = get_state_dict(training.model, training.optimizer)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    set_state_dict(
        training.model, training.optimizer, model_state_dict=model, optim_state_dict=optimizer
    )
    training.step(STEPS - 1)
    training.check()


@pytest.mark.dist
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (("tp 2, ep 2, edp 2", "fully_shard"), ("tp 2, ep 2, etp 2", "plain")),
        (("tp 2, ep 2, etp 2", "plain"), ("cp 4, edp 4", "fully_shard")),
        (("ep 4", "fully_shard"), ("cp 2, ep 2, etp 2, edp 2", "fully_shard")),
    ],
    ids=["to etp", "to edp", "to 8 ranks"],
)
def test_checkpoint_loads_on_another_layout(
    saved: tuple[str, str], loaded: tuple[str, str], tmp_path: Path
) -> None:
    for act, (name, way) in ((_save, saved), (_load, loaded)):
        run_on_ranks(LAYOUTS[name]["world"], act, LAYOUTS[name], way, str(tmp_path))
