"""Print which place each rank has in a parallel layout."""

from __future__ import annotations

import argparse
import sys

from .parallel_layout import ORDER, ParallelLayout

_HELP = {
    "world": "ranks in all",
    "tp": "tensor parallelism of attention",
    "cp": "context parallelism",
    "pp": "pipeline stages",
    "ep": "ranks among which the experts are spread",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The axes' sizes."""
    for name, text in _HELP.items():
        required = name == "world"
        default = None if required else 1
        parser.add_argument(f"--{name}", type=int, default=default, required=required, help=text)
    parser.add_argument("--etp", type=int, help="ranks among which each expert is spread, as tp")
    parser.add_argument("--order", default=ORDER, help="axes, the fastest first")
    parser.add_argument(
        "--groups", metavar="AXES", help="the groups along some axes, such as dp,cp, instead"
    )


def run(args: argparse.Namespace) -> int:
    """Print the table, or the groups; returns the exit status."""
    sizes = {name: getattr(args, name) for name in (*_HELP, "etp", "order")}
    try:
        layout = ParallelLayout(**sizes)
        lines = layout.groups(*args.groups.split(",")) if args.groups else layout.rows()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    for line in lines:
        print(line)
    return 0
