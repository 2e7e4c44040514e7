"""twoaxis: how a Transformer mixes information along sequence position and along layer depth."""

from twoaxis.core.errors import CheckpointError, ConfigError, DataError, StudyError, TwoAxisError
from twoaxis.core.import_hooks import when_imported
from twoaxis.core.layout import TokenLayout
from twoaxis.core.parameters import initialise_parts
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
    "initialise_parts",
]

# Folders of our models load in transformers once both are imported, in either order; see twoaxis.interop.registration.
when_imported("transformers.models.auto.configuration_auto", "twoaxis.interop.registration:register_config")
