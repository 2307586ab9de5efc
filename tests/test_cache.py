"""A changed gradient formula is used although compiled code of the old one lies in the cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from moe_ops._library import tag_compile_caches

PACKAGE = Path(__file__).parent.parent / "moe_ops"
OLD = "grad_x_TH = _unpermute("
NEW = "grad_x_TH = 2 * _unpermute("
# Prints the gradient compiled with the cache key tag, then the one compiled without.
SCRIPT = """
import torch, moe_ops
maps = moe_ops.sort_slots(torch.tensor([[0, 1], [1, 0], [2, 0]]), 3)[:2]
for tag in (torch.compiler.config.cache_key_tag, ""):
    torch.compiler.config.cache_key_tag = tag
    torch._dynamo.reset()
    x = torch.ones(3, 4, requires_grad=True)
    torch.compile(lambda x: moe_ops.permute(x, None, *maps).sum(), fullgraph=True)(x).backward()
    print(x.grad[0, 0].item())
"""


def test_tag_of_the_caches_names_what_graphs_depend_on() -> None:
    config = torch.compiler.config
    before, tags = config.cache_key_tag, []
    try:
        config.cache_key_tag = "mine"
        for names in ((), ("0",), ("0", "7"), ()):
            tag_compile_caches(*names)
            tags.append(config.cache_key_tag)
    finally:
        config.cache_key_tag = before
    assert tags[0] == tags[3] and len({*tags}) == 3
    assert all(tag.startswith("mine;moe_ops-") and tag.count(";") == 1 for tag in tags)


def _gradients(folder: Path, cache: Path) -> list[float]:
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [float(line) for line in done.stdout.split()]


def test_changed_backward_is_used(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for name in ("first", "changed"):
        shutil.copytree(
            PACKAGE, tmp_path / name / "moe_ops", ignore=shutil.ignore_patterns("__pycache__")
        )
    source = tmp_path / "changed" / "moe_ops" / "ops" / "permute.py"
    text = source.read_text()
    assert text.count(OLD) == 1
    source.write_text(text.replace(OLD, NEW))
    assert _gradients(tmp_path / "first", cache) == [2, 2]
    tagged, untagged = _gradients(tmp_path / "changed", cache)
    assert tagged == 4
    # The old gradient: without the tag this test could not pass.
    assert untagged == 2
