"""KV shift: the paper's attention, and the shifted projection of the Deep Delta Learning repository."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from twoaxis.core.layout import TokenLayout
from twoaxis.core.position import LayerStack
from twoaxis.sequence import KVShiftConfig, kv_shift

from ..golden import Golden, gradient
from ..weights import Weights
from . import Adapter, Mistake


def run_paper(golden: Golden) -> Mapping[str, Tensor]:
    """One attention layer with fixed numbers per kv-head."""
    config = golden.about["config"]
    head_dim = golden.tensors["param/q_proj.weight"].shape[0] // config["H"]
    sizes = {"n_heads": config["H"], "n_kv_heads": config["kv"], "head_dim": head_dim, "rope_theta": config["rope_theta"]}
    layer = KVShiftConfig(**sizes).build(LayerStack(config["d"], 1e-6, (1,)).sites[0])
    weights = Weights(golden)
    weights.put("qkv.weight", *(f"{x}_proj.weight" for x in "qkv"))
    weights.put("output.weight", "o_proj.weight")
    weights.put("shift", "K", "V")
    weights.load(layer)
    x = golden.take("input/x").requires_grad_()
    layout = TokenLayout.contiguous(x.shape[1])
    heads, _ = layer.project(x, layout)
    y, _ = layer(x, layout)
    y.backward(golden.take("input/cotangent"))
    return {
        "output/k_shifted_before_rope": heads.k,
        "output/v_shifted": heads.v,
        "output/y": y,
        "grad/x": gradient(x),
        **dict(weights.gradients(layer)),
    }


def run_shift_linear(golden: Golden) -> Mapping[str, Tensor]:
    """One shifted projection: that of our values, with gates from the token."""
    config = golden.about["config"]
    layer = (
        KVShiftConfig(n_heads=config["num_heads"], form="token").build(LayerStack(config["d"], 1e-6, (1,)).sites[0]).double()
    )
    projection, gates = (golden.take(f"param/{name}.weight") for name in ("linear", "shift_proj"))
    with torch.no_grad():
        layer.qkv.weight.copy_(torch.cat((projection, projection, projection)))
        layer.shift_weight.copy_(torch.cat((torch.zeros_like(gates), gates)))
    x = golden.take("input/x").requires_grad_()
    heads, _ = layer.project(x, TokenLayout.contiguous(x.shape[1]))
    y = heads.v.flatten(2)
    grad_x, grad_linear, grad_gates = torch.autograd.grad(
        (y * golden.take("input/cotangent")).sum(), (x, layer.qkv.weight, layer.shift_weight)
    )
    return {
        "output/y": y,
        "grad/x": grad_x,
        "grad/linear.weight": grad_linear[2 * config["d"] :],
        "grad/shift_proj.weight": grad_gates[config["num_heads"] :],
    }


def _the_token_itself(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kv_shift, "previous_token", lambda x, *_: x)


def _next_token(patch: pytest.MonkeyPatch) -> None:
    def following(x: Tensor, *_: Any) -> Tensor:
        return x.roll(-1, dims=1)

    patch.setattr(kv_shift, "previous_token", following)


ADAPTER = Adapter(
    claims={r"kvshift-paper-op.*": run_paper, r"kvshift-op.*": run_shift_linear},
    mistakes=(
        Mistake("the token itself for the one before", "kvshift-paper-op", _the_token_itself),
        Mistake("the next token", "kvshift-op", _next_token),
    ),
)
