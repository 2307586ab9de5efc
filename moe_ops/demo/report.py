"""Pictures of a run: the loss, and how the routers spread the bytes over the experts."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch

from .progress import Progress

LAST_STEPS = 50


def draw_loss(progress: Progress, path: Path) -> None:
    """Training loss of each step, smoothed, and the validation loss where it was taken."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    steps = range(1, len(progress.loss) + 1)
    axes.plot(steps, progress.loss, color="tab:blue", alpha=0.25, linewidth=0.8)
    axes.plot(steps, _smooth(progress.loss), color="tab:blue", label="training, smoothed")
    if progress.validation:
        axes.plot(*zip(*progress.validation), "o-", color="tab:orange", label="validation")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats a byte")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_experts(progress: Progress, path: Path) -> None:
    """Share of each expert over the last steps, and the busiest one against the mean over time."""
    counts_SLE = torch.tensor(progress.tokens_per_expert, dtype=torch.float32)
    recent_LE = counts_SLE[-LAST_STEPS:].mean(0)
    share_LE = recent_LE / recent_LE.sum(1, keepdim=True)
    load_SL = counts_SLE.amax(2) / counts_SLE.mean(2)

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    image = left.imshow(share_LE, vmin=0, cmap="viridis", aspect="auto")
    for layer, row in enumerate(share_LE.tolist()):
        for expert, share in enumerate(row):
            left.text(expert, layer, f"{share:.0%}", ha="center", va="center", color="white")
    left.set_title(f"share of the choices, last {min(LAST_STEPS, len(counts_SLE))} steps")
    left.set_xlabel("expert")
    left.set_ylabel("block")
    left.set_xticks(range(share_LE.shape[1]))
    left.set_yticks(range(share_LE.shape[0]))
    figure.colorbar(image, ax=left)
    for layer, loads in enumerate(load_SL.T.tolist()):
        right.plot(range(1, len(loads) + 1), _smooth(loads), label=f"block {layer}")
    right.set_title("busiest expert / mean")
    right.set_xlabel("step")
    right.set_ylim(bottom=1.0)
    right.grid(alpha=0.3)
    right.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _smooth(values: list[float], keep: float = 0.9) -> list[float]:
    """Exponential mean whose start is not pulled towards zero."""
    smoothed, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = keep * total + value, keep * weight + 1.0
        smoothed.append(total / weight)
    return smoothed
