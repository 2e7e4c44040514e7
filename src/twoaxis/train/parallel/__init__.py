"""A run on several processes.

`layout` is the part `parallel` of a recipe, `ranks` the processes, `placement` what one of them holds; `sharding` divides
parameters and the rows of a batch, and `pipeline` cuts a decoder along depth into stages.
"""

from importlib import import_module
from typing import Any

__all__ = ["Pipeline", "PipelineConfig", "PipelineLoss", "Plan", "make_plan"]


def __getattr__(name: str) -> Any:
    """Imports the pipeline when it is asked for: torch.distributed.pipelining takes seconds."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "pipeline" if name in ("Pipeline", "PipelineLoss") else "boundaries"
    return getattr(import_module(f"{__name__}.{module}"), name)
