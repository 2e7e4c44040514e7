"""Floor 3: the decoder, with an exchangeable mixer on either axis."""

from twoaxis.model.cache import DecoderCache
from twoaxis.model.config import DecoderConfig
from twoaxis.model.decoder import Decoder
from twoaxis.model.generate import Sampling, generate
from twoaxis.model.likelihood import Likelihood, loglikelihood

__all__ = ["Decoder", "DecoderCache", "DecoderConfig", "Likelihood", "Sampling", "generate", "loglikelihood"]
