"""Gated short convolution of LFM: a convolution between two gates, with projections of its own.

Letters: B batch, T position, D width, E emitted numbers, k taps.
"""

import math
from typing import Literal

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import MixingDesign, free_taps
from twoaxis.core.layout import TokenLayout
from twoaxis.core.parameters import Uniform, extra_output, with_extra
from twoaxis.core.position import SublayerPosition
from twoaxis.core.views import Views
from twoaxis.local.base import TokenHistory
from twoaxis.ops.causal_conv import causal_conv
from twoaxis.ops.precision import Impl
from twoaxis.sequence.base import OutputOptions, SequenceConfig, SequenceMixer


class GatedShortConvConfig(OutputOptions, SequenceConfig):
    """Convolves the last `kernel` tokens of each channel between an input gate and an output gate.

    Equation: y_t = W_o (c_t * sum_(s=0..k-1) w_(k-1-s) (b * x)_(t-s)),  b, c, x = the thirds of W n in this order
    Source:   LFM2 and LFM3, transformers 5.24.0, models/lfm3/modeling_lfm3.py, Lfm3ShortConv
    Deviates: no biases, as in the published models; no tap crosses a document border; the cache holds k - 1 tokens, not k
    Shapes:   context [B T D] -> update [B T D]; sums in float32 (float64 for float64)
    Init:     NONE, or EXACT with output_init="zero"; W ~ N(0, 0.25/D), W_o ~ N(0, 0.25/(D 2 n_layers)) or zero, taps
              U(-1/sqrt(k), 1/sqrt(k))
    Cost:     params 4*D*D + k*D; matmul flops 2 per weight of a matrix and token; cache k-1 tokens of D numbers
    Args:
        kernel: taps k, the current token's included: 3 in LFM2, 7 in LFM3.
        output_init: `scaled`, or `zero` for a sublayer that adds nothing at first.
        impl: `fused` or `reference`.

    Example:
        >>> GatedShortConvConfig(kernel=7).receptive_field
        7
    """

    kind: Literal["gated_short_conv"] = "gated_short_conv"
    kernel: int = Field(default=3, ge=2, le=8)
    impl: Impl = "fused"

    @property
    def design(self) -> MixingDesign:
        """Free taps between gates."""
        return free_taps("b_t * x_t", "added to the stream")

    @property
    def receptive_field(self) -> int:
        """The taps."""
        return self.kernel

    def check(self, d_model: int) -> None:
        """Accepts any width."""

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """Projections by their weights, and the gates and taps."""
        D, N = site.d_model, shape.total_tokens
        weights = D * (4 * D + site.slot.update_extra)
        return Cost(
            params=weights + self.kernel * D,
            matmul_flops=2 * N * weights,
            elementwise_flops=N * D * (2 * self.kernel + 2),
        )

    def build(self, site: SublayerPosition) -> "GatedShortConv":
        """Builds the mixer at this site."""
        return GatedShortConv(self, site)


class GatedShortConv(SequenceMixer, config=GatedShortConvConfig):
    """See `GatedShortConvConfig`."""

    def __init__(self, config: GatedShortConvConfig, site: SublayerPosition) -> None:
        super().__init__()
        self.config, D = config, site.d_model
        self.gates_and_input = self.linear("gates_and_input", D, 3 * D, rows=(D,) * 3)
        self.taps = self.parameter("taps", (D, config.kernel), Uniform(1 / math.sqrt(config.kernel)), "mixing")
        self.output = self.linear("output", D, D, std=config.output_std(site, D))
        self.extra = extra_output(self, D, site.slot.update_extra)

    def new_cache(self) -> TokenHistory:
        """An empty history."""
        return TokenHistory()

    def forward(
        self, context: Views, layout: TokenLayout, cache: TokenHistory | None = None
    ) -> tuple[Float[Tensor, "B T E"], TokenHistory | None]:
        """Returns the gated and projected convolution, and the last gated inputs."""
        assert isinstance(context, Tensor)
        history = cache or TokenHistory()
        input_gate, output_gate, x = self.gates_and_input(context).chunk(3, dim=-1)
        gated = input_gate * x
        documents = history.documents(layout)
        y = causal_conv(gated, self.taps, history=history.tokens, documents=documents, impl=self.config.impl)
        update = with_extra(self.output, self.extra, output_gate * y)
        return update, None if cache is None else history.following(gated, self.config.kernel)
