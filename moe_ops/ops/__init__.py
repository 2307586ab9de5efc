"""Operators, one file an operator or adjoint pair; importing this package registers all of them."""

from . import (
    all_gather_rows,
    all_to_all,
    dispatch,
    exchange_plan,
    gather_grouped_mm,
    gather_plan,
    grouped_bias,
    grouped_mm,
    grouped_mm_swiglu,
    permute,
    router_linear,
    row_dot,
    sort_chunks,
    sort_slots,
    swiglu,
    topk_route,
)

__all__ = [
    "all_gather_rows",
    "all_to_all",
    "dispatch",
    "exchange_plan",
    "gather_grouped_mm",
    "gather_plan",
    "grouped_bias",
    "grouped_mm",
    "grouped_mm_swiglu",
    "permute",
    "router_linear",
    "row_dot",
    "sort_chunks",
    "sort_slots",
    "swiglu",
    "topk_route",
]
