"""The layer inside PyTorch's pipeline schedules: two stages, experts spread within each."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed import pipelining

from moe_ops.nn import MoE, MoEConfig
from moe_ops.parallel import ParallelLayout, clip_grad_norm_, reduce_gradients
from moe_ops.testing import assert_close
from tests.ranks import run_on_ranks

HIDDEN, NUM_TOKENS, NUM_STAGES, MICRO_BATCHES = 8, 16, 2, 4
SCHEDULES = {"GPipe": pipelining.ScheduleGPipe, "1F1B": pipelining.Schedule1F1B}


class Block(nn.Module):
    def __init__(self, stage: int, group: object) -> None:
        super().__init__()
        torch.manual_seed(stage)
        config = MoEConfig(hidden_size=HIDDEN, ffn_hidden_size=6, num_experts=8, top_k=2)
        self.norm = nn.RMSNorm(HIDDEN, dtype=torch.float64)
        self.moe = MoE(config, group, dtype=torch.float64)

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        return x_TH + self.moe(self.norm(x_TH))


def batch(rank: int) -> torch.Tensor:
    """Inputs and targets of a replica."""
    stream = torch.Generator().manual_seed(rank)
    return torch.randn(2, NUM_TOKENS, HIDDEN, generator=stream, dtype=torch.float64)


def _check_stage(rank: int, axes: dict[str, int], schedule: str) -> None:
    layout = ParallelLayout(world=4, pp=NUM_STAGES, **axes)
    meshes = layout.meshes("cpu")
    stage, replica = (meshes.attention.get_local_rank(name) for name in ("pp", "dp"))
    part = Block(stage, meshes.experts)
    group = meshes.attention["pp"].get_group()
    held = pipelining.PipelineStage(part, stage, NUM_STAGES, torch.device("cpu"), group=group)
    loss = nn.MSELoss()
    run = SCHEDULES[schedule](held, MICRO_BATCHES, loss_fn=loss)
    x, target = batch(replica)
    losses: list[torch.Tensor] = []
    if stage == 0:
        run.step(x)
    else:
        run.step(target=target, losses=losses)
    reduce_gradients(part, meshes)
    norm = clip_grad_norm_(part.parameters(), 1e9, meshes)

    alone = nn.Sequential(*(Block(number, None) for number in range(NUM_STAGES)))
    whole = torch.cat([batch(number) for number in range(layout.dp)], 1)
    expected = loss(alone(whole[0]), whole[1])
    expected.backward()
    assert_close("norm", norm, nn.utils.get_total_norm([p.grad for p in alone.parameters()]))
    gradients = {name: p.grad for name, p in alone[stage].named_parameters()}
    for name, parameter in part.named_parameters():
        grad = parameter.grad
        grad = grad.full_tensor() if "experts" in name else grad
        assert_close(f"{name}.grad", grad, gradients[name].reshape(grad.shape))
    if stage == NUM_STAGES - 1:
        mean = torch.stack(losses).mean()
        torch.distributed.all_reduce(mean, group=meshes.stage.get_group())
        assert_close("loss", mean.detach() / layout.dp, expected.detach())


@pytest.mark.dist
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("axes", [{"ep": 2}, {"ep": 1, "etp": 2}], ids=["ep 2", "etp 2"])
def test_stages_equal_one_process(axes: dict[str, int], schedule: str) -> None:
    run_on_ranks(4, _check_stage, axes, schedule)
