"""The GELU feed-forward of GPT-2."""

import functools
from collections.abc import Callable
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from twoaxis.core.site import Site
from twoaxis.feed_forward.plain import Plain, PlainConfig


class GELUConfig(PlainConfig):
    """Applies the Gaussian error linear unit between two matrices.

    Equation: y = W_down gelu(W_up c),  gelu(z) = z Phi(z), or its tanh approximation
    Source:   Gaussian Error Linear Units, arXiv:1606.08415, section 2
    Deviates: no biases
    Shapes:   context [B T D] -> update [B T D]
    Init:     W_up ~ N(0, 0.25/D), W_down ~ N(0, 0.25/(F 2 n_layers))
    Cost:     params 2*D*F; matmul flops 4*D*F per token
    Args:
        d_ff: hidden width F; None means 4 d_model rounded up to a multiple of 16.
        d_ff_by_depth: `equal` widths, or `rising` from 0.5 d_ff in the first block to 1.5 d_ff in the last (MUDDFormer).
        input_local: a local mixer of the context, such as `canon` (place C of the Canon paper).
        projected_local: a local mixer of the hidden numbers before the activation (place D).
        form: `erf` (exact) or `tanh` (GPT-2).

    Example:
        >>> GELUConfig().hidden_width(256)
        1024
    """

    kind: Literal["gelu"] = "gelu"
    form: Literal["erf", "tanh"] = "erf"

    @property
    def activation(self) -> Callable[[Tensor], Tensor]:
        """GELU in the configured form."""
        return functools.partial(F.gelu, approximate="tanh" if self.form == "tanh" else "none")

    def build(self, site: Site) -> Plain:
        """Builds the module at this site."""
        return GELU(self, site)


class GELU(Plain, config=GELUConfig):
    """See `GELUConfig`."""
