"""Compiled graphs are taken from the caches by later processes until what made them changes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from moe_ops._library import tag_compile_caches

ROOT = Path(__file__).parent.parent
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
# Prints how often AOTAutograd's cache and Inductor's had the graph. No kernel need be compiled.
EXCHANGE = """
import torch, torch.distributed as dist
from torch._dynamo.utils import counters
import fx_passes, moe_ops
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
def exchange(x, ids):
    rows, _, plan = moe_ops.dispatch(x, ids, num_experts=2, group=dist.group.WORLD)
    return moe_ops.combine(rows, plan, group=dist.group.WORLD)[0]
compiled = torch.compile(exchange, fullgraph=True, options=fx_passes.options())
x = torch.ones(3, 4, requires_grad=True)
compiled(x, torch.tensor([[0, 1], [1, 0], [0, -1]])).backward(torch.ones(3, 4))
print(counters["aot_autograd"]["autograd_cache_hit"], counters["inductor"]["fxgraph_cache_hit"])
"""
# A pass before autograd: PyTorch 2.11 asks that hook for no uuid.
PASS = "fx_passes/fuse_permute_all_to_all/__init__.py"


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


def _copy(package: str, folder: Path) -> None:
    shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))


def _start(script: str, folder: Path, cache: Path) -> subprocess.Popen[str]:
    """With the packages of `folder`, and those of this tree that are not there."""
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join(map(str, (folder, ROOT))),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return subprocess.Popen(
        [sys.executable, "-c", script],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _numbers(process: subprocess.Popen[str]) -> list[float]:
    """What it prints."""
    printed, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return [float(number) for number in printed.split()]


def test_changed_backward_is_used(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for name in ("first", "changed"):
        _copy("moe_ops", tmp_path / name)
    source = tmp_path / "changed" / "moe_ops" / "ops" / "permute.py"
    text = source.read_text()
    assert text.count(OLD) == 1
    source.write_text(text.replace(OLD, NEW))
    assert _numbers(_start(SCRIPT, tmp_path / "first", cache)) == [2, 2]
    tagged, untagged = _numbers(_start(SCRIPT, tmp_path / "changed", cache))
    assert tagged == 4
    # The old gradient: without the tag this test could not pass.
    assert untagged == 2


def test_changed_pass_is_used(tmp_path: Path) -> None:
    """Forward and backward are one graph of AOTAutograd's and two of Inductor's."""
    first, changed, cache = (tmp_path / name for name in ("first", "changed", "cache"))
    for folder in (first, changed):
        _copy("fx_passes", folder)
    with (changed / PASS).open("a") as source:
        source.write("# another version\n")
    assert _numbers(_start(EXCHANGE, first, cache)) == [0, 0]
    again, anew = (_start(EXCHANGE, folder, cache) for folder in (first, changed))
    assert (_numbers(again), _numbers(anew)) == ([1, 2], [0, 0])
