"""Manifold-constrained Hyper-Connections: the modules of transformers and of lucidrains' package around one tiny decoder."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from twoaxis.depth import MHCConfig, mhc
from twoaxis.depth import streams as depth_streams
from twoaxis.ops.sinkhorn import Sinkhorn

from ..backbones.tinylm import TinyLM, streams
from ..golden import Golden, gradient
from . import Adapter, Mistake

LUCIDRAINS_LOG = "{'log_domain_sinkhorn': True}"


def run_joint(golden: Golden) -> Mapping[str, Tensor]:
    """DeepSeek-V4, GLM5-next and HY-V4, whose parameters have our layout."""
    preset = {"deepseekv4": "deepseek_v4", "glm5next": "glm5", "hyv4": "hy_v4"}[golden.name.split("-")[1]]
    rounds = {"rounds": golden.about["config"]["sinkhorn_iters"]} if preset != "hy_v4" else {}
    model = TinyLM(golden, MHCConfig.from_data({"preset": preset, "n_streams": golden.about["config"]["n"], **rounds}))
    theirs = {f"mixers.{index}.{name}": f"hc.{index}.{name}" for index in range(len(model.mixers)) for name in NAMES}
    if "param/head.hc_fn" in golden:
        theirs |= {f"ends.{name}": f"head.hc_{name}" for name in NAMES}
    model.load_state_dict({ours: golden.take(f"param/{name}") for ours, name in theirs.items()})
    computed = model.run()
    gradients = {f"grad/{name}": gradient(model.get_parameter(ours)) for ours, name in theirs.items()}
    return {**computed, **streams(computed.pop("states")), **gradients}


NAMES = ("fn", "base", "scale")


def run_per_stream(golden: Golden) -> Mapping[str, Tensor]:
    """Both modules of lucidrains' package, whose maps are the transpose of ours and apart for reads and writes."""
    version, log = golden.name.split("-")[2], LUCIDRAINS_LOG in golden.about["reference"]
    options: dict[str, Any] = {"start": "log"} if log else {}
    rounds = golden.about["config"].get("sinkhorn_iters", 20)
    options |= {"preset": f"lucidrains_{version}", "rounds": rounds, "n_streams": golden.about["config"]["n"]}
    model = TinyLM(golden, MHCConfig.from_data(options))
    state: dict[str, Tensor] = {}
    for index in range(len(model.mixers)):
        alpha, beta, gamma, base, post, *scales = (golden.take(f"param/hc.{index}.{name}") for name in LUCIDRAINS)
        state |= {
            f"mixers.{index}.fn": torch.cat((alpha[0].T[:1], beta.reshape(1, -1), alpha[0].T[1:])),
            f"mixers.{index}.gain": 1 + gamma,
            f"mixers.{index}.base": torch.cat((base[:, :1], post.reshape(-1, 1), base[:, 1:]), dim=1),
            f"mixers.{index}.scale": torch.stack([scale.reshape(()) for scale in scales]),
        }
    model.load_state_dict(state)
    computed = model.run()
    for index in range(len(model.mixers)):
        fn, gain, base, scale = (
            gradient(model.get_parameter(f"mixers.{index}.{name}")) for name in ("fn", "gain", "base", "scale")
        )
        alpha = torch.cat((fn[:1], fn[2:])).T.unsqueeze(0)
        found = (alpha, fn[1], gain, torch.cat((base[:, :1], base[:, 2:]), dim=1), base[:, 1], *scale)
        for name, one in zip(LUCIDRAINS, found, strict=True):
            computed[f"grad/hc.{index}.{name}"] = one.reshape(golden.tensors[f"param/hc.{index}.{name}"].shape)
    return {**computed, **streams(computed.pop("states"))}


LUCIDRAINS = (
    "dynamic_alpha_fn",
    "dynamic_beta_fn",
    "norm.gamma",
    "static_alpha",
    "static_beta",
    "pre_branch_scale",
    "h_post_scale",
    "residual_scale",
)


def _transposed(patch: pytest.MonkeyPatch) -> None:
    right = mhc.sinkhorn
    patch.setattr(mhc, "sinkhorn", lambda logits, options, impl: right(logits, options, impl).transpose(0, 1))


def _other_order(patch: pytest.MonkeyPatch) -> None:
    right, turned = mhc.sinkhorn, {"sources_first": "destinations_first", "destinations_first": "sources_first"}

    def turn(logits: Tensor, options: Sinkhorn, impl: Any) -> Tensor:
        return right(logits, replace(options, order=turned[options.order]), impl)

    patch.setattr(mhc, "sinkhorn", turn)


def _unmixed(patch: pytest.MonkeyPatch) -> None:
    right = depth_streams.mix_pieces
    patch.setattr(depth_streams, "mix_pieces", lambda state, update, residual, *rest: right(state, update, None, *rest))


def _read_out_of(name: str) -> Any:
    def plant(patch: pytest.MonkeyPatch) -> None:
        for preset in mhc.PRESETS:
            patch.setitem(mhc.PRESETS, preset, replace(mhc.PRESETS[preset], read_out=name))

    return plant


def _no_write_eps(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(mhc.PRESETS, "hy_v4", replace(mhc.PRESETS["hy_v4"], write_eps=0.0))


ADAPTER = Adapter(
    claims={
        r"(mhc-deepseekv4|mhc-glm5next|ihc-hyv4)(-.*)?": run_joint,
        r"mhc-lucidrains-v[12](-.*)?": run_per_stream,
    },
    mistakes=(
        Mistake("the matrix transposed", "mhc-deepseekv4-iters20-f64", _transposed),
        Mistake("the matrix transposed", "mhc-deepseekv4-iters2-f64", _transposed),
        Mistake("the matrix transposed", "mhc-lucidrains-v2-f64", _transposed),
        Mistake("the other sum first", "mhc-deepseekv4-iters2-f64", _other_order),
        Mistake("the other sum first", "mhc-lucidrains-v2-iters2-f64", _other_order),
        Mistake("the matrix computed but not applied", "mhc-lucidrains-v1-f64", _unmixed),
        Mistake("a sum where the mean is read", "mhc-glm5next-f64", _read_out_of("sum")),
        Mistake("no eps on the write weights", "ihc-hyv4-f64", _no_write_eps),
    ),
)
