"""What the commands `explain` and `tune` share: the demo's model, on as many processes as share its
experts.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as torch_mp

import moe_ops

from .pipeline import options

_SIZES = (
    *("world_size", "device", "batch", "context", "layers", "heads", "hidden", "ffn"),
    *("experts", "top_k"),
)
FAILED, WRONG_USE = 1, 2

Work = Callable[[int, argparse.Namespace, torch.nn.Module, torch.Tensor], None]
"""What each process does: of its rank, the arguments, the model, and tokens as its input."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model's sizes, and the settings of the passes."""
    # Here, because passes know of moe_ops only operators; a command is an exception.
    from moe_ops.demo import settings  # noqa: PLC0415

    settings.add_arguments(parser, *_SIZES)
    parser.set_defaults(layers=2)
    parser.add_argument("--autocast", action="store_true", help="matmuls in bfloat16")
    parser.add_argument("--config", help="JSON file with settings of the passes")
    parser.add_argument(
        "--without", action="append", default=[], metavar="PASS", help="leave a pass out"
    )


def how(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `options`."""
    return {"config": args.config, **dict.fromkeys(args.without, False)}


def run(args: argparse.Namespace, work: Work, doing: str) -> int:
    """`work`, a function of a module, on every process; returns the exit status."""
    from moe_ops.demo import settings  # noqa: PLC0415 - as above

    try:
        resolved = settings.from_arguments(args).resolved()
        options(**how(args))
    except (ValueError, OSError) as error:  # settings.Refused is a ValueError
        print(str(error).replace("demo:", f"{args.command}:"), file=sys.stderr)
        return WRONG_USE
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    print(f"{doing} on {resolved.world_size} {resolved.device} processes", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = Path(folder, "rendezvous").as_uri()
        try:
            torch_mp.start_processes(
                _work, (args, resolved, rendezvous, work), resolved.world_size, start_method="spawn"
            )
        except (torch_mp.ProcessRaisedException, torch_mp.ProcessExitedException) as error:
            print(error, file=sys.stderr)
            return FAILED
    return 0


def _work(rank: int, args: argparse.Namespace, settings: Any, rendezvous: str, work: Work) -> None:
    """One of the processes."""
    from moe_ops.demo.model import NUM_BYTES, ByteModel  # noqa: PLC0415 - as above

    device = torch.device(f"cuda:{rank}" if settings.device == "cuda" else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    group = _join(rank, settings, rendezvous, device) if settings.world_size > 1 else None
    torch.manual_seed(settings.seed)  # the same weights on all ranks
    model = ByteModel(settings, group).to(device)
    shape = settings.batch // settings.world_size, settings.context
    stream = torch.Generator().manual_seed(rank)
    tokens_BT = torch.randint(NUM_BYTES, shape, generator=stream).to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=args.autocast):
        work(rank, args, model, tokens_BT)
    if group is not None:
        dist.destroy_process_group()


def _join(rank: int, settings: Any, rendezvous: str, device: torch.device) -> dist.ProcessGroup:
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=rendezvous,
        rank=rank,
        world_size=settings.world_size,
        device_id=device if device.type == "cuda" else None,
    )
    group = dist.group.WORLD
    assert group is not None
    moe_ops.comm.setup(
        group,
        max_tokens=settings.batch * settings.context,
        hidden_size=settings.hidden,
        dtype=torch.float32,
    )
    return group
