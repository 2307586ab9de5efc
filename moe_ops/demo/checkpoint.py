"""Checkpoints that are complete or not there: written aside, then renamed.

    checkpoints/step_00000300/   torch.distributed.checkpoint's files and progress.json
    checkpoints/partial/         one being written, or left by a crash; never read

Experts are saved as shards of one tensor over all ranks, so another number or layout of processes
can load what two have saved.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from ..nn import shard_experts
from .model import ByteModel
from .progress import Progress

_MOMENTS = ("exp_avg", "exp_avg_sq")


def create_moments(optimizer: torch.optim.Optimizer) -> None:
    """Give AdamW the state it would create in its first step, so that it can be loaded into."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state[p]
            state["step"] = torch.zeros((), device=p.device)
            for moment in _MOMENTS:
                state[moment] = torch.zeros_like(p)


def save(
    root: Path, model: ByteModel, optimizer: torch.optim.Optimizer, progress: Progress
) -> None:
    """Write a checkpoint, then remove older ones; collective over all ranks."""
    partial, final = root / "partial", root / f"step_{progress.step:08d}"
    is_first = dist.get_rank() == 0
    if is_first:
        shutil.rmtree(partial, ignore_errors=True)
    dist.barrier()
    dcp.save(_tensors(model, optimizer), checkpoint_id=partial)
    if is_first:
        progress.write(partial)
        # What is already there under this step's number is the same state.
        if not final.exists():
            partial.rename(final)
        for other in root.iterdir():
            if other != final:
                shutil.rmtree(other)
    dist.barrier()


def load(
    checkpoint: Path, model: ByteModel, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Read a checkpoint into the model, and into the optimizer if given; collective."""
    dcp.load(_tensors(model, optimizer), checkpoint_id=checkpoint)
    if optimizer is not None:
        step = Progress.read(checkpoint).step
        for state in optimizer.state.values():
            state["step"].fill_(step)


def _tensors(model: ByteModel, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Model and moments by name, sharing storage with the live ones."""
    state: dict[str, Any] = {"model": shard_experts(model, model.state_dict())}
    if optimizer is not None:
        for moment in _MOMENTS:
            of_parameter = {n: optimizer.state[p][moment] for n, p in model.named_parameters()}
            state[moment] = shard_experts(model, of_parameter)
    return state
