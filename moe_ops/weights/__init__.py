"""Expert weights of other libraries: their layouts, and Hugging Face checkpoints into `MoE`."""

from .families import FAMILIES, config_of
from .layouts import LAYOUTS, pack_weights, unpack_weights
from .load import load_experts

__all__ = [
    "FAMILIES",
    "LAYOUTS",
    "config_of",
    "load_experts",
    "pack_weights",
    "unpack_weights",
]
