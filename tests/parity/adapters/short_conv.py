"""Convolutions as sublayers: flash-linear-attention's reference, whole and step by step, and LFM's between two gates."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from twoaxis.core.layout import TokenLayout
from twoaxis.core.position import LayerStack
from twoaxis.local import conv
from twoaxis.local.base import TokenHistory
from twoaxis.sequence import GatedShortConvConfig, ShortConvConfig, gated_short_conv

from ..golden import Golden
from ..weights import Weights
from . import Adapter, Mistake


def run_op(golden: Golden) -> Mapping[str, Tensor]:
    """The sublayer's mixer on plain tokens; their states are channels first, ours tokens first."""
    config = golden.about["config"]
    bias = "channel" if config["bias"] else "none"
    options = {"kernel": config["k"], "activation": config["activation"] or "none", "bias": bias}
    layer = ShortConvConfig.from_data(options).build(LayerStack(config["C"], 1e-6, (1,)).sites[0])
    names = ["weight"] + ["bias"] * bool(config["bias"])
    weights = Weights(golden)
    for name in names:
        weights.put(f"conv.{name}", name)
    weights.load(layer)
    x, state = (golden.take(f"input/{name}").requires_grad_() for name in ("x", "initial_state"))
    cotangent, parameters = golden.take("input/cotangent"), [getattr(layer.conv, name) for name in names]
    layout = TokenLayout.contiguous(x.shape[1])

    y, final = layer(x, layout, layer.new_cache())
    grads = dict(zip(["x", *names], torch.autograd.grad((y * cotangent).sum(), (x, *parameters)), strict=True))
    from_state, after = layer(x, layout, TokenHistory(state.transpose(1, 2)))
    later = torch.autograd.grad((from_state * cotangent).sum(), (x, *parameters, state))
    grads |= dict(zip([*(f"{name}_from_state" for name in ("x", *names)), "initial_state"], later, strict=True))
    steps, cache = [], TokenHistory(state.transpose(1, 2))
    for token in x.split(1, dim=1):
        step, cache = layer(token, TokenLayout.contiguous(1), cache)
        steps.append(step)
    return {
        "output/y": y,
        "output/y_from_state": from_state,
        "output/y_stepwise": torch.cat(steps, dim=1),
        "output/final_state": _channels_first(final, config["k"]),
        "output/final_state_from_state": _channels_first(after, config["k"]),
        **{f"grad/{name}": found for name, found in grads.items()},
    }


def run_lfm(golden: Golden) -> Mapping[str, Tensor]:
    """The whole sublayer, and in chunks from its cache."""
    config, x = golden.about["config"], golden.take("input/x").requires_grad_()
    layer = GatedShortConvConfig(kernel=config["conv_L_cache"]).build(LayerStack(config["d"], 1e-6, (1,)).sites[0])
    weights = Weights(golden)
    for ours, theirs in {"gates_and_input.weight": "in_proj", "taps": "conv", "output.weight": "out_proj"}.items():
        weights.put(ours, f"{theirs}.weight")
    weights.load(layer)
    y, _ = layer(x, TokenLayout.contiguous(x.shape[1]))
    y.backward(golden.take("input/cotangent"))
    cache, steps = layer.new_cache(), []
    for part in x.split(5, dim=1):
        step, cache = layer(part, TokenLayout.contiguous(part.shape[1]), cache)
        assert cache.length <= config["conv_L_cache"] - 1
        steps.append(step)
    message = f"{golden.name}: output/y in chunks differs"
    torch.testing.assert_close(torch.cat(steps, dim=1), golden.tensors["output/y"], rtol=1e-12, atol=1e-12, msg=message)
    return {"output/y": y, "grad/x": x.grad, **dict(weights.gradients(layer))}  # type: ignore[dict-item]


def _channels_first(history: TokenHistory, kernel: int) -> Tensor:
    """Their state, which has zeros where fewer tokens than it holds have come."""
    assert history.tokens is not None
    return F.pad(history.tokens.transpose(1, 2), (kernel - 1 - history.length, 0)).contiguous()


def _state_ignored(patch: pytest.MonkeyPatch) -> None:
    right = conv.causal_conv

    def fresh(x: Tensor, *args: Any, history: Tensor | None = None, **options: Any) -> Tensor:
        return right(x, *args, history=None if history is None else 0 * history, **options)

    patch.setattr(conv, "causal_conv", fresh)


def _no_activation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(F, "silu", lambda x: x)


def _gates_swapped(patch: pytest.MonkeyPatch) -> None:
    right = gated_short_conv.GatedShortConv.forward

    def swapped(self: Any, context: Tensor, *given: Any) -> Any:
        thirds = self.gates_and_input.weight.data.chunk(3)
        self.gates_and_input.weight.data = torch.cat([thirds[i] for i in (1, 0, 2)])
        return right(self, context, *given)

    patch.setattr(gated_short_conv.GatedShortConv, "forward", swapped)


def _lfm_newest_tap_first(patch: pytest.MonkeyPatch) -> None:
    right = gated_short_conv.causal_conv
    flipped = lambda x, taps, **options: right(x, taps.flip(-1), **options)  # noqa: E731
    patch.setattr(gated_short_conv, "causal_conv", flipped)


ADAPTER = Adapter(
    claims={r"shortconv-op.*": run_op, r"gated-shortconv-lfm.*": run_lfm},
    mistakes=(
        Mistake("a state that is ignored", "shortconv-op", _state_ignored),
        Mistake("no activation", "shortconv-op", _no_activation),
        Mistake("the gates swapped", "gated-shortconv-lfm", _gates_swapped),
        Mistake("taps from the newest to the oldest token", "gated-shortconv-lfm", _lfm_newest_tap_first),
    ),
)
