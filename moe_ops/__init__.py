"""Mixture-of-experts operators that torch.compile sees whole."""

from . import comm
from ._library import tag_compile_caches
from .layout import Plan
from .ops.all_gather_rows import all_gather_rows, reduce_scatter_rows
from .ops.all_to_all import all_to_all
from .ops.cp_attention import cp_attention
from .ops.cp_shift import cp_shift
from .ops.cp_split import cp_split, cp_unsplit
from .ops.dispatch import combine, dispatch
from .ops.exchange_plan import exchange_plan
from .ops.gather_plan import gather_plan
from .ops.grouped_bias import grouped_bias
from .ops.grouped_mm import grouped_mm, grouped_mm_wgrad
from .ops.permute import permute, unpermute
from .ops.router_linear import router_linear
from .ops.row_dot import row_dot
from .ops.sort_chunks import sort_chunks
from .ops.sort_slots import sort_slots
from .ops.swiglu import swiglu
from .ops.topk_route import topk_route

__version__ = "0.1.0"

__all__ = [
    "Plan",
    "all_gather_rows",
    "all_to_all",
    "combine",
    "comm",
    "cp_attention",
    "cp_shift",
    "cp_split",
    "cp_unsplit",
    "dispatch",
    "exchange_plan",
    "gather_plan",
    "grouped_bias",
    "grouped_mm",
    "grouped_mm_wgrad",
    "permute",
    "reduce_scatter_rows",
    "router_linear",
    "row_dot",
    "sort_chunks",
    "sort_slots",
    "swiglu",
    "topk_route",
    "unpermute",
]

tag_compile_caches()
