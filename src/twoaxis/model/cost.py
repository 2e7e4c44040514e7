"""What a whole decoder costs, summed from what its parts declare; nothing is built."""

from twoaxis.core.cost import Cost, Shape
from twoaxis.model.config import DecoderConfig

NORM_FLOPS = 4
"""Operations of an RMSNorm per number: square, add, scale, gain."""


def decoder_cost(config: DecoderConfig, shape: Shape) -> Cost:
    """The cost of one forward pass from tokens to logits.

    It holds every sublayer with its norms, its read and its write, both ends of the stack, the final norm, the
    embedding (parameters only: a lookup computes nothing) and the head. Saved bytes are those the parts declare.

    Args:
        config: the decoder.
        shape: sequences, tokens in each, and bytes of one element.

    Example:
        >>> config = DecoderConfig(vocab_size=256, d_model=64, n_layers=2)
        >>> decoder_cost(config, Shape(batch=1, tokens=1)).params
        117056
    """
    total = _embedding_and_head(config, shape) + config.depth.ends_cost(config.stack, shape)
    total += _norm(config, shape)
    sublayers = (sublayer for block in config.layers for sublayer in block)
    for site, sublayer in zip(config.stack.sites, sublayers, strict=True):
        total += config.depth.cost(site, shape) + sublayer.cost(site, shape)
        for _ in range(3 if config.depth.splits_views(site) else 1):
            total += _norm(config, shape)
    return total


def _embedding_and_head(config: DecoderConfig, shape: Shape) -> Cost:
    matrix = config.vocab_size * config.d_model
    return Cost(params=matrix if config.tie_embeddings else 2 * matrix, matmul_flops=2 * shape.total_tokens * matrix)


def _norm(config: DecoderConfig, shape: Shape) -> Cost:
    return Cost(params=config.d_model, elementwise_flops=NORM_FLOPS * shape.total_tokens * config.d_model)
