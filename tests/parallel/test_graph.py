"""The graphs of a compiled block on a mesh show every collective, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph

from fx_passes.graph import arguments, name_of
from moe_ops.nn import MoE, MoEConfig
from moe_ops.parallel import ParallelLayout
from tests.fx_passes.captured import Captured, fake_ranks
from tests.fx_passes.compiled import OFF

from .test_gradients import HIDDEN, Model

# By dispatcher: forward, backward. Keys go around the ring of two; experts' rows (copies, tokens),
# their weights and ids (counts, ids) are gathered over the ranks that hold parts of the experts.
GATHER, SUM = "all_gather_rows", "reduce_scatter_rows"
GATHERS, TWICE = 3 * [GATHER], 2 * ["all_to_all"]
COLLECTIVES = {
    "flex": (
        ["cp_shift", "exchange_plan", "dispatch", "gather_plan", *GATHERS, SUM, "combine"],
        ["dispatch", GATHER, SUM, SUM, "combine", "cp_shift", "cp_shift"],
    ),
    "alltoall": (
        ["cp_shift", "exchange_plan", *TWICE, "gather_plan", *GATHERS, SUM, "all_to_all"],
        ["all_to_all", GATHER, SUM, SUM, *TWICE, "cp_shift", "cp_shift"],
    ),
    "allgather": (
        ["cp_shift", "gather_plan", *GATHERS, SUM],
        [GATHER, SUM, SUM, "cp_shift", "cp_shift"],
    ),
}


def collectives_of(graph: Graph, axes: dict[str, str]) -> list[tuple[str, str]]:
    """Whatever names a group, and its axis, sorted: PyTorch decides on the order."""
    found = []
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            names = [argument.name for argument in node.target._schema.arguments]
            if "group_name" in names:
                group_name = arguments(node)[names.index("group_name")]
                found.append((name_of(node), axes[group_name]))
    return sorted(found)


def axis_of(name: str, dispatcher: str) -> str:
    """Over which ranks a collective goes."""
    if name == "cp_shift":
        return "cp"
    if name in (GATHER, SUM, "gather_plan"):
        return "ep_etp" if dispatcher == "allgather" else "etp"
    return "ep"


@pytest.mark.parametrize("dispatcher", COLLECTIVES)
def test_a_block_on_a_mesh_shows_its_collectives(dispatcher: str) -> None:
    kept = Captured(**OFF)
    with fake_ranks(4):
        meshes = ParallelLayout(world=4, cp=2, ep=2, etp=2).meshes("cpu")
        model = Model(meshes)
        config = MoEConfig(
            hidden_size=HIDDEN, ffn_hidden_size=8, num_experts=8, top_k=2, dispatcher=dispatcher
        )
        model.moe = MoE(config, meshes.experts, dtype=torch.float64)
        kept.compile(model)(torch.randn(2, 4, HIDDEN, dtype=torch.float64)).sum().backward()
        meshes_of = {"cp": meshes.attention["cp"], "ep_etp": meshes.ep_etp}
        meshes_of |= {name: meshes.experts[name] for name in ("ep", "etp")}
        axes = {mesh.get_group().group_name: name for name, mesh in meshes_of.items()}
    ((forward,), (backward,)) = kept.forward, kept.backward
    for graph, expected in zip((forward, backward), COLLECTIVES[dispatcher]):
        wanted = [(name, axis_of(name, dispatcher)) for name in expected]
        assert collectives_of(graph, axes) == sorted(wanted)
