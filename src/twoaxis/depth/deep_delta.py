"""Deep Delta Learning: a sublayer overwrites the stream along its own output direction.

Letters: B batch, T position, D width.
"""

import math
from typing import Literal

import torch
from jaxtyping import Float
from pydantic import Field, field_validator
from torch import Tensor

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.equivalence import InitEquivalence
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.parameters import Constant, DeclaredModule, Normal, matrix_std
from twoaxis.core.site import Site, Stack
from twoaxis.core.views import Views
from twoaxis.depth.base import DepthConfig, DepthMixer
from twoaxis.ops.delta import UpdateRule, delta_write
from twoaxis.ops.precision import Impl, outside_autocast, statistics_dtype
from twoaxis.ops.row_product import row_product

ValueTarget = Literal["code", "code_linear", "paper"]
TARGET_SCALE = 4.0
"""The upper end of the `code` value target."""


class DeepDeltaConfig(DepthConfig):
    """Replaces the stream's component along the sublayer's output direction by a learned target.

    Equation: k = f(c) / sqrt(|f(c)|^2 + eps^2),  beta = 2 sigmoid(gate(c)),  x' = x + beta k (v - k^T x),  c = Norm(x)
              v = 4 sigmoid(w_v^T x + b_v) (code) | w_v^T x + b_v (code_linear) | w_v^T c (paper)
    Source:   Deep Delta Learning, arXiv:2601.00417v1, eq. 2.5 with d_v = 1; authors' code
              yifanzhang-pro/deep-delta-learning, model/DDL-vdim1-gpt-mha-rope.py
    Deviates: the paper and its code disagree on the target v; both are named, and `code` is the default since the
              published numbers were presumably made with it. `write_only` drops k^T x: the control the paper names
    Shapes:   state [B T D]; update [B T D] -> state [B T D]; gate, target and statistics in float32
    Init:     NONE: it overwrites along k, so it is never the plain sum. beta starts at beta_init;
              w_beta, w_v ~ N(0, 0.25/D), b_v = 0
    Cost:     params 2*(D+1) per sublayer (gate two_layer: gate_width*(D+1) + D + 2; paper: one less);
              flops 10*D per token and sublayer; state D numbers per token; nothing carried from token to token
    Args:
        value_target: `code`, `code_linear` (the code with its sigmoid off) or `paper`.
        gate: `linear`, or `two_layer` with a tanh between.
        gate_width: hidden width of the two-layer gate.
        beta_init: the gate's starting value, in (0, 2); 1 replaces the component fully, 2 reflects it.
        update_rule: `delta`, or `write_only` (x' = x + beta k v).
        direction_eps: eps of the direction's norm.
        impl: `fused` or `reference`.

    Raises:
        ConfigError: beta_init outside (0, 2).

    Example:
        >>> DeepDeltaConfig(value_target="paper").init_equivalence.relation
        'none'
    """

    kind: Literal["deep_delta"] = "deep_delta"
    value_target: ValueTarget = "code"
    gate: Literal["linear", "two_layer"] = "linear"
    gate_width: int = Field(default=128, ge=1)
    beta_init: float = 1.0
    update_rule: UpdateRule = "delta"
    direction_eps: float = Field(default=1e-5, gt=0)
    impl: Impl = "fused"

    @field_validator("beta_init")
    @classmethod
    def _open_interval(cls, value: float) -> float:
        if not 0 < value < 2:
            raise ConfigError(
                problem("beta_init", value, "inside (0, 2), where the gate lives", "use 1.0, the authors' choice")
            )
        return value

    @property
    def init_equivalence(self) -> InitEquivalence:
        """None."""
        return InitEquivalence("none", "it overwrites along the update's direction, so it is never the plain sum")

    def state_floats(self, stack: Stack, index: int) -> int:
        """One stream."""
        return stack.d_model

    def cost(self, site: Site, shape: Shape) -> Cost:
        """Gate and target by their weights, two row products and one write."""
        D, N = site.d_model, shape.total_tokens
        gate = D + 1 if self.gate == "linear" else self.gate_width * D + self.gate_width + 1
        target = D if self.value_target == "paper" else D + 1
        matmul = 2 * N * self.gate_width * D if self.gate == "two_layer" else 0
        gate_flops = 2 * D if self.gate == "linear" else 2 * self.gate_width
        return Cost(
            params=gate + target,
            matmul_flops=matmul,
            elementwise_flops=N * (gate_flops + 2 * D + (4 if self.update_rule == "delta" else 2) * D + 2 * D),
            saved_bytes=self._saved_bytes(D, shape),
        )

    def _saved_bytes(self, D: int, shape: Shape) -> int:
        """A few numbers per token in the statistics precision; a narrower model also widens what the hidden layer reads."""
        hidden = self.gate_width if self.gate == "two_layer" else 0
        numbers = shape.total_tokens * (5 + (self.value_target == "code") + hidden)
        if hidden and shape.element_bytes < 4:
            numbers += (shape.total_tokens + hidden) * D
        return numbers * max(4, shape.element_bytes)

    def build(self, site: Site) -> "DeepDelta":
        """Builds the mixer."""
        return DeepDelta(self, site.d_model)


