"""Graph passes that turn the plain graph of `moe_ops` into the fast one.

torch.compile(model, options=fx_passes.options())
"""

from .cost_model import CostModel, FixedCosts, cost_model
from .devices import calibrate
from .explain import explain
from .pipeline import PassConfig, options

__all__ = ["CostModel", "FixedCosts", "PassConfig", "calibrate", "cost_model", "explain", "options"]
