"""The mixture-of-experts layer: router, dispatcher, experts, shared expert.

Letters: T tokens here, K top-k, E experts, H hidden, B sequences, S tokens of a sequence.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
import torch._dynamo.config
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .. import checks, comm, layout
from .config import MoEConfig
from .dispatchers import make_dispatcher
from .expert_groups import ExpertGroups
from .experts import Experts, SharedExperts
from .router import Router, in_backward


def _check_group(config: MoEConfig, group: Any, num_ranks: int) -> None:
    if config.router.pad_to_capacity and num_ranks > 1 and config.max_tokens == 0:
        raise ValueError(
            "MoE: max_tokens must be positive with router.pad_to_capacity on several ranks, got 0"
        )
    initialised = dist.is_available() and dist.is_initialized()
    if group is None and not initialised and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        warnings.warn(
            "MoE: group is None, so this process holds all experts; before init_process_group "
            "dist.group.WORLD is None too",
            stacklevel=3,
        )


class MoE(nn.Module):
    """A mixture-of-experts feed-forward layer, expert-parallel over `group`.

    Args:
        config: what to build.
        group: ranks among which the experts are spread evenly, in order; each rank brings its own
            tokens, possibly none. A ProcessGroup, its name, or None: all experts here. Or a
            DeviceMesh, as `ParallelLayout.meshes(...).experts`: experts are spread over its axis
            "ep", each one's F over "etp" if there is one, and their parameters are DTensors; the
            tokens of "edp", if there is one, are balanced with these.
        device, dtype: of the parameters. On the meta device nothing is initialised: `to_empty`,
            then `reset_parameters`.

    After each forward `losses` holds this step's balancing losses, coefficients included, to be
    added to the loss: scalars, at least float32, by name ("aux", "seq_aux", "global_aux", "z").
    Under torch.utils.checkpoint they need use_reentrant=False: the other form runs the forward
    without a graph, so that they have no gradient. A checkpoint inside a compiled region needs
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint.

    Gradients: an expert's is already the sum over its group's ranks, since their tokens came to it;
    router, shared expert and the rest of a model hold this rank's part. For the mean of the ranks'
    losses sum the latter over the ranks, then divide both by their number.
    DistributedDataParallel averages the latter, so divide the experts' alone; it also copies rank
    0's parameters to all ranks, and would the experts: first name `per_rank_names(model)` to
    `DistributedDataParallel._set_params_and_buffers_to_ignore_for_model`.

    With a group and exact sizes the constructor sets
    `torch._dynamo.config.capture_dynamic_output_shape_ops`: without it a torch.compile that is not
    fullgraph would break the graph at `exchange_plan`.

    Raises:
        ValueError: the experts do not spread evenly, or `group` is not initialised.
    """

    overflow_2: torch.Tensor
    shared_experts: SharedExperts | None

    def __init__(
        self,
        config: MoEConfig,
        group: dist.ProcessGroup | DeviceMesh | str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(config, MoEConfig):
            raise TypeError(f"MoE: config must be a MoEConfig, got {config!r}")
        self.config = config
        groups = ExpertGroups.of(group)
        self.group_name = groups.both
        checks.experts("MoE", config.num_experts, comm.group_size(groups.ep, "MoE"))
        _check_group(config, group, comm.group_size(groups.both))
        if comm.group_size(groups.both) > 1 and config.size_mode == "exact":
            torch._dynamo.config.capture_dynamic_output_shape_ops = True
        self.router = Router(
            config.hidden_size,
            config.num_experts,
            config.top_k,
            config.router,
            group=groups.balanced or None,
            max_tokens=config.max_tokens,
            device=device,
            dtype=dtype,
        )
        self.dispatcher = make_dispatcher(config, groups)
        self.experts = Experts(
            config.hidden_size,
            config.ffn_hidden_size,
            config.num_experts,
            activation=config.activation,
            bias=config.bias,
            group=group,
            device=device,
            dtype=dtype,
        )
        self.shared_experts = None
        if config.shared_ffn_hidden_size:
            self.shared_experts = SharedExperts(
                config.hidden_size,
                config.shared_ffn_hidden_size,
                activation=config.activation,
                gate=config.shared_gate,
                device=device,
                dtype=dtype,
            )
        self.register_buffer(
            "overflow_2", torch.zeros(2, dtype=torch.int64, device=device), persistent=False
        )
        self.losses: dict[str, torch.Tensor] = {}
        self.ids_TK: torch.Tensor | None = None

    def reset_parameters(self) -> None:
        """Initialise parameters and counters anew."""
        for module in (self.router, self.experts, self.shared_experts):
            if module is not None:
                module.reset_parameters()
        self.overflow_2.zero_()

    def forward(
        self,
        x: torch.Tensor,
        *,
        padding_mask: torch.Tensor | None = None,
        router_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Output like x [..., H]; collective over the group.

        Under autocast tokens travel, and the output comes back, in its dtype (float64 stays); the
        router computes in float32.

        Args:
            x: [T, H] or [B, S, H], in the parameters' dtype; T differs freely by rank, zero
                included.
            padding_mask: bool [T] or [B, S], True = real token. A padding token reaches no expert,
                uses no capacity, counts nowhere, and its output is 0.
            router_ids: [T, K] integer experts to use instead of choosing (-1 = none), as in
                `ids_TK` after an earlier forward; not counted again.

        Raises:
            TypeError, ValueError: on every rank, if one of them gave a wrong shape or dtype.
        """
        if torch.compiler.is_compiling() or not self.group_name:
            self._check(x, padding_mask, router_ids)
        else:
            comm.agree("MoE", self.group_name, lambda: self._check(x, padding_mask, router_ids))
        x_TH = x.reshape(-1, self.config.hidden_size)
        mask_T = None
        if padding_mask is not None:
            mask_T = padding_mask.reshape(-1)
            x_TH = torch.where(mask_T[:, None], x_TH, 0)
        routing = self.router(
            x_TH,
            num_sequences=x.shape[0] if x.dim() == 3 else 1,
            mask_T=mask_T,
            ids_TK=router_ids,
        )
        x_TH = x_TH.to(layout.autocast_dtype(x) or x.dtype)
        shared_TH = None if self.shared_experts is None else self.shared_experts(x_TH)
        padded_to = routing.expert_capacity if self.config.router.pad_to_capacity else None
        dispatched = self.dispatcher(x_TH, routing.weights_TK, routing.ids_TK, padded_to)
        rows_CH = self.experts(dispatched.rows_CH, dispatched.row_weights_C, dispatched.offsets_L)
        out_TH = dispatched.combine(rows_CH, shared_TH)
        self.losses = routing.losses
        # NOTE: torch.export takes no tensor attribute, and torch 2.11 cannot tell it from compile.
        inference_graph = torch.compiler.is_compiling() and not self.training
        self.ids_TK = None if inference_graph else routing.chosen_TK
        if dispatched.overflow_2 is not None and not in_backward():
            self.overflow_2.add_(dispatched.overflow_2)
        return out_TH.reshape(x.shape)

    def _check(
        self,
        x: torch.Tensor,
        padding_mask: torch.Tensor | None,
        router_ids: torch.Tensor | None,
    ) -> tuple[object, ...]:
        name, config = "MoE", self.config
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: x must be a tensor, got {type(x).__name__}")
        if x.dim() not in (2, 3) or x.shape[-1] != config.hidden_size:
            raise ValueError(
                f"{name}: x must have shape [T, H] or [B, S, H] with H = {config.hidden_size}, "
                f"got {tuple(x.shape)}"
            )
        checks.tensor(name, "x", x, x.dim(), checks.FLOATS, like=self.experts.w13)
        w13 = self.experts.w13
        is_cast = layout.autocast_dtype(x) is not None or self.experts.groups.is_sharded(w13)
        if x.dtype != w13.dtype and not is_cast:
            raise TypeError(
                f"{name}: x must have the experts' dtype {w13.dtype} "
                f"or, if not float64, be under torch.autocast, got {x.dtype}"
            )
        num_tokens = x.numel() // config.hidden_size
        if config.max_tokens and num_tokens > config.max_tokens:
            raise ValueError(
                f"{name}: x must have at most max_tokens = {config.max_tokens} tokens, "
                f"got {num_tokens}"
            )
        if "seq_aux" in config.router.balancing and x.dim() != 3:
            raise ValueError(
                f"{name}: x must have shape [B, S, H] with balancing 'seq_aux', "
                f"got {tuple(x.shape)}"
            )
        if padding_mask is not None:
            checks.tensor(name, "padding_mask", padding_mask, x.dim() - 1, (torch.bool,), like=x)
            if padding_mask.shape != x.shape[:-1]:
                raise ValueError(
                    f"{name}: padding_mask must have shape {tuple(x.shape[:-1])}, "
                    f"got {tuple(padding_mask.shape)}"
                )
        if router_ids is not None:
            checks.tensor(name, "router_ids", router_ids, 2, checks.IDS, like=x)
            shape = (num_tokens, config.top_k)
            if router_ids.shape != shape:
                raise ValueError(
                    f"{name}: router_ids must have shape {shape}, got {tuple(router_ids.shape)}"
                )
            if not torch.compiler.is_compiling():
                checks.ids_in_range(name, "router_ids", router_ids, config.num_experts)
        # Ranks that differ in these would exchange gradients with nobody.
        leaves = (x, self.router.weight, self.experts.w13, self.experts.w2)
        grads = torch.is_grad_enabled(), *(leaf.requires_grad for leaf in leaves)
        return config, x.dtype, self.training, grads

    def stats(self) -> dict[str, torch.Tensor]:
        """Device tensors, nothing read: the router's counters and `overflow` [2] int64, copies and
        rows left out.
        """
        return {**self.router.stats(), "overflow": self.overflow_2.clone()}

    def check_overflow(self) -> None:
        """Raise on every rank if copies or rows did not fit anywhere since the last call.
        Collective; reads the device.

        Raises:
            RuntimeError: with the numbers of each rank.
        """
        gathered = comm.all_gather(self.overflow_2, self.router.group_name).tolist()
        self.overflow_2.zero_()
        overflows = {rank: tuple(numbers) for rank, numbers in enumerate(gathered) if any(numbers)}
        if overflows:
            dispatcher = self.dispatcher
            raise RuntimeError(
                f"MoE: copies and rows must fit into copy_capacity = {dispatcher.copy_capacity} "
                f"and row_capacity = {dispatcher.row_capacity}, got (rank: (copies, rows) "
                f"left out) {overflows}; raise the capacities or use size_mode='exact'"
            )

    def __getstate__(self) -> dict[str, Any]:
        """For copy and pickle: without the last step's results, which hold a graph."""
        return {**self.__dict__, "losses": {}, "ids_TK": None}
