"""twoaxis: how a Transformer mixes information along sequence position and along layer depth."""

from twoaxis.core.errors import CheckpointError, ConfigError, DataError, StudyError, TwoAxisError
from twoaxis.core.layout import TokenLayout
from twoaxis.depth import DEPTH
from twoaxis.feed_forward import FEED_FORWARD
from twoaxis.local import LOCAL
from twoaxis.model import Decoder, DecoderConfig, Sampling, generate
from twoaxis.sequence import SEQUENCE

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
]
