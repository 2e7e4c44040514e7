"""Attention Residuals: each sublayer reads a softmax mixture of all earlier outputs instead of their sum.

Letters: B batch, T position, D width, S depth sources.
"""

from typing import Literal, NamedTuple

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.equivalence import InitEquivalence
from twoaxis.core.parameters import Constant, DeclaredModule
from twoaxis.core.site import Site, Stack
from twoaxis.core.views import Views
from twoaxis.depth.base import DepthConfig, DepthEnds, DepthMixer
from twoaxis.ops.depth_read import depth_read
from twoaxis.ops.norm import inverse_rms
from twoaxis.ops.precision import Impl


class AttentionResidualsConfig(DepthConfig):
    """Replaces the residual sum by a softmax over the embedding and the outputs (or block sums) of earlier sublayers.

    Equation: h_g = sum_i a_i v_i,  a = softmax_i(w_g^T (gain_g * RMSNorm(v_i))),  v_0 = embeddings,
              block sums b_n = sum of f over block n; sources of sublayer g: completed blocks, then the running one
    Source:   Attention Residuals, arXiv:2603.15031, eq. 2-4 and the listing of the block form; checked against fla-org/
              flash-linear-attention fla/ops/attnres/naive.py
    Deviates: the first sublayer has one source, so its query and gain would be dead: they do not exist here
    Shapes:   state ((S times [B T D]), (S times [B T])); update [B T D] -> state; scores and softmax in float32
    Init:     UP_TO_NORM: zero queries make every read the mean of the sources, which the next norm rescales to the sum
    Cost:     params 2*D per read (sublayers 1..G-1 and the final one); flops 4*D per source and token, and 2*D
              once per source; state S*(D+1) numbers per token with S = 1 + ceil(g / block_size)

    Args:
        block_size: sublayers summed into one source; 1 keeps every output (full Attention Residuals).
        impl: `fused` or `reference`.

    Example:
        >>> AttentionResidualsConfig(block_size=4).sources(6)
        3
    """

    kind: Literal["attention_residuals"] = "attention_residuals"
    block_size: int = Field(default=1, ge=1)
    impl: Impl = "fused"

    def sources(self, index: int) -> int:
        """Sources that sublayer `index` reads: the embedding, completed blocks, and the running block if any."""
        return 1 + -(-index // self.block_size)

    @property
    def init_equivalence(self) -> InitEquivalence:
        """Up to the scale that a norm removes."""
        return InitEquivalence(
            "up_to_norm", "zero queries read the mean of the sources, the plain stream divided by their number"
        )

    def state_floats(self, stack: Stack, index: int) -> int:
        """Each source with its inverse rms."""
        return self.sources(index) * (stack.d_model + 1)

    def cost(self, site: Site, shape: Shape) -> Cost:
        """One read over the sources, and the running sum with its rms."""
        write = shape.total_tokens * site.d_model * (2 + (site.index % self.block_size > 0))
        return self._read_cost(site.index, site.stack, shape) + Cost(elementwise_flops=write)

    def ends_cost(self, stack: Stack, shape: Shape) -> Cost:
        """The final read, and the rms of the embeddings."""
        enter = Cost(elementwise_flops=2 * shape.total_tokens * stack.d_model)
        return self._read_cost(stack.n_sublayers, stack, shape) + enter

    def _read_cost(self, index: int, stack: Stack, shape: Shape) -> Cost:
        n, N, D = self.sources(index), shape.total_tokens, stack.d_model
        if n == 1:
            return Cost()
        # Raw scores and weights of every source, the product of pseudo-query and gain, and the former widened.
        saved = (2 * n * N + (1 if shape.element_bytes >= 4 else 2) * D) * max(4, shape.element_bytes)
        return Cost(params=2 * D, elementwise_flops=N * n * (4 * D + 5), saved_bytes=saved)

    def build(self, site: Site) -> "AttentionResiduals":
        """Builds the mixer of one sublayer."""
        return AttentionResiduals(self, site)

    def build_ends(self, stack: Stack) -> "AttentionResidualsEnds":
        """Builds the ends."""
        return AttentionResidualsEnds(self, stack)


class Sources(NamedTuple):
    """The depth state: every source with the inverse rms of each of its rows, which all later reads share."""

    values: tuple[Float[Tensor, "B T D"], ...]
    inverse_rms: tuple[Float[Tensor, "B T"], ...]


class DepthQuery(DeclaredModule):
    """One read site: a pseudo-query and a key gain, of which only the product matters to the read."""

    def __init__(self, d_model: int, impl: Impl) -> None:
        super().__init__()
        self.impl: Impl = impl
        self.pseudo_query = self.parameter("pseudo_query", (d_model,), Constant(0.0), "query")
        self.key_gain = self.parameter("key_gain", (d_model,), Constant(1.0), "norm")

    def forward(self, sources: Sources) -> Float[Tensor, "B T D"]:
        """Returns the mixture of the sources."""
        # The product in float32, so that two rounded factors do not become one badly rounded query.
        query = self.pseudo_query.to(sources.inverse_rms[0].dtype) * self.key_gain
        return depth_read(sources.values, sources.inverse_rms, query, self.impl)


class AttentionResiduals(DepthMixer):
    """See `AttentionResidualsConfig`."""

    def __init__(self, config: AttentionResidualsConfig, site: Site) -> None:
        super().__init__()
        self.eps = site.norm_eps
        self.opens_source = site.index % config.block_size == 0
        self.query = DepthQuery(site.d_model, config.impl) if config.sources(site.index) > 1 else None

    def read(self, state: Sources) -> tuple[Float[Tensor, "B T D"], None]:
        """Returns the mixture of all sources; the only source itself at the first sublayer."""
        return (state.values[0] if self.query is None else self.query(state)), None

    def write(self, state: Sources, update: Float[Tensor, "B T D"], context: Views, carry: None) -> Sources:
        """Returns the sources with the update as a new one, or added to the running block sum."""
        values, factors = state
        # Under autocast the update may be narrower than the stream that it joins.
        update = update.to(values[0].dtype)
        if not self.opens_source:
            update = values[-1] + update
            values, factors = values[:-1], factors[:-1]
        return Sources((*values, update), (*factors, inverse_rms(update, self.eps)))


class AttentionResidualsEnds(DepthEnds):
    """The embedding is a source of its own, and the last read has a query of its own."""

    def __init__(self, config: AttentionResidualsConfig, stack: Stack) -> None:
        super().__init__()
        self.eps = stack.norm_eps
        self.query = DepthQuery(stack.d_model, config.impl)

    def enter(self, embeddings: Float[Tensor, "B T D"]) -> Sources:
        """Returns the embedding as the only source."""
        return Sources((embeddings,), (inverse_rms(embeddings, self.eps),))

    def leave(self, state: Sources) -> Float[Tensor, "B T D"]:
        """Returns the final mixture."""
        return self.query(state)
