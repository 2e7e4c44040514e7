"""The gate of Deep Delta Learning: how far a component of the stream moves towards its target.

Letters: B batch, T position, D width, K hidden width.
"""

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from twoaxis.core.cost import Cost
from twoaxis.core.parameters import Constant, DeclaredModule, Normal, matrix_std
from twoaxis.depth.base import Stream
from twoaxis.ops.precision import Impl, outside_autocast, statistics_dtype
from twoaxis.ops.scores import row_product

Layers = Literal["linear", "two_layer", "two_layer_bias"]


def gate_cost(layers: Layers, width: int, d_model: int, tokens: int) -> Cost:
    """Counts the products of a gate whose hidden layer, if any, has this width."""
    hidden = 0 if layers == "linear" else width
    rows = hidden or d_model
    return Cost(
        params=rows + 1 + hidden * d_model + hidden * (layers == "two_layer_bias"),
        matmul_flops=2 * tokens * hidden * d_model,
        elementwise_flops=2 * tokens * rows,
    )


class Gate(DeclaredModule):
    """Computes beta = 2 sigmoid(g(c)) in (0, 2), times a constant.

    Args:
        layers: of g.
        width: K of two layers.
        d_model: D.
        beta_init: at the start.
        impl: `fused` or `reference`.
        scale: the constant: that of updates, which their direction has lost.
    """

    def __init__(self, layers: Layers, width: int, d_model: int, beta_init: float, impl: Impl, scale: float = 1.0) -> None:
        super().__init__()
        self.largest = 2 * scale
        share = beta_init / 2
        self.layers: Layers = layers
        self.impl: Impl = impl
        width = d_model if layers == "linear" else width
        if layers != "linear":
            start = Normal(matrix_std(d_model))
            self.hidden_weight = self.parameter("hidden_weight", (width, d_model), start, "gate", grows="inputs")
        if layers == "two_layer_bias":
            self.hidden_bias = self.parameter("hidden_bias", (width,), Constant(0.0), "bias")
        grows = "inputs" if layers == "linear" else "neither"
        self.weight = self.parameter("weight", (width,), Normal(matrix_std(width)), "gate", grows=grows)
        self.bias = self.parameter("bias", (1,), Constant(math.log(share / (1 - share))), "bias")

    def forward(self, context: Stream) -> Float[Tensor, "B T"]:
        """Returns beta for each token."""
        if self.layers != "linear":
            context = _hidden(context, self.hidden_weight, self.hidden_bias if self.layers == "two_layer_bias" else None)
        return self.largest * torch.sigmoid(row_product(context, self.weight, self.impl) + self.bias)


@outside_autocast
def _hidden(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    dtype = statistics_dtype(x)
    hidden = x.to(dtype) @ weight.to(dtype).T
    return torch.tanh(hidden if bias is None else hidden + bias.to(dtype))
