"""Graph passes that turn the plain graph of `moe_ops` into the fast one.

torch.compile(model, options=fx_passes.options())
"""

from .config import PassConfig
from .cost_model import CostModel, FixedCosts, cost_model
from .devices import calibrate
from .explain import explain
from .pipeline import options
from .report import Report
from .tune import Tuned, tune

__all__ = [
    "CostModel",
    "FixedCosts",
    "PassConfig",
    "Report",
    "Tuned",
    "calibrate",
    "cost_model",
    "explain",
    "options",
    "tune",
]
