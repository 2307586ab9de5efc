"""Say what the passes do to the demo's model: what they match, keep, and hide of the exchanges.

On a GPU times are measured, else estimated.
"""

from __future__ import annotations

import argparse

import torch

from . import demo_model
from .explain import explain
from .timeline import figure_class


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, and where results go."""
    demo_model.add_arguments(parser)
    parser.add_argument("--picture", help="PNG file for the timelines before and after")
    parser.add_argument("--trace", help="JSON file for the same, for https://ui.perfetto.dev")


def run(args: argparse.Namespace) -> int:
    """Explain on as many processes as share the experts; returns the exit status."""
    if args.picture:
        figure_class()  # better an error now than after minutes
    doing = "compiling the model without the passes and with them, a minute or more,"
    return demo_model.run(args, _work, doing)


def _work(
    rank: int, args: argparse.Namespace, model: torch.nn.Module, tokens_BT: torch.Tensor
) -> None:
    report = explain(model, tokens_BT, **demo_model.how(args))
    if rank == 0:
        print(report)
        if args.picture:
            report.save_picture(args.picture)
        if args.trace:
            report.save_trace(args.trace)
