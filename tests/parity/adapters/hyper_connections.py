"""Hyper-Connections around the branches of the tiny decoder: the paper's algorithm 2, lucidrains' package and DepthBench."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from twoaxis.depth import DepthConfig, HyperConnectionsConfig, hyper_connections
from twoaxis.depth import streams as depth_streams
from twoaxis.ops import hyper_read, streams

from ..backbones import bare, tinylm
from ..golden import Golden, gradient
from . import Adapter, Mistake


def run_paper(golden: Golden) -> Mapping[str, Tensor]:
    """LayerNorm without gain and bias, or static weights."""
    weights = "dynamic" if "param/hc.0.dynamic_beta_fn" in golden else "static"
    return run(golden, HyperConnectionsConfig(n_streams=golden.about["config"]["n"], weights=weights))


def run_lucidrains(golden: Golden) -> Mapping[str, Tensor]:
    """RMSNorm with a gain and no eps."""
    return run(golden, HyperConnectionsConfig(n_streams=golden.about["config"]["n"], norm="rms_gain"))


def run_depthbench(golden: Golden) -> Mapping[str, Tensor]:
    """RMSNorm without a gain, and a sum or mean of the streams."""
    config = golden.about["config"]
    options = {"preset": "depthbench", "rms_eps": config["rms_eps"], "n_streams": config["n"], "read_out": config["reduce"]}
    model = bare.BareLM(golden, HyperConnectionsConfig.from_data(options), 1e-6)
    _load(golden, model.mixers)
    computed = model.computed()
    states = computed.pop("states")
    return {**computed, **bare.streams(states, config["n"]), **_gradients(golden, model.mixers)}


def run(golden: Golden, depth: DepthConfig) -> Mapping[str, Tensor]:
    """The whole decoder: logits, the streams after every sublayer, every stored gradient."""
    model = tinylm.TinyLM(golden, depth)
    _load(golden, model.mixers)
    computed = model.run()
    return {**computed, **tinylm.streams(computed.pop("states")), **_gradients(golden, model.mixers)}


def _load(golden: Golden, mixers: Iterable[Any]) -> None:
    n, m = _pieces(golden)
    for index, mixer in enumerate(mixers):
        theirs = {name.replace("_proj", "_fn"): golden.take(f"param/hc.{index}.{name}") for name in _names(golden)}
        values = {ours: _to_ours(ours, theirs, n, m) for ours in _ours(theirs)}
        shapes = {name: parameter.shape for name, parameter in mixer.named_parameters()}
        mixer.load_state_dict({name: value.reshape(shapes[name]) for name, value in values.items()})


def _gradients(golden: Golden, mixers: Iterable[Any]) -> dict[str, Tensor]:
    found, (n, m) = {}, _pieces(golden)
    for index, mixer in enumerate(mixers):
        gradients = {name: gradient(parameter) for name, parameter in mixer.named_parameters()}
        for name in _names(golden):
            own = _to_theirs(name.replace("_proj", "_fn"), gradients, n, m)
            found[f"grad/hc.{index}.{name}"] = own.reshape(golden.tensors[f"param/hc.{index}.{name}"].shape)
    return found


def _pieces(golden: Golden) -> tuple[int, int]:
    return golden.about["config"]["n"], golden.about["config"].get("fracs", 1)


def _names(golden: Golden) -> list[str]:
    return [name.removeprefix("param/hc.0.") for name in golden.tensors if name.startswith("param/hc.0.")]


def _ours(theirs: Mapping[str, Tensor]) -> list[str]:
    names = ["read_weights", "residual_weights", "write_weights"]
    if "dynamic_beta_fn" in theirs:
        names += ["dynamic.maps", "dynamic.mixing_scale", "dynamic.write_scale"]
    return names + (["dynamic.gain"] if "norm.gamma" in theirs else [])


def _to_ours(ours: str, theirs: Mapping[str, Tensor], n: int, m: int) -> Tensor:
    """Their rows are (fraction, stream) and their columns (fraction, [read, streams]); ours are (stream, fraction)."""
    alpha = theirs["static_alpha"].view(m, n, m, n + 1).transpose(0, 1)
    if ours == "read_weights":
        return alpha[..., 0].reshape(n * m, m)
    if ours == "residual_weights":
        return alpha[..., 1:].transpose(-2, -1).reshape(n * m, n * m)
    if ours == "dynamic.maps":
        columns = theirs["dynamic_alpha_fn"].T.view(m, n + 1, -1)
        return torch.cat((columns[:, 0], columns[:, 1:].transpose(0, 1).flatten(0, 1), _rows(theirs["dynamic_beta_fn"], m)))
    if ours == "dynamic.gain":
        return theirs["norm.gamma"] + 1
    scales = {"dynamic.mixing_scale": "dynamic_alpha_scale", "dynamic.write_scale": "dynamic_beta_scale"}
    return theirs[scales.get(ours, "static_beta")]


def _to_theirs(name: str, ours: Mapping[str, Any], n: int, m: int) -> Tensor:
    """The gradient of their tensor, by the same places backwards."""
    if name == "static_alpha":
        read = ours["read_weights"].view(n, m, m, 1)
        residual = ours["residual_weights"].view(n, m, n, m).transpose(-2, -1)
        return torch.cat((read, residual), dim=-1).transpose(0, 1)
    if name in ("dynamic_alpha_fn", "dynamic_beta_fn"):
        read, residual, write = ours["dynamic.maps"].split((m, n * m, m))
        if name == "dynamic_beta_fn":
            return write.T
        return torch.cat((read.unsqueeze(1), residual.unflatten(0, (n, m)).transpose(0, 1)), dim=1).flatten(0, 1).T
    same = {"static_beta": "write_weights", "norm.gamma": "dynamic.gain"}
    same |= {"dynamic_alpha_scale": "dynamic.mixing_scale", "dynamic_beta_scale": "dynamic.write_scale"}
    return ours[same[name]]


def _rows(beta_fn: Tensor, m: int) -> Tensor:
    return beta_fn.view(-1, m).T


def mixing_planted(change: Callable[[Tensor, Tensor], tuple[Tensor | None, Tensor]]) -> Callable[[pytest.MonkeyPatch], None]:
    """Plants other weights between pieces, and of the update, in every write."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        right = depth_streams.mix_pieces

        def wrong(state: Any, update: Tensor, residual: Tensor, write: Tensor, *options: Any) -> Any:
            return right(state, update, *change(residual, write), *options)

        patch.setattr(depth_streams, "mix_pieces", wrong)

    return plant


