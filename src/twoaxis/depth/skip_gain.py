"""Skips with gains, a baseline of the authors of DenseFormer: every sublayer scales the stream before it adds to it."""

from typing import Any

import torch

from twoaxis.core.parameters import Constant
from twoaxis.core.views import Views
from twoaxis.depth.base import DepthMixer, Stream


class SkipGain(DepthMixer):
    """See `DenseFormerConfig` with `variant="skip_gains"`."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = self.parameter("gain", (1,), Constant(1.0), "mixing", stacked=1)

    def write(self, state: Stream, update: Stream, context: Views, carry: Any) -> Stream:
        """Returns g x + update."""
        return torch.addcmul(update.to(state.dtype), state, self.gain)
