"""`python -m moe_ops demo`: train a small byte-level MoE transformer on 2 processes."""

from __future__ import annotations

import argparse
import sys

from .settings import Refused, add_arguments, from_arguments

__all__ = ["add_arguments", "run"]

WRONG_USE = 2


def run(args: argparse.Namespace) -> int:
    """Train, evaluate, check, draw pictures; returns the exit status."""
    # Here, so that `--help` needs no more than torch.
    from .launch import launch  # noqa: PLC0415

    try:
        return launch(from_arguments(args).resolved())
    except Refused as error:
        print(error, file=sys.stderr)
        return WRONG_USE
