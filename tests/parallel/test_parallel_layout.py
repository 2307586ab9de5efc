"""Groups of ranks against Megatron-Core's rule, written out here; meshes on the fake process
group.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from moe_ops import cli
from moe_ops.parallel import ParallelLayout
from tests.fx_passes.captured import fake_ranks

ORDERS = ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp", "dp-tp-ep-cp-pp")


def groups_by_rule(axes: dict[str, int], names: tuple[str, ...]) -> list[list[int]]:
    """Strides are the products of the sizes before, the fastest axis first. A group's number counts
    through the other axes, a rank's place in it through the group's own.
    """
    strides = dict(zip(axes, itertools.accumulate([1, *axes.values()], lambda a, b: a * b)))
    inside = [name for name in axes if name in names]
    outside = [name for name in axes if name not in names]

    def offset(number: int, along: list[str]) -> int:
        total = 0
        for name in along:
            number, index = divmod(number, axes[name])
            total += index * strides[name]
        return total

    def size(along: list[str]) -> int:
        return math.prod(axes[name] for name in along)

    return [
        [offset(group, outside) + offset(place, inside) for place in range(size(inside))]
        for group in range(size(outside))
    ]


def splits(world: int) -> Iterator[tuple[int, int, int]]:
    """Three sizes whose product divides `world`."""
    divisors = [size for size in range(1, world + 1) if world % size == 0]
    for sizes in itertools.product(divisors, repeat=3):
        if world % math.prod(sizes) == 0:
            yield sizes


def combinations(names: list[str]) -> Iterator[tuple[str, ...]]:
    for number in range(1, len(names) + 1):
        yield from itertools.combinations(names, number)


@pytest.mark.parametrize(("order", "most"), list(zip(ORDERS, (64, 24, 24))))
def test_groups_follow_the_rule_for_all_sizes(order: str, most: int) -> None:
    for world in range(1, most + 1):
        for a, b, pp in splits(world):
            layout = ParallelLayout(world=world, tp=a, cp=b, pp=pp, ep=b, order=order)
            for axes in (layout.attention_axes(), layout.expert_axes())[: 1 + (world <= 16)]:
                for names in combinations(list(axes)):
                    assert layout.groups(*names) == groups_by_rule(axes, names)


@pytest.mark.parametrize("order", ORDERS)
def test_stages_hold_the_same_ranks_or_are_refused(order: str) -> None:
    """Every pair of grids of up to 16 ranks."""
    refused = 0
    for world in range(1, 17):
        for tp, cp, pp in splits(world):
            for etp, ep in {(a, b) for a, b, _ in splits(world // pp)}:
                sizes = {"tp": tp, "cp": cp, "pp": pp, "etp": etp, "ep": ep}
                attention = {**sizes, "dp": world // (tp * cp * pp)}
                experts = {**sizes, "tp": etp, "dp": world // (etp * ep * pp)}
                stages = [
                    groups_by_rule({n: grid[n] for n in order.split("-") if n != left_out}, ("pp",))
                    for grid, left_out in ((attention, "ep"), (experts, "cp"))
                ]
                if stages[0] == stages[1]:
                    layout = ParallelLayout(world=world, order=order, **sizes)
                    assert layout.groups("pp") == stages[0]
                else:
                    refused += 1
                    with pytest.raises(ValueError, match="must hold the same ranks"):
                        ParallelLayout(world=world, order=order, **sizes)
    assert (refused > 0) == (not order.endswith("pp"))


def test_docstring_example() -> None:
    layout = ParallelLayout(world=8, tp=2, cp=2, etp=1, ep=4)
    assert (layout.dp, layout.edp) == (2, 2)
    assert layout.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.groups("cp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert layout.groups("dp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert layout.groups("dp", "cp") == layout.groups("cp", "dp") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert layout.groups("ep") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert layout.groups("edp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert layout.coordinates(6) == {
        "tp": 0,
        "cp": 1,
        "dp": 1,
        "pp": 0,
        "etp": 0,
        "ep": 2,
        "edp": 1,
    }


def test_experts_share_as_attention_does_unless_told() -> None:
    assert ParallelLayout(world=8, tp=4, ep=2).etp == 4
    assert ParallelLayout(world=8, tp=4, ep=2, etp=1).edp == 4


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"world": 64, "tp": 4, "cp": 3}, r"tp \* cp \* pp = 4 \* 3 \* 1 = 12, got 64"),
        ({"world": 8, "ep": 4, "etp": 4}, r"etp \* ep \* pp = 4 \* 4 \* 1 = 16, got 8"),
        ({"world": 0}, "world must be a positive integer, got 0"),
        ({"world": 8, "tp": True}, "tp must be a positive integer, got True"),
        ({"world": 8, "cp": "2"}, "cp must be a positive integer, got '2'"),
        ({"world": 8, "order": "tp-cp-dp-pp"}, "each axis of 'tp-cp-ep-dp-pp' once"),
        ({"world": 8, "order": "tp-tp-ep-dp-pp"}, "each axis of 'tp-cp-ep-dp-pp' once"),
        (
            {"world": 8, "cp": 2, "pp": 2, "ep": 4, "order": "tp-cp-ep-pp-dp"},
            r"got pp groups \[0, 2\] and \[0, 4\] .* dp = 2 and edp = 1; put pp last",
        ),
    ],
)
def test_impossible_sizes_show_the_arithmetic(sizes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelLayout(**sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("names", [(), ("xp",), ("tp", "etp")], ids=str)
def test_groups_refuse_axes_of_no_grid(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="axes must be among"):
        ParallelLayout(world=8).groups(*names)


members = dist.get_process_group_ranks


def group_of(rank: int, groups: list[list[int]]) -> list[int]:
    return next(group for group in groups if rank in group)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("rank", [0, 5, 15])
def test_meshes_have_the_groups(rank: int, order: str) -> None:
    layout = ParallelLayout(world=16, tp=2, cp=2, pp=2, ep=4, etp=1, order=order)
    with fake_ranks(16, rank):
        meshes = layout.meshes("cpu")
        for mesh, axes in (
            (meshes.attention, layout.attention_axes()),
            (meshes.experts, layout.expert_axes()),
        ):
            assert mesh.mesh_dim_names == tuple(reversed(axes))
            for name in axes:
                assert members(mesh.get_group(name)) == group_of(rank, layout.groups(name))
                assert mesh.get_local_rank(name) == layout.coordinates(rank)[name]
        for mesh, names in ((meshes.dp_cp, ("dp", "cp")), (meshes.ep_etp, ("ep", "etp"))):
            assert mesh.mesh_dim_names == ("_".join(names),)
            assert members(mesh.get_group()) == group_of(rank, layout.groups(*names))
        with pytest.raises(ValueError, match=r"the ranks of torch\.distributed, 16, got 8"):
            ParallelLayout(world=8).meshes("cpu")


def test_command_prints_places_and_groups(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--world", "8", "--tp", "2", "--cp", "2", "--etp", "1", "--ep", "4"]
    assert cli.main(["layout", *sizes]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "attention: tp 2 x cp 2 x dp 2 x pp 1",
        "experts: etp 1 x ep 4 x edp 2 x pp 1",
    ]
    assert lines[2].split() == ["rank", "tp", "cp", "dp", "pp", "etp", "ep", "edp"]
    assert lines[3 + 6].split() == ["6", "0", "1", "1", "0", "0", "2", "1"]
    assert len(lines) == 3 + 8
    assert cli.main(["layout", *sizes, "--groups", "dp,cp"]) == 0
    assert capsys.readouterr().out == "[0, 2, 4, 6]\n[1, 3, 5, 7]\n"


def test_command_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["layout", "--world", "8", "--tp", "3"]) == 2
    captured = capsys.readouterr()
    assert "tp * cp * pp = 3 * 1 * 1 = 3, got 8" in captured.err
    assert not captured.out
