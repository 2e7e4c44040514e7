"""LAuReL as in Gemma 3n, around the tiny decoder."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from twoaxis.depth import LaurelGemma3nConfig
from twoaxis.depth.laurel_gemma3n import LaurelGemma3n

from ..backbones.tinylm import NORM_EPS, TinyLM, streams
from ..golden import Golden, gradient
from . import Adapter, Mistake

# Of the attention part and of the feed-forward part of a block.
NORMS = ("input_layernorm", "pre_feedforward_layernorm")
PARTS = (
    {
        "update_gain": "post_attention_layernorm",
        "down": "laurel.linear_left",
        "up": "laurel.linear_right",
        "gain": "laurel.post_laurel_norm",
    },
    {"update_gain": "post_feedforward_layernorm"},
)


class _Sandwich(TinyLM):
    """Every branch sees its input behind a norm with a gain."""

    def __init__(self, golden: Golden) -> None:
        super().__init__(golden, LaurelGemma3nConfig(rank=golden.about["config"]["rank"]))
        self.gains = [
            golden.take(f"param/hc.{block}.{name}.weight").requires_grad_()
            for block in range(golden.about["config"]["blocks"])
            for name in NORMS
        ]

    def context(self, index: int, x: Any) -> Tensor:
        """The input behind its norm."""
        return F.rms_norm(x, x.shape[-1:], self.gains[index], NORM_EPS)

    def input(self, index: int, x: Any) -> Tensor:
        """A norm of its own of what is behind the norm."""
        return F.rms_norm(self.context(index, x), x.shape[-1:], None, NORM_EPS)


def run_gemma3n(golden: Golden) -> Mapping[str, Tensor]:
    """The decoder, with the gains of its norms."""
    model = _Sandwich(golden)
    names: dict[str, str] = {}
    for index in range(len(model.mixers)):
        part = PARTS[index % 2]
        names.update({f"mixers.{index}.{ours}": f"hc.{index // 2}.{theirs}.weight" for ours, theirs in part.items()})
    parameters = dict(model.named_parameters())
    assert parameters.keys() == names.keys()
    with torch.no_grad():
        for ours, theirs in names.items():
            parameters[ours].copy_(golden.take(f"param/{theirs}"))
    computed = model.run()
    states = [(state,) for state in computed.pop("states")]
    gains = {f"grad/hc.{i // 2}.{NORMS[i % 2]}.weight": gradient(gain) for i, gain in enumerate(model.gains)}
    gradients = {f"grad/{theirs}": gradient(parameters[ours]) for ours, theirs in names.items()}
    return {**computed, **streams(states), **gains, **gradients}


def _without_the_context(patch: pytest.MonkeyPatch) -> None:
    """The low-rank map of the paper's form: its argument is not added."""
    right = LaurelGemma3n.write

    def write(self: LaurelGemma3n, state: Tensor, update: Tensor, context: Any, carry: Any) -> Tensor:
        joined = right(self, state, update, context, carry)
        return joined - context / 2**0.5 if self.opens_block else joined

    patch.setattr(LaurelGemma3n, "write", write)


ADAPTER = Adapter(
    claims={r"laurel-lr-gemma3n(-.*)?": run_gemma3n},
    mistakes=(Mistake("a low-rank map without its argument", "laurel-lr-gemma3n-f64", _without_the_context),),
)
