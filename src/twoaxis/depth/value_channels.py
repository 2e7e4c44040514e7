"""Several value channels as one depth state: how they become the input of a sublayer, begin and are read out.

Letters: B batch, T position, D width, C value channels, k taps of a convolution.
"""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from twoaxis.core.layout import TokenLayout
from twoaxis.core.parameters import Constant, DeclaredModule, Normal, Values, matrix_std
from twoaxis.depth.base import DepthEnds
from twoaxis.ops.causal_conv import causal_conv, causal_conv_sum, next_history
from twoaxis.ops.mix import mix
from twoaxis.ops.precision import Impl, outside_autocast, statistics_dtype

Channels = tuple[Float[Tensor, "B T D"], ...]
"""The depth state with several value channels."""

Histories = tuple[Float[Tensor, "B _ D"], ...]
"""The last tokens of every channel, or nothing before the first call."""


class Compressor(DeclaredModule, ABC):
    """Makes one input of all channels."""

    @abstractmethod
    def forward(self, state: Channels, layout: TokenLayout | None = None, cache: Any = None) -> tuple[Tensor, Any]:
        """Returns the input and the next cache; without a layout every row is one document."""

    def new_cache(self) -> Any:
        """What it carries from token to token before the first one."""


class TimeCompressor(Compressor):
    """A causal convolution of every channel along positions, then the sum of the channels by `read_weight`."""

    def __init__(self, d_model: int, channels: int, kernel_size: int, impl: Impl) -> None:
        super().__init__()
        C, k = channels, kernel_size
        self.impl: Impl = impl
        self.weight = self.parameter("weight", (d_model, C, k), Normal(matrix_std(d_model)), "mixing")
        self.read_weight = self.parameter("read_weight", (C,), Constant(1 / C), "mixing")

    def new_cache(self) -> Histories:
        """No tokens."""
        return ()

    def forward(
        self, state: Channels, layout: TokenLayout | None = None, cache: Histories | None = None
    ) -> tuple[Float[Tensor, "B T D"], Histories | None]:
        """Returns the input, and the last k - 1 tokens of every channel when given those before."""
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

    def __init__(self, d_model: int, channels: int, impl: Impl) -> None:
        super().__init__()
        C = channels
        self.impl: Impl = impl
        self.weight = self.parameter("weight", (d_model, C), Normal(matrix_std(d_model)), "mixing")
        self.read_weight = self.parameter("read_weight", (C,), Constant(1 / C), "mixing")

    def forward(
        self, state: Channels, layout: TokenLayout | None = None, cache: None = None
    ) -> tuple[Float[Tensor, "B T D"], None]:
        """Returns the input; nothing is carried from token to token."""
        weights = _channel_weights(self.weight, self.read_weight, statistics_dtype(state[0]))
        return mix(state, weights.unsqueeze(0), self.impl)[0], None


@outside_autocast
def _channel_weights(weight: Float[Tensor, "D C"], read: Float[Tensor, " C"], dtype: torch.dtype) -> Float[Tensor, "C D"]:
    """The weight of each channel in the read: convolution and sum as one product."""
    C = read.shape[0]
    # Row j holds the read weight of each tap: tap m of the result r = j - m + (C-1)//2 sees channel j.
    reversed_read = pad(read.to(dtype).flip(0), (C, C))
    first = [2 * C - 1 - j - (C - 1) // 2 for j in range(C)]
    taps = torch.stack([reversed_read[start : start + C] for start in first])
    return taps @ weight.to(dtype).T


class EndsCache(NamedTuple):
    """What the ends carry from token to token: embeddings, and the channels that the readout sees."""

    embeddings: Float[Tensor, "B _ D"] | None
    readout: Any


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

    def new_cache(self) -> EndsCache | None:
        """No tokens; None where nothing mixes along positions."""
        readout = self.readout.new_cache()
        return EndsCache(None, readout) if self.kernel_size is not None or readout is not None else None

    def enter(self, embeddings: Float[Tensor, "B T D"]) -> Channels:
        """Returns the channels."""
        return self._expand(embeddings, None, None)

    def enter_along(
        self, embeddings: Float[Tensor, "B T D"], layout: TokenLayout, cache: EndsCache | None
    ) -> tuple[Channels, EndsCache | None]:
        """As `enter`, with the tokens of the same document before these."""
        if self.kernel_size is None:
            return self._expand(embeddings, None, None), cache
        history = None if cache is None else cache.embeddings
        past = 0 if history is None else history.shape[1]
        channels = self._expand(embeddings, history, layout.key_documents(past + embeddings.shape[1]))
        if cache is None:
            return channels, None
        return channels, cache._replace(embeddings=next_history(history, embeddings, self.kernel_size))

    def _expand(self, embeddings: Tensor, history: Tensor | None, documents: Tensor | None) -> Channels:
        if self.kernel_size is None:
            return (embeddings,) * self.channels
        return tuple(
            causal_conv(embeddings, weight, history=history, documents=documents, impl=self.impl)
            for weight in self.embedding_weight.unbind(1)
        )

    def leave(self, state: Channels) -> Float[Tensor, "B T D"]:
        """Returns what the channels are compressed to."""
        return self.readout(state)[0]

    def leave_along(
        self, state: Channels, layout: TokenLayout, cache: EndsCache | None
    ) -> tuple[Float[Tensor, "B T D"], EndsCache | None]:
        """As `leave`, with the tokens of the same document before these."""
        left, readout = self.readout(state, layout, None if cache is None else cache.readout)
        return left, None if cache is None else cache._replace(readout=readout)
