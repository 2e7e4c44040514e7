"""The model whose size makes the numbers of `list` and `show` comparable."""

from twoaxis import DecoderConfig
from twoaxis.core.cost import Shape

REFERENCE_STACK = DecoderConfig(vocab_size=512, d_model=256, n_layers=12, norm_eps=1e-6).stack
REFERENCE_SHAPE = Shape(batch=1, tokens=512)
REFERENCE_SITE = REFERENCE_STACK.sites[-2]
