"""Gated residual: the module of transformers' Qwen4Exp around one tiny decoder."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from twoaxis.depth import GatedResidualConfig, gated_residual

from ..backbones.tinylm import TinyLM, streams
from ..golden import Golden, gradient
from . import Adapter, Mistake

NAMES = {
    "gain": "hc_norm.weight",
    "down": "input_mix_weight_down.weight",
    "up": "input_mix_weight_up.weight",
    "inject": "block_inject_weight.weight",
}


def run(golden: Golden) -> Mapping[str, Tensor]:
    """Every stream after every sublayer, and every stored gradient."""
    config = golden.about["config"]
    model = TinyLM(golden, GatedResidualConfig(n_streams=config["n"], rank=config["lowrank"]))
    owners = {"ends.gate": "head", **{f"mixers.{index}.gate": f"hc.{index}" for index in range(len(model.mixers))}}
    theirs = {ours: f"{owners[ours.rpartition('.')[0]]}.{NAMES[ours.rpartition('.')[2]]}" for ours in model.state_dict()}
    state = {ours: golden.take(f"param/{name}") for ours, name in theirs.items()}
    # They store the difference of a gain from 1.
    model.load_state_dict({ours: 1 + x.view(config["n"], -1) if ours.endswith("gain") else x for ours, x in state.items()})
    computed = model.run()
    for ours, name in theirs.items():
        computed[f"grad/{name}"] = gradient(model.get_parameter(ours)).reshape(state[ours].shape)
    return {**computed, **streams(computed.pop("states"))}


def _sum_of_streams(patch: pytest.MonkeyPatch) -> None:
    right = gated_residual.gated_read

    def of_the_sum(streams: tuple[Tensor, ...], gain: Tensor, down: Tensor, *rest: object) -> object:
        return right(streams, gain, len(streams) * down, *rest)  # type: ignore[arg-type]

    patch.setattr(gated_residual, "gated_read", of_the_sum)


def _one_gain(patch: pytest.MonkeyPatch) -> None:
    right = gated_residual.gated_read

    def unscaled(streams: tuple[Tensor, ...], gain: Tensor, *rest: object) -> object:
        return right(streams, gain * 0 + torch.ones_like(gain), *rest)  # type: ignore[arg-type]

    patch.setattr(gated_residual, "gated_read", unscaled)


ADAPTER = Adapter(
    claims={r"gatedres-qwen4exp(-.*)?": run},
    mistakes=(
        Mistake("the gate sees the sum over streams", "gatedres-qwen4exp-f64", _sum_of_streams),
        Mistake("no gain", "gatedres-qwen4exp-f64", _one_gain),
    ),
)
