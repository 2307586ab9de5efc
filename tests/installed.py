"""Makes this source tree look installed: pip would write its entry points beside it."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def entry_points() -> dict[str, dict[str, str]]:
    """Group -> name -> module, as pyproject.toml has them."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]


def write_metadata(folder: Path, **commands: str) -> None:
    """Write what `importlib.metadata` finds if `folder` is on the path; with further `commands`."""
    groups = entry_points()
    groups["moe_ops.commands"] |= commands
    lines: list[str] = []
    for group, modules in groups.items():
        lines += [f"[{group}]", *(f"{name} = {module}" for name, module in modules.items())]
    info = folder / "moe_graph_ops-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: moe-graph-ops\nVersion: 0\n")
    (info / "entry_points.txt").write_text("\n".join(lines))
