"""Several value channels as one depth state: how they become the input of a sublayer, start, and are read out.

Letters: B batch, T position, D width, C value channels, k taps of a convolution.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from twoaxis.core.cost import Cost
from twoaxis.core.parameters import Constant, DeclaredModule, Normal, Values, matrix_std
from twoaxis.depth.base import DepthEnds, Layout, Stream, StreamEnds
from twoaxis.ops.causal_conv import causal_conv, causal_conv_sum, next_history
from twoaxis.ops.mix import mix
from twoaxis.ops.precision import Impl, outside_autocast, statistics_dtype

Channels = tuple[Stream, ...]
"""The depth state with several value channels."""

Histories = tuple[Float[Tensor, "B _ D"], ...]
"""The last tokens of every channel; empty before the first call."""


@dataclass(frozen=True)
class ChannelForm:
    """How channels are compressed and initialised.

    Attributes:
        compressor: how C channels become the input of a sublayer; `none` with one channel.
        expansion: how the embedding becomes C channels.
        channels: C.
        kernel_size: k.
        impl: `fused` or `reference`.
    """

    compressor: Literal["none", "time", "channel"]
    expansion: Literal["repeat", "embedding_conv"]
    channels: int
    kernel_size: int
    impl: Impl

    def compressor_cost(self, d_model: int, tokens: int, owned: bool = True) -> Cost:
        """Counts one compression, and its parameters where they are owned."""
        C, D, N, k = self.channels, d_model, tokens, self.kernel_size
        if self.compressor == "time":
            return Cost(params=C * (D * k + 1) * owned, elementwise_flops=2 * C * k * N * D)
        if self.compressor == "channel":
            return Cost(params=C * (D + 1) * owned, matmul_flops=2 * C * C * D, elementwise_flops=2 * C * N * D)
        return Cost()

    def expansion_cost(self, d_model: int, tokens: int) -> Cost:
        """Counts the expansion of the embedding to channels."""
        numbers = self.channels * d_model * self.kernel_size * (self.expansion == "embedding_conv")
        return Cost(params=numbers, elementwise_flops=2 * tokens * numbers)

    def build_compressor(self, d_model: int) -> "Compressor | None":
        """Builds one compressor; a single channel has none."""
        if self.compressor == "time":
            return TimeCompressor(d_model, self.channels, self.kernel_size, self.impl)
        return ChannelCompressor(d_model, self.channels) if self.compressor == "channel" else None

    def build_ends(self, d_model: int) -> DepthEnds:
        """Builds the ends, with a compressor of their own for the readout."""
        readout = self.build_compressor(d_model)
        if readout is None:
            return StreamEnds()
        kernel_size = self.kernel_size if self.expansion == "embedding_conv" else None
        return ChannelEnds(readout, d_model, self.channels, kernel_size, self.impl)


class Compressor(DeclaredModule, ABC):
    """Computes one input from all channels."""

    @abstractmethod
    def forward(self, state: Channels, layout: Layout = None, cache: Any = None) -> tuple[Stream, Any]:
        """Returns the input and the next cache; without a layout every row is one document."""


class TimeCompressor(Compressor):
    """A causal convolution of every channel along positions, then the sum of the channels by `read_weight`."""

    def __init__(self, d_model: int, channels: int, kernel_size: int, impl: Impl) -> None:
        super().__init__()
        C, k = channels, kernel_size
        self.impl: Impl = impl
        self.weight = self.parameter("weight", (d_model, C, k), Normal(matrix_std(d_model)), "mixing")
        self.read_weight = self.parameter("read_weight", (C,), Constant(1 / C), "mixing")

    def forward(
        self, state: Channels, layout: Layout = None, cache: Histories | None = None
    ) -> tuple[Stream, Histories | None]:
        """Returns the input, and with a cache the last k - 1 tokens of every channel."""
        dtype, kernel = statistics_dtype(state[0]), self.weight.shape[-1]
        weights = (self.weight.to(dtype) * self.read_weight.to(dtype)[:, None]).transpose(0, 1)
        past = cache[0].shape[1] if cache else 0
        documents = None if layout is None else layout.key_documents(past + state[0].shape[1])
        x = causal_conv_sum(state, weights, histories=cache or None, documents=documents, impl=self.impl)
        if cache is None:
            return x, None
        before = cache or (None,) * len(state)
        return x, tuple(next_history(history, channel, kernel) for history, channel in zip(before, state, strict=True))


class ChannelCompressor(Compressor):
    """A convolution along the channels of every feature, then the sum of the results by `read_weight`."""

    def __init__(self, d_model: int, channels: int) -> None:
        super().__init__()
        C = channels
        self.weight = self.parameter("weight", (d_model, C), Normal(matrix_std(d_model)), "mixing")
        self.read_weight = self.parameter("read_weight", (C,), Constant(1 / C), "mixing")

    def forward(self, state: Channels, layout: Layout = None, cache: Any = None) -> tuple[Stream, Any]:
        """Returns the input; nothing is carried from token to token."""
        weights = _channel_weights(self.weight, self.read_weight, statistics_dtype(state[0]))
        return mix(state, weights.unsqueeze(0))[0], cache


@outside_autocast
def _channel_weights(weight: Float[Tensor, "D C"], read: Float[Tensor, " C"], dtype: torch.dtype) -> Float[Tensor, "C D"]:
    """The weight of each channel in the read: convolution and sum as one product."""
    C = read.shape[0]
    # Row j has the read weight of each tap: tap m of result r = j - m + (C-1)//2 multiplies channel j.
    reversed_read = pad(read.to(dtype).flip(0), (C, C))
    first = [2 * C - 1 - j - (C - 1) // 2 for j in range(C)]
    taps = torch.stack([reversed_read[start : start + C] for start in first])
    return taps @ weight.to(dtype).T


class EndsCache(NamedTuple):
    """The last embeddings, and the cache of the readout, which the ends carry from token to token."""

    embeddings: Float[Tensor, "B _ D"] | None = None
    readout: Any = ()


class ChannelEnds(DepthEnds):
    """The embedding becomes all channels, and a compressor of its own reads them out.

    Args:
        readout: the compressor.
        d_model: D.
        channels: C.
        kernel_size: k of the convolution that makes the channels; None repeats the embedding.
        impl: `fused` or `reference`.
    """

    def __init__(self, readout: Compressor, d_model: int, channels: int, kernel_size: int | None, impl: Impl) -> None:
        super().__init__()
        C, k = channels, kernel_size
        self.channels, self.kernel_size = channels, kernel_size
        self.impl: Impl = impl
        self.readout = readout
        if k is not None:
            last_tap = Values((*(0.0,) * (k - 1), 1.0) * (d_model * C))
            self.embedding_weight = self.parameter("embedding_weight", (d_model, C, k), last_tap, "mixing")

    def enter(self, embeddings: Stream, layout: Layout = None, cache: Any = None) -> tuple[Channels, Any]:
        """Returns the channels, computed with earlier tokens of the same document."""
        if self.kernel_size is None:
            return (embeddings,) * self.channels, cache
        kept = cache or EndsCache()
        past = 0 if kept.embeddings is None else kept.embeddings.shape[1]
        documents = None if layout is None else layout.key_documents(past + embeddings.shape[1])
        channels = tuple(
            causal_conv(embeddings, weight, history=kept.embeddings, documents=documents, impl=self.impl)
            for weight in self.embedding_weight.unbind(1)
        )
        if cache is None:
            return channels, None
        return channels, kept._replace(embeddings=next_history(kept.embeddings, embeddings, self.kernel_size))

    def leave(self, state: Channels, layout: Layout = None, cache: Any = None) -> tuple[Stream, Any]:
        """Returns the compressed channels, computed with earlier tokens of the same document."""
        if cache is None:
            return self.readout(state, layout)
        kept = cache or EndsCache()
        left, readout = self.readout(state, layout, kept.readout)
        return left, kept._replace(readout=readout) if readout or cache else cache
