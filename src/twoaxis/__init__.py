"""twoaxis: how a Transformer mixes information along sequence position and along layer depth."""

import contextlib
import importlib
import sys
from typing import TYPE_CHECKING, Any

from twoaxis import depth, feed_forward, local, sequence
from twoaxis.core.errors import CheckpointError, ConfigError, DataError, StudyError, TwoAxisError
from twoaxis.core.layout import TokenLayout
from twoaxis.core.parameters import initialise_parts
from twoaxis.depth import DEPTH
from twoaxis.feed_forward import FEED_FORWARD
from twoaxis.local import LOCAL
from twoaxis.model import Decoder, DecoderConfig, Sampling, generate
from twoaxis.sequence import SEQUENCE

if TYPE_CHECKING:
    from twoaxis.api import load, retrofit, save
    from twoaxis.depth import *  # noqa: F403
    from twoaxis.feed_forward import *  # noqa: F403
    from twoaxis.local import *  # noqa: F403
    from twoaxis.sequence import *  # noqa: F403
    from twoaxis.study import StudyModule
    from twoaxis.train import TrainModule

    study: StudyModule
    train: TrainModule

__version__ = "0.2.0"

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
    "save",
    "study",
    "train",
]

_AXES = (depth, sequence, feed_forward, local)
"""The packages whose mixers are names of this one too, such as `twoaxis.DeepDelta`."""

_API = ("load", "retrofit", "save")
_CALLABLE_MODULES = ("study", "train")


def __getattr__(name: str) -> Any:
    """Imports on first use what loads more than models, and finds mixers by the tables of their axes."""
    if name in _API:
        return getattr(importlib.import_module("twoaxis.api"), name)
    if name in _CALLABLE_MODULES:
        return importlib.import_module(f"twoaxis.{name}")
    for axis in _AXES:
        if name in axis.__all__:
            return getattr(axis, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *(name for axis in _AXES for name in axis.__all__)})


if sys.modules.get("transformers") is not None:
    # Only the configuration: it imports the models when transformers needs them. Where transformers lacks something, all else
    # works, and `import twoaxis.hf` raises the error.
    with contextlib.suppress(ImportError):
        importlib.import_module("twoaxis.interop.hugging_face.configuration")