class DeepDelta(DepthMixer):
    """See `DeepDeltaConfig`; usable outside our decoder.

    Example:
        >>> from twoaxis.core.parameters import initialise
        >>> mixer = DeepDelta(DeepDeltaConfig(), d_model=4)
        >>> initialise(mixer, seed=0)
        >>> x, update = torch.ones(1, 1, 4), torch.tensor([[[1.0, 0.0, 0.0, 0.0]]])
        >>> mixer.write(x, update, context=x, carry=None)[..., 1:].tolist()
        [[[1.0, 1.0, 1.0]]]
    """

    def __init__(self, config: DeepDeltaConfig, d_model: int) -> None:
        super().__init__()
        self.config = config
        std = matrix_std(d_model)
        self.gate = Gate(config, d_model)
        self.target_weight = self.parameter("target_weight", (d_model,), Normal(std), "gate")
        if config.value_target != "paper":
            self.target_bias = self.parameter("target_bias", (1,), Constant(0.0), "bias")

    def read(self, state: Float[Tensor, "B T D"]) -> tuple[Float[Tensor, "B T D"], None]:
        """Returns the stream."""
        return state, None

    def write(
        self, state: Float[Tensor, "B T D"], update: Float[Tensor, "B T D"], context: Views, carry: None
    ) -> Float[Tensor, "B T D"]:
        """Returns the stream with its component along the update moved towards the target."""
        assert isinstance(context, Tensor), "the read returns one view, so the context is one tensor"
        target = self.target(state, context).unsqueeze(-1)
        beta = self.gate(context).unsqueeze(-1)
        config = self.config
        return delta_write(state, update, target, beta, config.direction_eps, config.update_rule, config.impl)

    def target(self, state: Float[Tensor, "B T D"], context: Float[Tensor, "B T D"]) -> Float[Tensor, "B T"]:
        """The value that replaces the component of the stream."""
        if self.config.value_target == "paper":
            return row_product(context, self.target_weight, self.config.impl)
        linear = row_product(state, self.target_weight, self.config.impl) + self.target_bias
        return TARGET_SCALE * torch.sigmoid(linear) if self.config.value_target == "code" else linear


class Gate(DeclaredModule):
    """How far the component moves: beta = 2 sigmoid(g(c)) in (0, 2)."""

    def __init__(self, config: DeepDeltaConfig, d_model: int) -> None:
        super().__init__()
        start = config.beta_init / 2
        self.two_layer = config.gate == "two_layer"
        self.impl: Impl = config.impl
        width = config.gate_width if self.two_layer else d_model
        if self.two_layer:
            self.hidden_weight = self.parameter("hidden_weight", (width, d_model), Normal(matrix_std(d_model)), "gate")
        self.weight = self.parameter("weight", (width,), Normal(matrix_std(width)), "gate")
        self.bias = self.parameter("bias", (1,), Constant(math.log(start / (1 - start))), "bias")

    def forward(self, context: Float[Tensor, "B T D"]) -> Float[Tensor, "B T"]:
        """Returns beta for each token."""
        if self.two_layer:
            context = _hidden(context, self.hidden_weight)
        return 2 * torch.sigmoid(row_product(context, self.weight, self.impl) + self.bias)


@outside_autocast
def _hidden(x: Tensor, weight: Tensor) -> Tensor:
    dtype = statistics_dtype(x)
    return torch.tanh(x.to(dtype) @ weight.to(dtype).T)
