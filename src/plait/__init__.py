"""Plait: a compiler that splits an ordinary PyTorch model over many devices."""

from plait import collectives, errors
from plait.api import clip_grad_norm_, compile, plan
from plait.cluster import Cluster
from plait.plan.plan import Plan
from plait.plan.simulated import simulate
from plait.runtime.compiled import Compiled

__version__ = "0.1.0"

__all__ = [
    "Cluster",
    "Compiled",
    "Plan",
    "__version__",
    "clip_grad_norm_",
    "collectives",
    "compile",
    "errors",
    "plan",
    "simulate",
]
