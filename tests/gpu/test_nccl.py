"""The same layer over NCCL: every dispatcher and size mode on two GPUs."""

from __future__ import annotations

import datetime
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from moe_ops.nn import MoEConfig
from tests.nn.layers import capacity_fields, check_layer, check_never_syncs, make_config, make_layer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no GPU pair"),
]

SIZES = {"hidden_size": 16, "ffn_hidden_size": 8}
DISPATCHERS = ("flex", "alltoall", "allgather")


def _serve(rank: int, port: int) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    for dispatcher in DISPATCHERS:
        for mode in ({}, capacity_fields(64)):
            config = make_config(dispatcher=dispatcher, **SIZES, **mode)
            _check_modes(rank, config)
    dist.destroy_process_group()


def _check_modes(rank: int, config: MoEConfig) -> None:
    for tokens in ((7, 13), (5, 0), (0, 0)):
        check_layer(rank, config, tokens, torch.float64, device="cuda")
    check_layer(rank, config, (33, 64), torch.bfloat16, device="cuda")
    check_layer(rank, config, (33, 64), torch.float32, compiled="inductor", device="cuda")
    if config.size_mode == "capacity":
        layer = make_layer(config, dist.group.WORLD, torch.bfloat16, "cuda")
        check_never_syncs(layer, rank)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_moe_matches_oracle_over_nccl() -> None:
    arguments: Any = (_free_port(),)
    mp.start_processes(_serve, args=arguments, nprocs=2, start_method="spawn")
