"""Model shapes, routings and random inputs.

Letters: T tokens, K top-k, E experts, H hidden, F ffn, C = T * K rows. A layer's matmuls are fc1 (H
to 2F) and fc2 (F to H), the gradients of their inputs, dgrad_*, and of their weights, wgrad_*.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from moe_ops import layout

ALIGNMENT = 128


@dataclasses.dataclass(frozen=True)
class Shape:
    """A layer; `main` ones are run by default with everything, the others with the matmuls."""

    name: str
    num_tokens: int
    hidden: int
    ffn: int
    num_experts: int
    top_k: int
    main: bool = False

    @property
    def num_rows(self) -> int:
        return self.num_tokens * self.top_k

    @property
    def layer_flops(self) -> int:
        """Forward; the backward takes twice as many."""
        return 6 * self.num_rows * self.hidden * self.ffn


# The slices hold fewer experts than the model and, with fewer tokens, its rows per expert.
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("OLMoE", 32768, 2048, 1024, 64, 8, main=True),
        Shape("Qwen3", 32768, 2048, 768, 128, 8, main=True),
        Shape("Mixtral", 8192, 4096, 14336, 8, 2, main=True),
        Shape("DSv3-slice", 8192, 7168, 2048, 64, 8, main=True),
        Shape("Qwen3-Next", 32768, 2048, 512, 512, 10),
        Shape("Kimi-K2-slice", 2720, 7168, 2048, 64, 8),
        Shape("gpt-oss-120b", 32768, 2880, 2880, 128, 4),
        Shape("DeepSeek-V2-Lite", 32768, 2048, 1408, 64, 6),
    )
}
TINY = Shape("tiny", 128, 64, 32, 4, 2)
# What --shape may name.
ALL_SHAPES = {**SHAPES, TINY.name: TINY}
MATMULS = ("fc1", "fc2", "dgrad_fc1", "dgrad_fc2")
WGRADS = ("wgrad_fc1", "wgrad_fc2")
# aligned: equal groups of a multiple of 128 rows; random: a fresh router; zipf: expert e is as
# popular as 1 / (e + 1).
ROUTINGS = ("aligned", "random", "zipf")


class Scene:
    """Routing of one shape and random tensors for it, made on the device."""

    def __init__(
        self,
        shape: Shape,
        routing: str,
        device: str,
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
    ) -> None:
        self.shape = shape
        self.routing = routing
        self.device = device
        self.dtype = dtype
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(
        self, *size: int, std: float = 0.2, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        values = torch.randn(
            size, generator=self.generator, device=self.device, dtype=dtype or self.dtype
        )
        return values.mul_(std)

    def rows(self, width: int) -> torch.Tensor:
        return self.normal(self.shape.num_rows, width)

    def tokens(self) -> torch.Tensor:
        return self.normal(self.shape.num_tokens, self.shape.hidden)

    def w13(self) -> torch.Tensor:
        shape = self.shape
        return self.normal(shape.num_experts, 2 * shape.ffn, shape.hidden, std=0.02)

    def w2(self) -> torch.Tensor:
        shape = self.shape
        return self.normal(shape.num_experts, shape.hidden, shape.ffn, std=0.02)

    @functools.cached_property
    def logits_TE(self) -> torch.Tensor:
        size = (self.shape.num_tokens, self.shape.num_experts)
        if self.routing != "zipf":
            return self.normal(*size, std=1.0, dtype=torch.float32)
        noise = torch.rand(size, generator=self.generator, device=self.device)
        popularity = 1.0 / torch.arange(1, size[1] + 1, device=self.device)
        return popularity.log() - (-noise.clamp(1e-7, 1 - 1e-7).log()).log()

    @functools.cached_property
    def ids_TK(self) -> torch.Tensor:
        if self.routing != "aligned":
            return self.logits_TE.topk(self.shape.top_k, dim=1).indices.int()
        counts = torch.tensor(_aligned_counts(self.shape), device=self.device)
        experts = torch.arange(counts.shape[0], device=self.device).repeat_interleave(counts)
        # An expert has at most T rows, so a token's choices, T apart, are distinct.
        ids_TK = experts.reshape(self.shape.top_k, self.shape.num_tokens).T
        order = torch.randperm(self.shape.num_tokens, generator=self.generator, device=self.device)
        return ids_TK[order].int().contiguous()

    @functools.cached_property
    def weights_TK(self) -> torch.Tensor:
        chosen = self.logits_TE.gather(1, self.ids_TK.long())
        return chosen.softmax(1)

    @functools.cached_property
    def maps(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """slot_of_row_C, row_of_slot_TK, offsets_E."""
        return layout.counting_sort(self.ids_TK, self.shape.num_experts, self.shape.num_rows)

    @functools.cached_property
    def row_weights_C(self) -> torch.Tensor:
        return self.weights_TK.reshape(-1)[self.maps[0].long()]

    @functools.cached_property
    def counts(self) -> list[int]:
        """Rows of each expert, on the host."""
        return self.maps[2].diff(prepend=self.maps[2].new_zeros(1)).tolist()

    @functools.cached_property
    def samples(self) -> list[tuple[int, torch.Tensor]]:
        """(expert, some of its rows), for the fullest, a middle and the emptiest expert in use."""
        used = sorted(e for e, count in enumerate(self.counts) if count)
        used.sort(key=lambda expert: self.counts[expert])
        ends = torch.tensor(self.counts).cumsum(0).tolist()
        found = []
        for expert in sorted({used[0], used[len(used) // 2], used[-1]}):
            rows = torch.arange(ends[expert] - self.counts[expert], ends[expert])
            if len(rows) > 64:
                rows = torch.cat([rows[:32], rows[-32:]])
            found.append((expert, rows.to(self.device)))
        return found


def _aligned_counts(shape: Shape) -> list[int]:
    blocks, rest = divmod(shape.num_rows, ALIGNMENT)
    if rest:
        raise ValueError(
            f"aligned: T * K must be a multiple of {ALIGNMENT}, got {shape.num_rows} ({shape.name})"
        )
    each, more = divmod(blocks, shape.num_experts)
    return [ALIGNMENT * (each + (expert < more)) for expert in range(shape.num_experts)]
