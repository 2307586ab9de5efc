"""Layers in spellings that the pass was not written for: what is found, refused, computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from fx_passes.fuse_permute_all_to_all import fuse_permute_all_to_all_pass
from tests.ranks import run_on_ranks

from .captured import fake_ranks
from .compiled import Backend, ops_of
from .graphs import check_leaves_alone
from .stock_layers import Sizes
from .stock_unseen import (
    CountedLayer,
    CountedPieces,
    IndexedLayer,
    IndexedPieces,
    UnseenLayer,
    place,
    run_by_chunks,
    scatter,
)
from .test_fuse_permute_all_to_all import (
    FORWARD,
    LATE,
    ON,
    capture,
    compare,
    graphs_of,
    reads_captured,
)

Pieces = IndexedPieces | CountedPieces


@pytest.fixture(autouse=True)
def _reads_captured() -> Iterator[None]:
    with reads_captured():
        yield


def layer_of(
    pieces: Pieces, group: dist.ProcessGroup, num_experts: int = 4, dtype: Any = torch.float32
) -> UnseenLayer:
    kind = IndexedLayer if isinstance(pieces, IndexedPieces) else CountedLayer
    layer = kind(Sizes(num_experts=num_experts), group, dtype)
    layer.pieces = pieces
    return layer


def _place_by_starts(mask_SE: torch.Tensor, starts_E: torch.Tensor, ids_S1: Any) -> torch.Tensor:
    seen_S = mask_SE.cumsum(dim=0).gather(1, ids_S1).squeeze(1)
    return (starts_E[ids_S1.squeeze(1)] + seen_S - 1)[:, None]


def _place_by_mask(mask_SE: torch.Tensor, starts_E: torch.Tensor, ids_S1: Any) -> torch.Tensor:
    before_SE = mask_SE.cumsum(0) - mask_SE
    return ((before_SE * mask_SE).sum(1) + starts_E.index_select(0, ids_S1.view(-1))).unsqueeze(1)


def _place_by_index(mask_SE: torch.Tensor, starts_E: torch.Tensor, ids_S1: Any) -> torch.Tensor:
    all_SE = starts_E.unsqueeze(0) + (mask_SE.to(torch.int32).cumsum(0, dtype=torch.int64) - 1)
    return all_SE[torch.arange(ids_S1.shape[0]), ids_S1.flatten()].view(-1, 1)


def _starts_by_joining(counts_E: torch.Tensor) -> torch.Tensor:
    return torch.cat([counts_E.new_zeros(1), counts_E.cumsum(0)[:-1]])


def _starts_by_padding(counts_E: torch.Tensor) -> torch.Tensor:
    return functional.pad(counts_E[:-1], (1, 0)).cumsum(0)


def _put_by_index(rows_SH: torch.Tensor, place_S1: torch.Tensor, ids_S1: Any) -> torch.Tensor:
    out_SH = torch.empty_like(rows_SH)
    out_SH[place_S1.squeeze(1)] = rows_SH
    return out_SH


def _put_by_adding(rows_SH: torch.Tensor, place_S1: torch.Tensor, ids_S1: Any) -> torch.Tensor:
    return torch.zeros_like(rows_SH).index_add(0, place_S1.view(-1), rows_SH)


def _put_by_inverse(rows_SH: torch.Tensor, place_S1: torch.Tensor, ids_S1: Any) -> torch.Tensor:
    slots_S = torch.arange(rows_SH.shape[0])
    return rows_SH[torch.empty_like(slots_S).scatter(0, place_S1.flatten(), slots_S)]


def _read_joined(counts_E: torch.Tensor, received_E: torch.Tensor) -> list[list[int]]:
    both = torch.cat([counts_E, received_E]).tolist()
    return [both[: len(both) // 2], both[len(both) // 2 :]]


def _read_in_2d(counts_E: torch.Tensor, received_E: torch.Tensor) -> list[list[int]]:
    both = (counts.view(2, -1).cpu().tolist() for counts in (counts_E, received_E))
    return [[*first, *second] for first, second in both]


def _splits_one_by_one(counts_PL: torch.Tensor) -> list[int]:
    return [(row[0] + row[1]).item() for row in counts_PL]


def _splits_of_slices(counts_PL: torch.Tensor) -> list[int]:
    counts_E, num_local = counts_PL.flatten(), counts_PL.shape[1]
    starts = range(0, counts_E.shape[0], num_local)
    return [int(counts_E[first : first + num_local].sum()) for first in starts]


def _splits_of_columns(counts_PL: torch.Tensor) -> list[int]:
    return [sum(column) for column in zip(*counts_PL.t().tolist(), strict=True)]


def _expert_rows_in_python(received_PL: torch.Tensor) -> list[int]:
    return [sum(each) for each in zip(*received_PL.tolist(), strict=True)]


def _run_whole(layer: Any, arrived_CH: torch.Tensor, received: list[int]) -> torch.Tensor:
    """All chunks sorted at once, there and back."""
    num_local = layer.num_local
    chunks = arrived_CH.split(received)
    rows_CH = torch.cat([chunk for e in range(num_local) for chunk in chunks[e::num_local]])
    mine = rows_CH.split([sum(received[e::num_local]) for e in range(num_local)])
    out_CH = torch.cat([layer.expert(e, rows) for e, rows in enumerate(mine)])
    back = out_CH.split([size for e in range(num_local) for size in received[e::num_local]])
    num_ranks = layer.num_ranks
    return torch.cat([back[e * num_ranks + r] for r in range(num_ranks) for e in range(num_local)])


def _sum_of_slots(rows_SH: torch.Tensor, tokens_S: Any, x_TH: torch.Tensor) -> torch.Tensor:
    return rows_SH.view(-1, Sizes().top_k, x_TH.shape[1]).sum(1)


def _tokens_by_division(x_TH: torch.Tensor, top_k: int) -> torch.Tensor:
    return torch.arange(x_TH.shape[0] * top_k, device=x_TH.device) // top_k


def _tokens_by_repeats(x_TH: torch.Tensor, top_k: int) -> torch.Tensor:
    return torch.arange(x_TH.shape[0], device=x_TH.device)[:, None].repeat(1, top_k).flatten()


SPELLINGS: dict[str, Pieces] = {
    "indexed": IndexedPieces(),
    "indexed-slices": IndexedPieces(
        count=lambda ids, n: functional.one_hot(ids, n).cumsum(0)[-1],
        splits=_splits_of_slices,
        tokens=_tokens_by_division,
    ),
    "indexed-one-by-one": IndexedPieces(
        splits=_splits_one_by_one,
        expert_rows=_expert_rows_in_python,
        arrival=lambda labels: labels.sort(stable=True).indices,
        gather=lambda x, tokens, order: x[tokens][order],
    ),
    "indexed-columns": IndexedPieces(
        splits=_splits_of_columns,
        count=lambda ids, n: (torch.arange(n) == ids[:, None]).sum(0),
        tokens=_tokens_by_repeats,
    ),
    "indexed-unstable": IndexedPieces(
        sort=lambda ids: ids.argsort(), arrival=lambda labels: labels.argsort()
    ),
    "counted": CountedPieces(),
    "counted-back": CountedPieces(
        put=lambda rows, place, ids: rows[ids.squeeze(1).argsort(stable=True)]
    ),
    "counted-starts": CountedPieces(
        place=_place_by_starts, put=_put_by_index, starts=_starts_by_joining, read=_read_joined
    ),
    "counted-mask": CountedPieces(
        place=_place_by_mask,
        put=_put_by_adding,
        starts=_starts_by_padding,
        run=_run_whole,
        back=lambda rows, place: rows[place.squeeze(1)],
    ),
    "counted-index": CountedPieces(
        place=_place_by_index,
        put=_put_by_inverse,
        read=_read_in_2d,
        count=lambda mask, ids: torch.histc(ids.float(), bins=4, min=0, max=3).long(),
        total=_sum_of_slots,
    ),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_found_once(name: str) -> None:
    with fake_ranks(2) as group:
        module = capture(layer_of(SPELLINGS[name], group))
        assert fuse_permute_all_to_all_pass(module.graph) == 1
        module.graph.lint()
        assert ops_of(module.graph) == FORWARD
        assert not any("c10d" in str(node.target) for node in module.graph.nodes)
        before = str(module.graph)
        assert fuse_permute_all_to_all_pass(module.graph) == 0
        assert str(module.graph) == before


def spelling_on_rank(rank: int, name: str) -> list[list[list[str]]]:
    """Uneven tokens; one token, and so experts without rows; no tokens on one rank, if the layer
    can count none.
    """
    sizes = (6 + 3 * rank, 1 + rank, 5 * rank)[: 2 if name == "indexed-slices" else 3]
    layer, backend = layer_of(SPELLINGS[name], dist.group.WORLD), Backend(**ON)
    with reads_captured():
        function = backend.compile(layer, dynamic=True)
        compare(layer, function, sizes, rank)
    return [
        [ops_of(graph) for graph in graphs if "all_to_all" not in str(graph)]
        for graphs in (backend.forward, backend.backward)
    ]


@pytest.mark.dist
@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings_on_ranks(name: str) -> None:
    for forward, backward in run_on_ranks(2, spelling_on_rank, name, timeout_s=400):
        # Without tokens Dynamo makes further graphs.
        assert forward == len(forward) * [LATE[0]]
        assert backward == len(backward) * [LATE[1]]


def other_sizes_on_rank(rank: int, num_experts: int, top_k: int) -> list[list[list[str]]]:
    found = []
    for kind in (IndexedLayer, CountedLayer):
        sizes = Sizes(num_experts=num_experts, top_k=top_k)
        layer, backend = kind(sizes, dist.group.WORLD, torch.float32), Backend(**ON)
        with reads_captured():
            compare(layer, backend.compile(layer, dynamic=True), (6 + 3 * rank,), rank)
        found.append(graphs_of(backend))
    return found


@pytest.mark.dist
@pytest.mark.parametrize(("num_experts", "top_k"), [(2, 2), (6, 1)], ids=["L1", "K1"])
def test_other_sizes_on_ranks(num_experts: int, top_k: int) -> None:
    for found in run_on_ranks(2, other_sizes_on_rank, num_experts, top_k, timeout_s=400):
        assert found == [LATE, LATE]


def _sums_of_strides(counts: list[int], num_local: int) -> list[int]:
    return [sum(counts[rank::2]) for rank in range(2)]


def _overlapping_sums(counts: list[int], num_local: int) -> list[int]:
    return [sum(counts[rank : rank + num_local]) for rank in range(2)]


def _run_by_ranks(layer: Any, arrived_CH: torch.Tensor, received: list[int]) -> torch.Tensor:
    """An expert gets all that came from one rank."""
    chunks, num_local = arrived_CH.split(received), layer.num_local
    rows = [torch.cat(chunks[e * num_local : (e + 1) * num_local]) for e in range(num_local)]
    return torch.cat([layer.expert(e, mine) for e, mine in enumerate(rows)])


def _run_without_return(layer: Any, arrived_CH: torch.Tensor, received: list[int]) -> Any:
    chunks, num_local = arrived_CH.split(received), layer.num_local
    rows = [torch.cat(chunks[e::num_local]) for e in range(num_local)]
    return torch.cat([layer.expert(e, mine) for e, mine in enumerate(rows)])


def _run_backwards(layer: Any, arrived_CH: torch.Tensor, received: list[int]) -> torch.Tensor:
    """Chunks of every expert in another order on their way there than on their way back."""
    chunks, num_local = arrived_CH.split(received), layer.num_local
    results: list[Any] = [None] * len(received)
    for e in range(num_local):
        y_CH = layer.expert(e, torch.cat(chunks[e::num_local][::-1]))
        results[e::num_local] = y_CH.split(received[e::num_local])
    return torch.cat(results)


def _run_with_swapped_sizes(layer: Any, arrived_CH: torch.Tensor, received: list[int]) -> Any:
    chunks, num_local = arrived_CH.split(received), layer.num_local
    results: list[Any] = [None] * len(received)
    for e in range(num_local):
        y_CH = layer.expert(e, torch.cat(chunks[e::num_local]))
        results[e::num_local] = y_CH.split(received[e::num_local][::-1])[::-1]
    return torch.cat(results)


def _run_with_other_sizes(layer: Any, arrived_CH: torch.Tensor, received: list[int]) -> Any:
    return run_by_chunks(layer, arrived_CH, [*received[1:], received[0]])


def _place_last_first(mask_SE: torch.Tensor, starts_E: torch.Tensor, ids_S1: Any) -> torch.Tensor:
    """Slots of an expert in falling order."""
    after_SE = mask_SE.flip(0).cumsum(0).flip(0)
    return (after_SE - 1 + starts_E).gather(1, ids_S1)


def _place_of_other_ids(mask_SE: torch.Tensor, starts_E: Any, ids_S1: Any) -> torch.Tensor:
    return place(mask_SE, starts_E, ids_S1.flip(0))


def _add_wrongly(rows_SH: torch.Tensor, tokens_S: Any, x_TH: torch.Tensor) -> torch.Tensor:
    tokens_S = torch.arange(x_TH.shape[0]).repeat(rows_SH.shape[0] // x_TH.shape[0])
    return torch.zeros_like(x_TH).index_add(0, tokens_S, rows_SH)


NO_SPLITS = "its splits are not sums over the experts of a rank"
NOT_SORTED = "it is no row of a slot sorted by expert"
NOT_BACK = "it does not sort rows by the rank they came from"
NEAR_MISSES: dict[str, tuple[Pieces, str]] = {
    "counts of other ids": (
        CountedPieces(count=lambda mask, ids: torch.bincount(ids.view(-1).flip(0), minlength=4)),
        NOT_SORTED,
    ),
    "counts without the last slot": (
        CountedPieces(count=lambda mask, ids: mask.cumsum(0)[-2]),
        NO_SPLITS,
    ),
    "rounded counts": (
        CountedPieces(count=lambda mask, ids: mask.to(torch.bfloat16).sum(0).long()),
        "its splits are not counts of slots by rank",
    ),
    "sums of strides": (CountedPieces(split_sizes=_sums_of_strides), NO_SPLITS),
    "overlapping sums": (CountedPieces(split_sizes=_overlapping_sums), NO_SPLITS),
    "sums of experts": (IndexedPieces(splits=lambda counts: counts.sum(0).tolist()), NO_SPLITS),
    "sent and received": (
        CountedPieces(read=lambda sent, received: torch.stack([received, sent]).tolist()),
        NOT_BACK,
    ),
    "inclusive starts": (CountedPieces(starts=lambda counts: counts.cumsum(0)), NOT_SORTED),
    "shifted starts": (
        CountedPieces(starts=lambda counts: functional.pad(counts.cumsum(0)[1:], (1, 0))),
        NOT_SORTED,
    ),
    "starts after a one": (
        CountedPieces(starts=lambda counts: functional.pad(counts.cumsum(0)[:-1], (1, 0), value=1)),
        NOT_SORTED,
    ),
    "last first": (CountedPieces(place=_place_last_first), NOT_SORTED),
    "place of other ids": (CountedPieces(place=_place_of_other_ids), NOT_SORTED),
    "gathered there": (
        CountedPieces(put=lambda rows, place, ids: rows[place.squeeze(1)]),
        "its slots are sorted by other ids",
    ),
    "scattered back": (
        CountedPieces(back=lambda rows, place: scatter(rows, place, None)),
        "in the order of their slots",
    ),
    "not brought back": (
        IndexedPieces(back=lambda rows, order: rows[order]),
        "in the order of their slots",
    ),
    "unstable there": (
        CountedPieces(put=lambda rows, place, ids: rows[ids.squeeze(1).argsort()]),
        "sorted in two ways",
    ),
    "unstable at arrival": (
        IndexedPieces(
            arrival=lambda labels: labels.argsort(),
            leave=lambda rows, order, labels: rows[labels.argsort(stable=True).argsort()],
        ),
        "sorted in two ways",
    ),
    "chunks by rank": (CountedPieces(run=_run_by_ranks), "is not sorted by expert"),
    "chunks not brought back": (CountedPieces(run=_run_without_return), NOT_BACK),
    "chunks backwards": (CountedPieces(run=_run_backwards), "is not sorted by expert"),
    "results backwards": (CountedPieces(run=_run_with_swapped_sizes), NOT_BACK),
    "chunks of other sizes": (CountedPieces(run=_run_with_other_sizes), "is not sorted by expert"),
    "tokens in turn": (CountedPieces(total=_add_wrongly), "it is no sum over the slots"),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_refuses(name: str, caplog: pytest.LogCaptureFixture) -> None:
    pieces, reason = NEAR_MISSES[name]
    with fake_ranks(2) as group:
        module = capture(layer_of(pieces, group))
        check_leaves_alone(fuse_permute_all_to_all_pass, module, reason, caplog)
