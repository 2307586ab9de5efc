"""What a trained model is worth, and whether its compiled form computes the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from .model import ByteModel


class StopRequested(Exception):
    """Raised on all ranks at the same point."""


@torch.no_grad()
def validation_loss(
    model: ByteModel, batches: Sequence[Tensor], stop_requested: Callable[[], bool]
) -> float:
    """Mean loss over the batches of all ranks, in nats a byte.

    Eager: graphs without autograd would have to be compiled for this alone.
    """
    total = torch.zeros(2, device=batches[0].device)
    model.eval()
    for tokens_BT in batches:
        with torch.compiler.set_stance("force_eager"):
            loss, _ = model.losses(tokens_BT)
        part = torch.stack((loss, loss.new_tensor(float(stop_requested()))))
        dist.all_reduce(part)
        total += part
        if total[1] > 0:
            raise StopRequested
    model.train()
    return total[0].item() / (len(batches) * dist.get_world_size())


@contextlib.contextmanager
@torch.no_grad()
def experts_at_zero(model: ByteModel) -> Iterator[None]:
    """Routed experts put out zero; shared experts and everything else stay."""
    weights = [moe.experts.w2 for moe in model.moes()]
    kept = [w.clone() for w in weights]
    for w in weights:
        w.zero_()
    try:
        yield
    finally:
        for w, value in zip(weights, kept):
            w.copy_(value)


@dataclass(frozen=True)
class Comparison:
    """`difference` of the `tensor` that differs most, over all ranks."""

    tensor: str
    difference: float
    same_routing: bool


def compiled_against_eager(model: ByteModel, tokens_BT: Tensor) -> Comparison:
    """Compare loss and gradients of one training step: |compiled - eager| / |eager|, 2-norms.

    Where rounding decides between two almost equal experts, both forms are right and their
    gradients differ by more than rounding: `same_routing` tells.
    """
    compiled, compiled_ids = _loss_and_gradients(model, tokens_BT)
    with torch.compiler.set_stance("force_eager"):
        eager, eager_ids = _loss_and_gradients(model, tokens_BT)
    names = list(eager)
    distances = [(compiled[n] - eager[n]).norm() / eager[n].norm().clamp(min=1e-12) for n in names]
    rerouted = (compiled_ids != eager_ids).any().float()
    found = torch.stack([*distances, rerouted]).nan_to_num(torch.inf, posinf=torch.inf)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    worst = int(found[:-1].argmax())
    return Comparison(names[worst], found[worst].item(), found[-1].item() == 0)


def _loss_and_gradients(model: ByteModel, tokens_BT: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Loss and gradients by name, of this rank alone, and the experts chosen in all blocks."""
    model.zero_grad()
    loss, router_loss = model.losses(tokens_BT)
    (loss + router_loss).backward()
    found = {"loss": (loss + router_loss).detach()}
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        found[name] = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
    return found, torch.stack([moe.ids_TK for moe in model.moes() if moe.ids_TK is not None])