transposed = mixing_planted(lambda residual, write: (residual.transpose(0, 1), write))
_unmixed = mixing_planted(lambda residual, write: (None, write + 0 * residual.sum(0)))
_written_unmixed = mixing_planted(lambda residual, write: (None, write))
"""The other version of DepthBench: updates are added to the streams as they were."""


def _without_tanh(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hyper_read, "_change", lambda scores, offset, rule: scores + offset.unsqueeze(-1))


def _read_out_by_mean(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(depth_streams.ParallelEnds, "leave", lambda self, state, *_: (streams.sum_streams(state) / len(state), None))


def _layer_norm(patch: pytest.MonkeyPatch) -> None:
    right: Any = hyper_read.hyper_read
    rule = hyper_read.ScoreRule("layer", 1e-8)
    patch.setattr(hyper_connections, "hyper_read", lambda *given: right(*given[:-2], rule, given[-1]))


ADAPTER = Adapter(
    claims={
        r"hc-(static|dynamic)-paper(-.*)?": run_paper,
        r"hc-dynamic-lucidrains(-.*)?": run_lucidrains,
        r"hc-depthbench(-.*)?": run_depthbench,
    },
    mistakes=(
        Mistake("rows as destinations", "hc-static-paper-f64", transposed),
        Mistake("streams that are never mixed", "hc-static-paper-f64", _unmixed),
        Mistake("a mean as read-out", "hc-static-paper-f64", _read_out_by_mean),
        Mistake("streams that are never mixed", "hc-dynamic-paper-f64", _unmixed),
        Mistake("no tanh", "hc-dynamic-paper-f64", _without_tanh),
        Mistake("rows as destinations", "hc-dynamic-lucidrains-f64", transposed),
        Mistake("no tanh", "hc-dynamic-lucidrains-f64", _without_tanh),
        Mistake("updates added to streams that are not mixed", "hc-depthbench-f64", _written_unmixed),
        Mistake("rows as destinations", "hc-depthbench-f64", transposed),
        Mistake("the mean taken off the streams", "hc-depthbench-f64", _layer_norm),
    ),
)
