"""Graph passes that turn the plain graph of `moe_ops` into the fast one.

torch.compile(model, options=fx_passes.options())
"""

from .pipeline import PassConfig, options

__all__ = ["PassConfig", "options"]
