"""What other packages add, found through the entry points in their metadata.

    moe_ops.commands   a command of `moe-ops`: a module with `add_arguments(parser)`, and
                       `run(args)` that returns the exit status
    moe_ops.passes     what the demo compiles with: a module with `options()`, as torch.compile
                       takes them, and `explain(model, *inputs)`, as `fx_passes` has it

so that this package imports none of them.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

_COMMANDS, _PASSES = "moe_ops.commands", "moe_ops.passes"


def commands() -> dict[str, EntryPoint]:
    """By name, not loaded."""
    return {entry.name: entry for entry in entry_points(group=_COMMANDS)}


def passes() -> Any | None:
    """The graph passes that are installed, if there are any."""
    return next((entry.load() for entry in entry_points(group=_PASSES)), None)
