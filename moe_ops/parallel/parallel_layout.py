"""One set of ranks laid out twice: attention as TP x CP x DP x PP, experts as ETP x EP x EDP x PP.

A stage of the pipeline holds the same ranks in both; within it the expert-parallel group may span
ranks that differ in tp, cp and dp. `order` lists the axes, the fastest first: attention leaves out
`ep`; experts leave out `cp` and read `tp` as etp and `dp` as edp. Source: "MoE Parallel Folding",
arXiv 2504.14960; the order of ranks is Megatron-Core's.

    ParallelLayout(world=8, tp=2, cp=2, etp=1, ep=4), so dp = 2 and edp = 2
        tp   [0, 1], [2, 3], [4, 5], [6, 7]        ep   [0, 1, 2, 3], [4, 5, 6, 7]
        cp   [0, 2], [1, 3], [4, 6], [5, 7]        edp  [0, 4], [1, 5], [2, 6], [3, 7]
        dp   [0, 4], [1, 5], [2, 6], [3, 7]
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..comm.groups import flatten

ORDER = "tp-cp-ep-dp-pp"
_OF_EXPERTS = {"tp": "etp", "dp": "edp"}


@dataclasses.dataclass(frozen=True)
class ParallelMeshes:
    """This rank's meshes. Axes as `order` has them, the slowest first.

    `attention`: pp, dp, cp, tp. `experts`: pp, edp, ep, etp. Of one axis each: `dp_cp`, the
    replicas of a dense parameter; `stage`, all ranks of a pipeline stage; `ep_etp`, those that hold
    all experts once.
    """

    attention: DeviceMesh
    experts: DeviceMesh
    dp_cp: DeviceMesh
    stage: DeviceMesh
    ep_etp: DeviceMesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Sizes of the axes; `dp` and `edp` follow from `world`.

    Args:
        world: ranks in all.
        tp, cp, pp: tensor, context and pipeline parallelism.
        ep: ranks among which the experts are spread.
        etp: ranks among which each expert's F is spread; None: tp.
        order: all of tp, cp, ep, dp, pp, the fastest first.

    Raises:
        ValueError: sizes that do not divide `world`, an order that lacks an axis, or stages of the
            pipeline that would hold other ranks for attention than for experts.
    """

    world: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    order: str = ORDER

    def __post_init__(self) -> None:
        """Refuse what cannot be laid out."""
        if self.etp is None:
            object.__setattr__(self, "etp", self.tp)
        for field in dataclasses.fields(self)[:-1]:
            size = getattr(self, field.name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(
                    f"ParallelLayout: {field.name} must be a positive integer, got {size!r}"
                )
        if sorted(self.order.split("-")) != sorted(ORDER.split("-")):
            raise ValueError(
                f"ParallelLayout: order must hold each axis of {ORDER!r} once, got {self.order!r}"
            )
        for names in (("tp", "cp", "pp"), ("etp", "ep", "pp")):
            sizes = [getattr(self, name) for name in names]
            if self.world % math.prod(sizes):
                raise ValueError(
                    f"ParallelLayout: world must be a multiple of {' * '.join(names)} = "
                    f"{' * '.join(map(str, sizes))} = {math.prod(sizes)}, got {self.world}"
                )
        stages, stages_of_experts = (_groups(axes, ("pp",)) for axes in self._grids())
        if stages != stages_of_experts:
            here, there = next(
                pair for pair in zip(stages, stages_of_experts) if pair[0] != pair[1]
            )
            raise ValueError(
                "ParallelLayout: pipeline stages must hold the same ranks for attention and for "
                f"experts, got pp groups {here} and {there} with order {self.order!r}, "
                f"dp = {self.dp} and edp = {self.edp}; put pp last"
            )

    @property
    def dp(self) -> int:
        """Replicas of attention: world / (tp * cp * pp)."""
        return self.world // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        """Replicas of the experts: world / (etp * ep * pp)."""
        return self.world // (self.etp * self.ep * self.pp)  # type: ignore[operator]

    def attention_axes(self) -> dict[str, int]:
        """tp, cp, dp, pp and their sizes, the fastest first."""
        return {name: getattr(self, name) for name in self.order.split("-") if name != "ep"}

    def expert_axes(self) -> dict[str, int]:
        """etp, ep, edp, pp and their sizes, the fastest first."""
        names = (_OF_EXPERTS.get(name, name) for name in self.order.split("-") if name != "cp")
        return {name: getattr(self, name) for name in names}

    def _grids(self) -> tuple[dict[str, int], dict[str, int]]:
        return self.attention_axes(), self.expert_axes()

    def groups(self, *names: str) -> list[list[int]]:
        """Ranks that differ in these axes alone, group by group; within one the axis that `order`
        has first goes fastest.

        Raises:
            ValueError: an axis that there is not, or axes of both grids.
        """
        for axes in self._grids():
            if names and axes.keys() >= set(names):
                return _groups(axes, names)
        known = " or ".join(str(list(axes)) for axes in self._grids())
        raise ValueError(f"ParallelLayout: axes must be among {known}, got {list(names)}")

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank stands on each axis of both grids."""
        found: dict[str, int] = {}
        for axes in self._grids():
            rest = rank
            for name, size in axes.items():
                rest, found[name] = divmod(rest, size)
        return found

    def meshes(self, device_type: str) -> ParallelMeshes:
        """Both grids as DeviceMesh; makes new process groups. Collective over all ranks.

        Args:
            device_type: "cuda" or "cpu".

        Raises:
            ValueError: torch.distributed runs another number of ranks.
        """
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        if num_ranks != self.world:
            raise ValueError(
                f"ParallelLayout: world must be the ranks of torch.distributed, {num_ranks}, got "
                f"{self.world}"
            )
        attention, experts = (_mesh(device_type, axes) for axes in self._grids())
        return ParallelMeshes(
            attention,
            experts,
            dp_cp=flatten(attention, "dp", "cp"),
            stage=flatten(attention, "dp", "cp", "tp"),
            ep_etp=flatten(experts, "ep", "etp"),
        )

    def rows(self) -> Iterator[str]:
        """A table of all ranks, line by line."""
        attention, experts = self._grids()
        for title, axes in (("attention", attention), ("experts", experts)):
            yield f"{title}: " + " x ".join(f"{name} {size}" for name, size in axes.items())
        names = list(dict.fromkeys([*attention, *experts]))
        yield "".join(f"{name:>6}" for name in ("rank", *names))
        for rank in range(self.world):
            place = self.coordinates(rank)
            yield "".join(f"{number:>6}" for number in (rank, *(place[name] for name in names)))


def _grid(axes: dict[str, int]) -> torch.Tensor:
    """The ranks, the slowest axis first."""
    sizes = list(reversed(axes.values()))
    return torch.arange(math.prod(sizes)).reshape(sizes)


def _groups(axes: dict[str, int], names: tuple[str, ...]) -> list[list[int]]:
    within = [number for number, name in enumerate(reversed(axes)) if name in names]
    last = list(range(len(axes) - len(within), len(axes)))
    size = math.prod(axes[name] for name in set(names))
    return _grid(axes).movedim(within, last).reshape(-1, size).tolist()


def _mesh(device_type: str, axes: dict[str, int]) -> DeviceMesh:
    return DeviceMesh(device_type, _grid(axes), mesh_dim_names=tuple(reversed(axes)))
