"""Floor 3: one decoder in which both axes are a slot."""

from twoaxis.model.cache import DecoderCache
from twoaxis.model.config import DecoderConfig
from twoaxis.model.decoder import Decoder
from twoaxis.model.generate import Sampling, generate
from twoaxis.model.likelihood import Likelihood, loglikelihood

__all__ = ["Decoder", "DecoderCache", "DecoderConfig", "Likelihood", "Sampling", "generate", "loglikelihood"]
