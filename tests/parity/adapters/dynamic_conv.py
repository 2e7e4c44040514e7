"""Dynamic short convolution: the reference of its paper, and the static and dynamic forms of Inkling and Inkling-2."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from twoaxis.core.layout import TokenLayout
from twoaxis.core.position import LayerStack, SublayerPosition
from twoaxis.local import CanonConfig, DynamicConvConfig, LocalMixer, dynamic_conv
from twoaxis.local.dynamic_conv import DynamicConv
from twoaxis.ops.token_taps import low_rank_conv, per_head_conv

from ..golden import Golden
from . import Adapter, Mistake
from .canon import oldest_tap_last


def site(d_model: int) -> SublayerPosition:
    """A sublayer whose context has this width."""
    return LayerStack(d_model, 1e-6, (1,)).sites[0]


def mixed(mixer: LocalMixer, x: Tensor, context: Tensor | None = None) -> Tensor:
    """What a mixer makes of rows of one document."""
    return mixer(x, TokenLayout.contiguous(x.shape[1]), None, context)[0]


def run_op(golden: Golden) -> Mapping[str, Tensor]:
    """Taps and factors are given, so the maps from the context to them are identities."""
    config, cotangent = golden.about["config"], golden.take("input/cotangent")
    D, H, R, W = (config[name] for name in ("D", "heads", "rank", "W"))
    x, weight, z = (golden.take(f"input/{name}").requires_grad_() for name in ("x", "weight", "z"))
    static, up = golden.take("param/static_w"), golden.take("param/U")
    heads = DynamicConvConfig(kernel=W, taps="per_head", head_dim=D // H).build(D, site(H * W)).double()
    low_rank = DynamicConvConfig(kernel=W, rank=R).build(D, site(R)).double()
    plain = DynamicConvConfig(kernel=W, rank=R, form="plain").build(D, site(R)).double()
    with torch.no_grad():
        heads.heads.weight.copy_(torch.eye(H * W))
        for one in (low_rank, plain):
            one.factors.weight.copy_(torch.eye(R))
            one.up.copy_(up.view(R, W, D).transpose(0, 1))
        for one in (heads, low_rank):
            one.static.copy_(static)
        plain.static.zero_()

    def gradients(y: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad((y * cotangent).sum(), of)

    by_head, by_rank = mixed(heads, x, weight.flatten(2)), mixed(low_rank, x, z)
    of_heads = gradients(by_head, x, weight, heads.static)
    of_rank = gradients(by_rank, x, z, low_rank.static, low_rank.up)
    return {
        "output/y_headwise": by_head,
        "output/y_lowrank": by_rank,
        "output/y_lowrank_plain": mixed(plain, x, z),
        **dict(zip((f"grad/{name}_headwise" for name in ("x", "weight", "static_w")), of_heads, strict=True)),
        **dict(zip((f"grad/{name}_lowrank" for name in ("x", "z", "static_w")), of_rank[:3], strict=True)),
        "grad/U_lowrank": of_rank[3].transpose(0, 1).reshape(up.shape),
    }


def run_inkling(golden: Golden) -> Mapping[str, Tensor]:
    """One static convolution with and without a scale, and one whose taps come from the context."""
    config, cotangent = golden.about["config"], golden.take("input/cotangent")
    k, K, C = config["conv_kernel_size"], config["head_dim"], config["kv_heads"] * config["head_dim"]
    u, x = (golden.take(f"input/{name}").requires_grad_() for name in ("u", "x"))
    place, taps = site(config["d"]), golden.take("param/static.conv1d.weight")
    static = CanonConfig(kernel=k).build(C, place).double()
    scaled = CanonConfig(kernel=k, scale="unit_variance").build(C, place).double()
    options: dict[str, Any] = {"taps": "per_head", "head_dim": K, "scale": "unit_variance", "static_init": "zero"}
    dynamic = DynamicConvConfig(kernel=k, **options).build(C, place).double()
    with torch.no_grad():
        for one in (static, scaled):
            one.weight.copy_(taps.squeeze(1))
        dynamic.static.copy_(golden.take("param/dynamic.static_weight"))
        dynamic.heads.weight.copy_(golden.take("param/dynamic.weight_proj.weight"))
    y_static, y_dynamic = mixed(static, u, x), mixed(dynamic, u, x)
    of_static = torch.autograd.grad((y_static * cotangent).sum(), (u, static.weight))
    of_dynamic = torch.autograd.grad((y_dynamic * cotangent).sum(), (u, x, dynamic.static, dynamic.heads.weight))
    names = ("u", "x", "dynamic.static_weight", "dynamic.weight_proj.weight")
    return {
        "output/y_static": y_static,
        "output/y_static_inkling2": mixed(scaled, u, x),
        "output/y_dynamic": y_dynamic,
        "grad/u_static": of_static[0],
        "grad/static.conv1d.weight_static": of_static[1].unsqueeze(1),
        **{f"grad/{name}_dynamic": found for name, found in zip(names, of_dynamic, strict=True)},
    }


def _oldest_tap_first(patch: pytest.MonkeyPatch) -> None:
    def flipped(right: Any, given: int) -> Any:
        def run(x: Tensor, *taps: Tensor, **options: Any) -> Tensor:
            turned = [one.flip(-1 if one.ndim == 4 else 0) if index >= given else one for index, one in enumerate(taps)]
            return right(x, *turned, **options)

        return run

    patch.setattr(dynamic_conv, "low_rank_conv", flipped(low_rank_conv, 1))
    patch.setattr(dynamic_conv, "per_head_conv", flipped(per_head_conv, 0))


def _channels_in_the_context(patch: pytest.MonkeyPatch) -> None:
    right = DynamicConv.forward

    def alone(self: DynamicConv, x: Tensor, layout: TokenLayout, cache: Any = None, context: Any = None) -> Any:
        return right(self, x, layout, cache, context + x[..., : context.shape[-1]].mean(-1, keepdim=True))

    patch.setattr(DynamicConv, "forward", alone)


def _tap_major_heads(patch: pytest.MonkeyPatch) -> None:
    def turned(x: Tensor, taps: Tensor, *given: Tensor, **options: Any) -> Tensor:
        return per_head_conv(x, taps.transpose(2, 3).reshape(taps.shape), *given, **options)

    patch.setattr(dynamic_conv, "per_head_conv", turned)


def _scale_without_the_input(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DynamicConvConfig, "factor", property(lambda config: (2 * config.kernel) ** -0.5))


ADAPTER = Adapter(
    claims={r"dynamic-conv-op.*": run_op, r"shortconv-inkling.*": run_inkling},
    mistakes=(
        Mistake("taps in the order of a convolution", "dynamic-conv-op", _oldest_tap_first),
        Mistake("taps that depend on the channels too", "dynamic-conv-op", _channels_in_the_context),
        Mistake("taps of all heads side by side", "dynamic-conv-op", _tap_major_heads),
        Mistake("taps in the order of a convolution", "shortconv-inkling", _oldest_tap_first),
        Mistake("taps of all heads side by side", "shortconv-inkling", _tap_major_heads),
        Mistake("a scale without the input", "shortconv-inkling", _scale_without_the_input),
        Mistake("static taps from the newest to the oldest token", "shortconv-inkling", oldest_tap_last),
    ),
)
