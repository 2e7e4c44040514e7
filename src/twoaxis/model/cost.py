"""The cost of a decoder: the sum of the costs that its parts declare; no module is built."""

from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.position import LayerStack, SublayerPosition
from twoaxis.depth import DepthConfig
from twoaxis.local import LocalConfig

NORMS = {"rms": (1, 4), "layer": (2, 7)}
"""(parameters, operations) of a norm per feature: square, add, scale, gain; layer: also sum, subtract, and add a bias."""


@runtime_checkable
class CostedSublayer(Protocol):
    """A sublayer that declares its cost."""

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """Parameters and operations of one forward pass, without the norm before it."""
        ...


@runtime_checkable
class CostedModel(Protocol):
    """A model whose parts declare their cost: a `DecoderConfig`, or a model of another family as the planner reads it."""

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        ...

    @property
    def d_model(self) -> int:
        """Width."""
        ...

    @property
    def tie_embeddings(self) -> bool:
        """Whether the head is the embedding."""
        ...

    @property
    def norm(self) -> Literal["rms", "layer"]:
        """The norm before each sublayer that the depth mixer leaves one, and behind the last."""
        ...

    @property
    def embedding_norm(self) -> Literal["none", "rms"]:
        """The norm between the embedding and the stack."""
        ...

    @property
    def logit_scale(self) -> float:
        """Constant factor of the logits."""
        ...

    @property
    def embedding_local(self) -> LocalConfig | None:
        """The local mixer between the embedding, behind its norm, and the stack."""
        ...

    @property
    def depth(self) -> DepthConfig:
        """The depth mixer."""
        ...

    @property
    def stack(self) -> LayerStack:
        """The sublayers by position."""
        ...

    @property
    def parts(self) -> Sequence[CostedSublayer]:
        """The sublayers in order."""
        ...


def decoder_cost(config: CostedModel, shape: Shape) -> Cost:
    """Returns the cost of one forward pass from tokens to logits.

    It includes every sublayer with its norms, its read and its write, both ends of the stack, the final norm, the
    embedding (parameters only: a lookup computes nothing) and the head. Bytes are measured, see
    `ledger.decoder_memory`.

    Args:
        config: the decoder.
        shape: sequences, tokens in each, and bytes of one element.

    Example:
        >>> from twoaxis.model import DecoderConfig
        >>> config = DecoderConfig(vocab_size=256, d_model=64, n_layers=2)
        >>> decoder_cost(config, Shape(batch=1, tokens=1)).params
        117056
    """
    stack, norm = config.stack, norm_cost(config.norm, config.d_model, shape)
    total = (
        _embedding_and_head(config, shape) + behind_embedding_cost(config, shape) + config.depth.ends_cost(stack, shape) + norm
    )
    total += factor_cost(config.logit_scale, config.d_model, shape)
    for site, sublayer in zip(stack.sites, config.parts, strict=True):
        total += config.depth.cost(site, shape) + sublayer.cost(site, shape)
        total += factor_cost(stack.update_scale, config.d_model, shape)
        for _ in range(norms_before(config.depth, site)):
            total += norm
    return total


def norms_before(depth: DepthConfig, site: SublayerPosition) -> int:
    """Counts the norms between a read and its sublayer: one for each view, or none."""
    return 0 if site.slot.norm == "none" else 3 if depth.splits_views(site) else 1


def norm_cost(norm: Literal["rms", "layer"], d_model: int, shape: Shape) -> Cost:
    """Returns the cost of one norm over the width of a model."""
    params, flops = NORMS[norm]
    return Cost(params=params * d_model, elementwise_flops=flops * shape.total_tokens * d_model)


def factor_cost(factor: float, d_model: int, shape: Shape) -> Cost:
    """Returns the cost of a constant factor on numbers as wide as the model; a factor of 1 is left out."""
    return Cost(elementwise_flops=0 if factor == 1 else shape.total_tokens * d_model)


def behind_embedding_cost(config: CostedModel, shape: Shape) -> Cost:
    """Returns the cost of the norm and of the local mixer between the embedding and the stack."""
    norm = Cost() if config.embedding_norm == "none" else norm_cost("rms", config.d_model, shape)
    local = config.embedding_local
    return norm if local is None else norm + local.cost(config.d_model, config.stack.sites[0], shape)


def _embedding_and_head(config: CostedModel, shape: Shape) -> Cost:
    matrix = config.vocab_size * config.d_model
    return Cost(
        params=matrix if config.tie_embeddings else 2 * matrix,
        matmul_flops=2 * shape.total_tokens * matrix,
    )
