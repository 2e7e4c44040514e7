"""Gated DeltaNet: the recurrence and the layer of flash-linear-attention, and the layer with ShortSWA in its branches."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from twoaxis.core.layout import TokenLayout
from twoaxis.core.position import LayerStack
from twoaxis.local import conv, local_swa
from twoaxis.local.places import Apart
from twoaxis.ops import gated_delta as operator
from twoaxis.ops.gated_delta import gated_delta
from twoaxis.sequence import GatedDeltaNetConfig
from twoaxis.sequence import gated_delta_net as mixer

from ..golden import Golden, gradient
from ..weights import Weights
from . import Adapter, Mistake

INPUTS = ("q", "k", "v", "g", "beta")
BRANCHES = ("q", "k", "v")


def run_op(golden: Golden) -> Mapping[str, Tensor]:
    """The recurrence from a state, in both engines; their heads come after positions, and their states are ours transposed."""
    engines = [_recurrence(golden, impl) for impl in ("fused", "reference")]
    for name, found in engines[1].items():
        torch.testing.assert_close(found, engines[0][name], rtol=0, atol=1e-11, msg=f"{golden.name}: {name} by two engines")
    return engines[0]


def _recurrence(golden: Golden, impl: Any) -> dict[str, Tensor]:
    leaves = {name: golden.take(f"input/{name}").requires_grad_() for name in (*INPUTS, "initial_state")}
    heads = [leaves[name].transpose(1, 2) for name in INPUTS]
    y, last = gated_delta(*heads, state=leaves["initial_state"].transpose(2, 3), impl=impl)
    outputs = y.transpose(1, 2), last.transpose(2, 3)
    torch.autograd.backward(outputs, (golden.take("input/cotangent"), golden.take("input/cotangent_state")))
    gradients = {f"grad/{name}": gradient(leaf) for name, leaf in leaves.items()}
    return {"output/o": outputs[0], "output/final_state": outputs[1], **gradients}


def run_layer(golden: Golden) -> Mapping[str, Tensor]:
    """The layer with one convolution of all branches, which are three of theirs."""
    return _layer(
        golden, {"kind": "canon", "form": "plain", "activation": "silu", "kernel": golden.about["config"]["conv_size"]}
    )


def run_short_swa(golden: Golden) -> Mapping[str, Tensor]:
    """The layer with a ShortSWA of its own in each branch."""
    config = golden.about["config"]
    local = {
        "kind": "local_swa",
        "window": config["window"],
        "n_heads": config["swa_heads"],
        "n_kv_heads": config["swa_kv_heads"],
        "head_dim": config["swa_head_dim"],
        "rope_theta": config["rope_theta"],
        "form": config["form"],
        "activation": config["activation_after"],
    }
    return _layer(golden, local, over="branch")


def _layer(golden: Golden, local: Mapping[str, Any], over: str = "joint") -> Mapping[str, Tensor]:
    config = golden.about["config"]
    sizes = {
        "n_heads": config["num_heads"],
        "head_dim": config["head_dim"],
        "value_dim": int(config["expand_v"] * config["head_dim"]),
        "qk_eps": config["qk_l2_eps"],
    }
    built = GatedDeltaNetConfig.from_data({**sizes, "projected_local": dict(local), "projected_over": over})
    layer = built.build(LayerStack(config["d"], config["norm_eps"], (1,)).sites[0])
    weights = Weights(golden)
    weights.put("qkv.weight", *(f"{x}_proj" for x in BRANCHES))
    weights.put("gate.weight", "g_proj")
    weights.put("decay_and_beta", "a_proj", "b_proj")
    for name in ("A_log", "dt_bias"):
        weights.put(name, name)
    weights.put("gain", "o_norm")
    weights.put("output.weight", "o_proj")
    if over == "joint":
        weights.put("projected_local.weight", *(f"{x}_conv1d" for x in BRANCHES))
    else:
        for index, x in enumerate(BRANCHES):
            weights.put(f"projected_local.mixers.{index}.qkv.weight", *(f"{x}_swa.{part}" for part in BRANCHES))
            weights.put(f"projected_local.mixers.{index}.output.weight", f"{x}_swa.o")
    weights.load(layer)
    x = golden.take("input/x").requires_grad_()
    layout = TokenLayout.contiguous(x.shape[1])
    y, cache = layer(x, layout, layer.new_cache())
    assert cache is not None and cache.state is not None
    y.backward(golden.take("input/cotangent"))
    outputs = {"output/y": y, "output/final_state": cache.state.transpose(2, 3), "grad/x": gradient(x)}
    return {**outputs, **dict(weights.gradients(layer))}


def _decay_after_the_write(patch: pytest.MonkeyPatch) -> None:
    right = operator.gated_delta

    def late(q: Tensor, k: Tensor, v: Tensor, decay_log: Tensor, beta: Tensor, **options: Any) -> Any:
        return right(q, k, v, F.pad(decay_log[:, :, 1:], (0, 1)), beta, **options)

    for module in (operator, mixer):
        patch.setattr(module, "gated_delta", late)
    patch.setitem(globals(), "gated_delta", late)


def _reads_at_full_scale(patch: pytest.MonkeyPatch) -> None:
    """The eps of the output norm is then that of reads which are not divided by sqrt(K)."""
    right = mixer.rms_norm

    def unscaled(x: Tensor, gain: Tensor, eps: float, *rest: Any) -> Tensor:
        return right(x, gain, eps / 8 if eps > 1e-5 else eps, *rest)

    patch.setattr(mixer, "rms_norm", unscaled)


def _taps_in_reverse(patch: pytest.MonkeyPatch) -> None:
    right = conv.causal_conv
    patch.setattr(conv, "causal_conv", lambda x, weight, *rest, **options: right(x, weight.flip(-1), *rest, **options))


def _one_window_less(patch: pytest.MonkeyPatch) -> None:
    right = local_swa.local_attention

    def shorter(*args: Any, window: int, **options: Any) -> Tensor:
        return right(*args, window=window - 1, **options)

    patch.setattr(local_swa, "local_attention", shorter)


def _branches_exchanged(patch: pytest.MonkeyPatch) -> None:
    right = Apart.forward

    def exchanged(self: Apart, x: Tensor, layout: TokenLayout, cache: Any = None, context: Any = None) -> Any:
        q, k, v = x.split(self.channels, dim=-1)
        y, following = right(self, torch.cat((k, q, v), dim=-1), layout, cache, context)
        q, k, v = y.split(self.channels, dim=-1)
        return torch.cat((k, q, v), dim=-1), following

    patch.setattr(Apart, "forward", exchanged)


ADAPTER = Adapter(
    claims={
        r"gated-delta-op(-.*)?": run_op,
        r"gdn-layer(-.*)?": run_layer,
        r"gdn-shortswa-(plain|residual)(-.*)?": run_short_swa,
    },
    mistakes=(
        Mistake("a decay behind the write", "gated-delta-op", _decay_after_the_write),
        Mistake("a decay behind the write", "gdn-layer", _decay_after_the_write),
        Mistake("reads that are not divided by sqrt(K)", "gdn-layer", _reads_at_full_scale),
        Mistake("taps in reverse", "gdn-layer", _taps_in_reverse),
        Mistake("a window of one token less", "gdn-shortswa-plain", _one_window_less),
        Mistake("a window of one token less", "gdn-shortswa-residual", _one_window_less),
        Mistake("the mixer of the keys for the queries", "gdn-shortswa-residual", _branches_exchanged),
    ),
)
