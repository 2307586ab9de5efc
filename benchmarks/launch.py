"""One process a GPU, or two without GPUs, for benchmarks of several ranks."""

from __future__ import annotations

import argparse
import datetime
import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from .specs_exchange import Ranks

NUM_RANKS = 2
Bench = Callable[[Ranks, argparse.Namespace], Any]


def serve(rank: int, port: int, bench: Bench, args: argparse.Namespace) -> None:
    """One process of a run."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if args.device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if args.device == "cuda" else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=NUM_RANKS,
        timeout=datetime.timedelta(seconds=120),
    )
    bench(Ranks(args.device), args)
    dist.destroy_process_group()


def launch(bench: Bench, args: argparse.Namespace) -> None:
    """Run `bench`, which lies in a module, in every process and wait for them.

    Raises:
        SystemExit: there are fewer GPUs than processes.
    """
    if args.device == "cuda" and torch.cuda.device_count() < NUM_RANKS:
        found = torch.cuda.device_count()
        raise SystemExit(f"{bench.__module__}: there must be {NUM_RANKS} GPUs, got {found}")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
    mp.start_processes(serve, args=(port, bench, args), nprocs=NUM_RANKS, start_method="spawn")
