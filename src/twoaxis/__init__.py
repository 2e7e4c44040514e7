"""twoaxis: how a Transformer mixes information along sequence position and along layer depth."""

import contextlib
import importlib
import sys
from typing import TYPE_CHECKING, Any

from twoaxis.core.errors import CheckpointError, ConfigError, DataError, StudyError, TwoAxisError
from twoaxis.core.layout import TokenLayout
from twoaxis.core.parameters import initialise_parts
from twoaxis.depth import DEPTH
from twoaxis.feed_forward import FEED_FORWARD
from twoaxis.local import LOCAL
from twoaxis.model import Decoder, DecoderConfig, Sampling, generate
from twoaxis.sequence import SEQUENCE

if TYPE_CHECKING:
    from twoaxis.api import load, retrofit
    from twoaxis.study import StudyModule
    from twoaxis.train import TrainModule

    study: StudyModule
    train: TrainModule

__version__ = "0.1.0"

__all__ = [
    "DEPTH",
    "FEED_FORWARD",
    "LOCAL",
    "SEQUENCE",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "Decoder",
    "DecoderConfig",
    "Sampling",
    "StudyError",
    "TokenLayout",
    "TwoAxisError",
    "generate",
    "initialise_parts",
    "load",
    "retrofit",
    "study",
    "train",
]

_LATER = {"load": "twoaxis.api", "retrofit": "twoaxis.api", "study": "", "train": ""}
"""Names that are imported when they are asked for, with their module; "" for modules that are themselves called."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _register_where_transformers_is()
    module = importlib.import_module(_LATER[name] or f"{__name__}.{name}")
    return getattr(module, name) if _LATER[name] else module


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _register_where_transformers_is() -> None:
    """Imports `twoaxis.hf` where transformers is there already; to import it is not ours to decide."""
    if sys.modules.get("transformers") is not None:
        # With a version that lacks something, `import twoaxis.hf` says so; all else works.
        with contextlib.suppress(ImportError):
            importlib.import_module("twoaxis.hf")


_register_where_transformers_is()
