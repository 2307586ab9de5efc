"""A byte-level transformer whose feed-forward layers are mixtures of experts.

B sequences, T positions (of this rank), H hidden, N heads, D features a head, V bytes. The residual
stream is float32; every block is a unit for torch.compile.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..nn import MoE, MoEConfig, RouterConfig
from ..ops.cp_attention import cp_attention
from ..ops.cp_split import cp_split
from .settings import Settings

NUM_BYTES = 256


def rotary_table(context: int, head_dim: int) -> Tensor:
    """Cosine and sine of each position and frequency: [2, T, D / 2]."""
    frequency = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angle = torch.arange(context)[:, None] * frequency
    return torch.stack((angle.cos(), angle.sin()))


def rotate(x_BNTD: Tensor, table: Tensor) -> Tensor:
    """Turn each pair of features by the angle of its position."""
    cos, sin = table
    a, b = x_BNTD.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Attention(nn.Module):
    """Causal multi-head attention with normalised, rotated queries and keys.

    With `cp`, a group, its ranks hold parts of each sequence, as `cp_split` gives them.
    """

    def __init__(self, hidden: int, heads: int, cp: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.heads, self.cp = heads, cp
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.q_norm = nn.RMSNorm(hidden // heads)
        self.k_norm = nn.RMSNorm(hidden // heads)
        self.out = nn.Linear(hidden, hidden, bias=False)
        # Small, so that a fresh block is close to the identity.
        nn.init.normal_(self.out.weight, std=0.5 / math.sqrt(hidden))

    def forward(self, x_BTH: Tensor, table: Tensor) -> Tensor:
        heads = self.qkv(x_BTH).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
        q_BNTD, k_BNTD, v_BNTD = heads.unbind(2)
        q_BNTD = rotate(self.q_norm(q_BNTD), table)
        k_BNTD = rotate(self.k_norm(k_BNTD), table)
        y_BNTD = self._attend(q_BNTD, k_BNTD, v_BNTD)
        return self.out(y_BNTD.transpose(1, 2).flatten(2))

    def _attend(self, q_BNTD: Tensor, k_BNTD: Tensor, v_BNTD: Tensor) -> Tensor:
        if self.cp is None:
            return F.scaled_dot_product_attention(q_BNTD, k_BNTD, v_BNTD, is_causal=True)
        # On CUDA it takes no float32.
        dtype = torch.bfloat16 if q_BNTD.is_cuda else q_BNTD.dtype
        y_BNTD, _ = cp_attention(*(x.to(dtype) for x in (q_BNTD, k_BNTD, v_BNTD)), group=self.cp)
        return y_BNTD.to(q_BNTD.dtype)


class Block(nn.Module):
    """Attention, then a mixture of experts, each added to the residual stream."""

    def __init__(
        self,
        settings: Settings,
        group: dist.ProcessGroup | DeviceMesh | None,
        cp: dist.ProcessGroup | None,
    ) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(settings.hidden)
        self.attention = Attention(settings.hidden, settings.heads, cp)
        self.moe_norm = nn.RMSNorm(settings.hidden)
        config = MoEConfig(
            hidden_size=settings.hidden,
            ffn_hidden_size=settings.ffn,
            shared_ffn_hidden_size=settings.ffn,
            num_experts=settings.experts,
            top_k=settings.top_k,
            activation="swiglu",
            dispatcher="flex",
            size_mode="exact",
            max_tokens=settings.batch * settings.context,
            router=RouterConfig(balancing=("global_aux",), aux_loss_coeff=1e-2, z_loss_coeff=1e-3),
        )
        self.moe = MoE(config, group=group)

    def forward(self, x_BTH: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """The block's output and what its router adds to the loss."""
        x_BTH = x_BTH + self.attention(self.attention_norm(x_BTH), table)
        x_BTH = x_BTH + self.moe(self.moe_norm(x_BTH))
        return x_BTH, sum(self.moe.losses.values(), x_BTH.new_zeros(()))


class ByteModel(nn.Module):
    """Parameters outside `experts` are the same on every rank.

    Args:
        settings: the sizes.
        group: of `MoE`: ranks or a mesh over which experts are spread.
        cp: ranks over which each sequence is spread; None: it is whole here.
    """

    def __init__(
        self,
        settings: Settings,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        cp: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.cp = cp
        self.embed = nn.Embedding(NUM_BYTES, settings.hidden)
        self.blocks = nn.ModuleList(Block(settings, group, cp) for _ in range(settings.layers))
        self.norm = nn.RMSNorm(settings.hidden)
        self.head = nn.Linear(settings.hidden, NUM_BYTES, bias=False)
        table = self.part(rotary_table(settings.context, settings.hidden // settings.heads))
        self.register_buffer("table", table, persistent=False)
        nn.init.normal_(self.embed.weight, std=0.5)
        nn.init.zeros_(self.head.weight)

    def part(self, whole: Tensor) -> Tensor:
        """This rank's positions, which lie along dimension 1."""
        return whole if self.cp is None else cp_split(whole, 1, group=self.cp)

    def forward(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of each next byte, and what the routers add to the loss."""
        x_BTH = self.embed(tokens_BT)
        router_loss = x_BTH.new_zeros(())
        for block in self.blocks:
            x_BTH, added = block(x_BTH, self.table)
            router_loss = router_loss + added
        return self.head(self.norm(x_BTH)), router_loss

    def losses(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Mean cross-entropy in nats of the next bytes of this rank's positions, and the routers'
        losses. Over the ranks both are to be averaged.

        Args:
            tokens_BT: whole sequences and the byte after each.
        """
        logits_BTV, router_loss = self(self.part(tokens_BT[:, :-1]))
        labels_BT = self.part(tokens_BT[:, 1:])
        return F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten()), router_loss

    def moes(self) -> list[MoE]:
        return [module for module in self.modules() if isinstance(module, MoE)]

    def expert_parameters(self) -> list[nn.Parameter]:
        """Parameters that are spread over ranks."""
        return [p for moe in self.moes() for p in moe.experts.parameters()]

    def dense_parameters(self) -> list[nn.Parameter]:
        own = {id(p) for p in self.expert_parameters()}
        return [p for p in self.parameters() if id(p) not in own]

    def take_counts(self) -> Tensor:
        """[layers, E] choices of this rank since the last call."""
        counts = torch.stack([moe.stats()["tokens_per_expert"] for moe in self.moes()])
        for moe in self.moes():
            moe.router.reset_counters()
        return counts
