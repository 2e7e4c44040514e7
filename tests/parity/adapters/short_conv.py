"""ShortConv: flash-linear-attention's reference of its causal convolution, whole, from a state and step by step."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from twoaxis.core.layout import TokenLayout
from twoaxis.core.site import Stack
from twoaxis.local import conv
from twoaxis.local.token_history import TokenHistory
from twoaxis.sequence import ShortConvConfig

from ..golden import Golden
from ..weights import Weights
from . import Adapter, Mistake


def run_op(golden: Golden) -> Mapping[str, Tensor]:
    """The sublayer's mixer on plain tokens; their states are channels first, ours tokens first."""
    config = golden.about["config"]
    layer = ShortConvConfig(kernel=config["k"], activation=config["activation"]).build(Stack(config["C"], 1e-6, (1,)).sites[0])
    weights = Weights(golden)
    weights.put("conv.weight", "weight")
    weights.load(layer)
    x, state = (golden.take(f"input/{name}").requires_grad_() for name in ("x", "initial_state"))
    cotangent, parameter = golden.take("input/cotangent"), layer.conv.weight
    layout = TokenLayout.contiguous(x.shape[1])

    y, final = layer(x, layout, layer.new_cache())
    grad_x, grad_weight = torch.autograd.grad((y * cotangent).sum(), (x, parameter))
    from_state, after = layer(x, layout, TokenHistory(state.transpose(1, 2)))
    grads = torch.autograd.grad((from_state * cotangent).sum(), (x, parameter, state))
    steps, cache = [], TokenHistory(state.transpose(1, 2))
    for token in x.split(1, dim=1):
        step, cache = layer(token, TokenLayout.contiguous(1), cache)
        steps.append(step)
    return {
        "output/y": y,
        "output/y_from_state": from_state,
        "output/y_stepwise": torch.cat(steps, dim=1),
        "output/final_state": _channels_first(final),
        "output/final_state_from_state": _channels_first(after),
        "grad/x": grad_x,
        "grad/weight": grad_weight,
        "grad/x_from_state": grads[0],
        "grad/weight_from_state": grads[1],
        "grad/initial_state": grads[2],
    }


def _channels_first(history: TokenHistory) -> Tensor:
    assert history.tokens is not None
    return history.tokens.transpose(1, 2).contiguous()


def _state_ignored(patch: pytest.MonkeyPatch) -> None:
    right = conv.causal_conv

    def fresh(x: Tensor, *args: Any, history: Tensor | None = None, **options: Any) -> Tensor:
        return right(x, *args, history=None if history is None else 0 * history, **options)

    patch.setattr(conv, "causal_conv", fresh)


def _no_activation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(F, "silu", lambda x: x)


ADAPTER = Adapter(
    claims={r"shortconv-op.*": run_op},
    mistakes=(
        Mistake("a state that is ignored", "shortconv-op", _state_ignored),
        Mistake("no activation", "shortconv-op", _no_activation),
    ),
)
