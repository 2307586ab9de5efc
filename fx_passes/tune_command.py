"""Find the fastest settings of the passes for the demo's model, on this machine.

`explain --config`, and `fx_passes.options(config=...)`, read the file that it writes.
"""

from __future__ import annotations

import argparse
import math
import sys

import torch

from . import demo_model
from .devices import can_write
from .tune import progress_bar, tune


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, how long, and where results go."""
    demo_model.add_arguments(parser)
    parser.add_argument("--budget", type=float, default=300.0, help="seconds to try other settings")
    parser.add_argument("--out", default="tuned.json", help="JSON file for the settings")


def run(args: argparse.Namespace) -> int:
    """Tune on as many processes as share the experts; returns the exit status."""
    progress_bar()  # better an error now than after the processes have started
    if not 0 < args.budget < math.inf:
        print(f"tune: budget must be positive and finite, got {args.budget}", file=sys.stderr)
        return demo_model.WRONG_USE
    if not can_write(args.out):
        print(
            f"tune: out must be a file in a folder that can be written, got {args.out}",
            file=sys.stderr,
        )
        return demo_model.WRONG_USE
    doing = f"compiling the model with one setting after another, about {args.budget:g} s,"
    return demo_model.run(args, _work, doing)


def _work(
    rank: int, args: argparse.Namespace, model: torch.nn.Module, tokens_BT: torch.Tensor
) -> None:
    tuned = tune(model, tokens_BT, budget_s=args.budget, path=args.out, **demo_model.how(args))
    if rank == 0:
        print(tuned)
        if not tuned.measured["tried"]:
            print("no other setting was tried: the budget ended")
        print(f"written to {args.out}")
