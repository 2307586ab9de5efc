"""Expert-parallel groups: resolving, agreement between ranks, collectives of uneven rows,
engines.
"""

from .agreement import agree
from .collectives import all_gather
from .engines import available_engines, engine, setup
from .groups import group_name_of, group_rank, group_size, resolve

__all__ = [
    "agree",
    "all_gather",
    "available_engines",
    "engine",
    "group_name_of",
    "group_rank",
    "group_size",
    "resolve",
    "setup",
]
