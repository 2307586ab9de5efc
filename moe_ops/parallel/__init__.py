"""How ranks share a model."""

from .parallel_layout import ParallelLayout, ParallelMeshes

__all__ = ["ParallelLayout", "ParallelMeshes"]
