"""One training process: its share of every batch, of its sequences and of every block's experts."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from .. import extensions
from ..parallel import clip_grad_norm_, parameter_groups, reduce_gradients
from . import checkpoint, data
from .evaluate import StopRequested, compiled_against_eager, experts_at_zero, validation_loss
from .model import ByteModel
from .progress import Progress, latest, mark_finished
from .settings import PASSES_PICTURE, PASSES_TEXT, PASSES_TRACE, Job

LARGEST_NORM = 1.0
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)
# Batches tried until rounding tips no choice between two almost equally good experts.
MOST_COMPARISONS = 4


def train(rank: int, job: Job) -> None:
    """All of what one process does."""
    settings = job.settings
    torch.set_num_threads(1)
    if settings.device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if settings.device == "cuda" else "gloo",
        init_method=job.rendezvous.as_uri(),
        rank=rank,
        world_size=settings.world_size,
        timeout=timedelta(minutes=10),
        device_id=torch.device("cuda", rank) if settings.device == "cuda" else None,
    )
    trainer = Trainer(job)
    # Reached by all ranks at the same point, with a checkpoint behind it.
    with contextlib.suppress(StopRequested):
        trainer.start()
        trainer.train()
        trainer.finish()
    dist.destroy_process_group()


def learning_rate_scale(step: int, steps: int) -> float:
    """Linear warm-up over 5 % of the steps, then a cosine to 2 %."""
    warm_up = max(steps // 20, 1)
    if step < warm_up:
        return (step + 1) / warm_up
    done = (step - warm_up) / max(steps - warm_up, 1)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


class Trainer:
    """State of a run on one rank. Every method is collective."""

    def __init__(self, job: Job) -> None:
        self.job, self.settings = job, (settings := job.settings)
        self.rank, self.layout = dist.get_rank(), settings.parallel_layout()
        self.device = torch.device(f"cuda:{self.rank}" if settings.device == "cuda" else "cpu")
        self.meshes = self.layout.meshes(self.device.type)
        self.corpus = data.load_corpus(settings.corpus_megabytes)
        self.passes = extensions.passes()
        self.model = self._build(settings.seed)
        self.optimizer = self._build_optimizer()
        checkpoint.create_moments(self.optimizer)
        self.progress = Progress(identity=settings.identity())
        self.first_step_seconds = 0.0

    def _build(self, seed: int) -> ByteModel:
        cp = self.meshes.attention["cp"].get_group() if self.layout.cp > 1 else None
        # The same on all ranks: each expert draws from a stream of its own. On the device from the
        # start, where a mesh has its tensors: a stream differs by kind of device.
        torch.manual_seed(seed)
        with self.device:
            model = ByteModel(self.settings, self.meshes.experts, cp)
        if not self.settings.no_compile:
            self._compile(model)
        return model

    def _compile(self, model: ByteModel) -> None:
        options = self.passes.options() if self.passes else None
        for block in model.blocks:
            block.compile(fullgraph=True, options=options)

    def _build_optimizer(self) -> torch.optim.AdamW:
        groups: list[dict[str, Any]] = []
        for group in parameter_groups(self.model):
            matrices = [p for p in group["params"] if p.ndim > 1]
            vectors = [p for p in group["params"] if p.ndim == 1]
            groups.append({"params": matrices, "weight_decay": WEIGHT_DECAY})
            groups.append({"params": vectors, "weight_decay": 0.0})
        return torch.optim.AdamW(groups, lr=self.settings.learning_rate, betas=BETAS, fused=True)

    def start(self) -> None:
        """Go on from a checkpoint, or write that of step 0."""
        found, layout = self.job.resume_from, self.layout
        if found is None:
            self._save()
        else:
            checkpoint.load(found, self.model, self.optimizer)
            self.progress = Progress.read(found)
            self._say(f"going on from {found}")
        self._say(
            f"{layout.world} processes on {self.device.type}: dp {layout.dp}, cp {layout.cp}, and "
            f"for experts edp {layout.edp}, ep {layout.ep}, etp {layout.etp}; "
            f"{sum(p.numel() for p in self.model.dense_parameters()):,} dense parameters and "
            f"{sum(p.numel() for p in self.model.expert_parameters()):,} in experts, "
            f"{len(self.corpus.train_N) / 1e6:.1f} MB of text from "
            f"{self.corpus.num_train_files} files, and {self.corpus.num_validation_files} held out "
            "for validation"
        )
        self._stop_if_requested()

    def train(self) -> None:
        """Run the steps that are left, with a progress bar on the first rank."""
        settings, progress = self.settings, self.progress
        if progress.step < settings.steps and not settings.no_compile:
            self._say(
                f"the first step compiles the blocks, {'with' if self.passes else 'without'} graph "
                "passes: one to two minutes if nothing is cached"
            )
        bar = tqdm(
            total=settings.steps,
            initial=progress.step,
            disable=self.rank != 0,
            unit="step",
            # A log file gets a line now and then.
            mininterval=0.5 if sys.stderr.isatty() else 10.0,
        )
        with bar:
            try:
                while progress.step < settings.steps:
                    self._advance(bar)
            except StopRequested:
                self._save()
                raise

    def _advance(self, bar: Any) -> None:
        """One step and what is due after it."""
        settings, progress = self.settings, self.progress
        begin = time.perf_counter()
        stop = self._step()
        taken = time.perf_counter() - begin
        progress.seconds += taken
        self.first_step_seconds = self.first_step_seconds or taken
        bar.set_postfix_str(self._postfix(taken), refresh=False)
        bar.update()
        if stop:
            raise StopRequested
        if settings.eval_every and progress.step % settings.eval_every == 0:
            loss = self._validate(self.model, num_batches=2)
            progress.validation.append((progress.step, loss))
        if progress.step % settings.save_every == 0 or progress.step == settings.steps:
            self._save()

    def _step(self) -> bool:
        """One optimizer step; returns whether any rank wants to stop."""
        settings, progress = self.settings, self.progress
        self.optimizer.zero_grad()
        loss, router_loss = self.model.losses(self._training_batch(progress.step))
        (loss + router_loss).backward()
        reduce_gradients(self.model, self.meshes)
        clip_grad_norm_(self.model.parameters(), LARGEST_NORM, self.meshes)
        counts_LE = self.model.take_counts()
        stop = loss.new_tensor([float(self.job.stop_requested())])
        totals = torch.cat((loss.detach()[None], stop, counts_LE.flatten().float()))
        dist.all_reduce(totals)
        scale = learning_rate_scale(progress.step, settings.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate * scale
        self.optimizer.step()
        total_loss, num_stops, *counts = totals.tolist()
        mean_loss = total_loss / self.layout.world
        if not math.isfinite(mean_loss):
            raise RuntimeError(f"demo: loss must be finite, got {mean_loss} at {progress.step}")
        progress.step += 1
        progress.loss.append(mean_loss)
        progress.tokens_per_expert.append(
            [[int(c) for c in row] for row in torch.tensor(counts).view_as(counts_LE).tolist()]
        )
        return num_stops > 0

    def finish(self) -> None:
        """Evaluate, check, and write metrics.json."""
        self._say("evaluating")
        begin = time.perf_counter()
        loss = self._validate(self.model)
        with experts_at_zero(self.model):
            loss_without_experts = self._validate(self.model)
        newest = latest(self.settings.checkpoints)
        assert newest is not None
        reloaded = self._build(self.settings.seed + 1)
        checkpoint.load(newest, reloaded)
        loss_reloaded = self._validate(reloaded)
        worst, difference = self._compare_with_eager()
        self._stop_if_requested()
        self._explain_passes()
        if self.rank == 0:
            metrics = {
                "validation_loss": loss,
                "validation_loss_without_experts": loss_without_experts,
                "validation_loss_reloaded": loss_reloaded,
                "compiled_against_eager": difference,
                "compiled_against_eager_tensor": worst,
                "first_step_seconds": self.first_step_seconds,
                "training_seconds": self.progress.seconds,
                "evaluation_seconds": time.perf_counter() - begin,
                "checkpoint": str(newest),
            }
            path = Path(self.settings.out, "metrics.json")
            path.write_text(json.dumps(metrics, indent=1) + "\n")
            mark_finished(newest)

    def _compare_with_eager(self) -> tuple[str | None, float | None]:
        """The gradient (or loss) that differs most, and by how much."""
        if self.settings.no_compile:
            return None, None
        for step in range(self.settings.steps, self.settings.steps + MOST_COMPARISONS):
            tokens_BT = self._training_batch(step)
            found = compiled_against_eager(self.model, tokens_BT)
            if found.same_routing:
                break
        return found.tensor, found.difference

    def _explain_passes(self) -> None:
        """Write what the passes do to the first block, as text, picture and trace."""
        if self.settings.no_compile or self.passes is None:
            return
        tokens_BT = self.model.part(self._training_batch(self.settings.steps)[:, :-1])
        x_BTH = self.model.embed(tokens_BT).detach().requires_grad_()
        explained = self.passes.explain(self.model.blocks[0], x_BTH, self.model.table)
        if self.rank == 0:
            out = Path(self.settings.out)
            (out / PASSES_TEXT).write_text(f"{explained}\n")
            explained.save_picture(out / PASSES_PICTURE)
            explained.save_trace(out / PASSES_TRACE)

    def _training_batch(self, step: int) -> Tensor:
        tokens_BT = data.training_batch(
            self.corpus.train_N,
            self.settings,
            step=step,
            rank=self.meshes.attention.get_local_rank("dp"),
            world_size=self.layout.dp,
        )
        return tokens_BT.to(self.device)

    def _validate(self, model: ByteModel, num_batches: int | None = None) -> float:
        batches = data.validation_batches(
            self.corpus.validation_N,
            self.settings,
            num_batches=num_batches or self.settings.eval_batches,
            rank=self.meshes.attention.get_local_rank("dp"),
            world_size=self.layout.dp,
        )
        return validation_loss(model, [b.to(self.device) for b in batches], self.job.stop_requested)

    def _postfix(self, seconds: float) -> str:
        counts_LE = torch.tensor(self.progress.tokens_per_expert[-1], dtype=torch.float32)
        load = (counts_LE.amax(1) / counts_LE.mean(1)).mean().item()
        rate = self.settings.batch * self.settings.context / seconds
        return f"loss {self.progress.loss[-1]:.3f}, {rate:,.0f} tokens/s, load max/mean {load:.2f}"

    def _save(self) -> None:
        checkpoint.save(self.settings.checkpoints, self.model, self.optimizer, self.progress)

    def _stop_if_requested(self) -> None:
        """For a point where everything worth keeping is saved."""
        stop = torch.tensor(float(self.job.stop_requested()), device=self.device)
        dist.all_reduce(stop)
        if stop > 0:
            raise StopRequested

    def _say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)
