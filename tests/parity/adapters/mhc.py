"""Manifold-constrained Hyper-Connections: modules of transformers, lucidrains' package, its relatives and DepthBench."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from twoaxis.depth import MHCConfig, mhc
from twoaxis.depth import streams as depth_streams
from twoaxis.ops import stream_matrices
from twoaxis.ops.sinkhorn import Sinkhorn

from ..backbones import bare
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


def run_single_pass(golden: Golden) -> Mapping[str, Tensor]:
    """DeepSeek-V4.1, whose parameters have our layout and whose sublayers read with the weights of the one before."""
    config = golden.about["config"]
    depth = MHCConfig(preset="deepseek_v41", n_streams=config["n"], rounds=config["sinkhorn_iters"])
    model = bare.BareLM(golden, depth, config["rms_eps"])
    theirs = {f"mixers.{index}.{name}": f"sites.{index}.{name}" for index in range(len(model.mixers)) for name in NAMES}
    model.load_state_dict({ours: golden.take(f"param/{name}") for ours, name in theirs.items()})
    computed = model.computed()
    states = computed.pop("states")
    mixers: Any = model.mixers
    _, residual, write = mixers[1].weights(states[1][:-1])
    return {
        **computed,
        **bare.streams(states, depth.n_streams),
        **{f"output/pre_{index}": state[-1] for index, state in enumerate(states[1:])},
        "output/comb_1": residual.movedim((0, 1), (-2, -1)),
        "output/post_1": write.movedim(0, -1),
        **{f"grad/{name}": gradient(model.get_parameter(ours)) for ours, name in theirs.items()},
    }


Rows = Mapping[str, tuple[str, slice | list[int]]]
"""Their parameters by name: ours that holds the numbers, and which rows of it."""


class Relative:
    """A module whose parameters are rows of ours, some of them transposed, before a gain on the columns that we fold in."""

    def __init__(self, golden: Golden, depth: MHCConfig, eps: float, rows: Rows) -> None:
        self.golden, self.rows, self.model = golden, rows, bare.BareLM(golden, depth, eps)
        for index, mixer in enumerate(self.model.mixers):
            self._load(index, mixer)

    @torch.no_grad()
    def _load(self, index: int, mixer: Any) -> None:
        filled = set()
        for name, (ours, part) in self.rows.items():
            parameter, theirs = getattr(mixer, ours), self.golden.take(f"param/hc.{index}.{name}")
            parameter[part] = theirs.T if self._turned(name) else theirs.reshape(parameter[part].shape)
            filled |= {(ours, row) for row in torch.arange(len(parameter))[part].tolist()}
        assert filled == {(name, row) for name, p in mixer.named_parameters() for row in range(len(p))}
        if self.gain(index) is not None:
            mixer.fn.mul_(self.gain(index))

    def gain(self, index: int) -> Tensor | None:
        """What they multiply the normalised streams by."""
        name = f"param/hc.{index}.norm.gamma"
        return 1 + self.golden.take(name) if name in self.golden else None

    def _turned(self, name: str) -> bool:
        # They multiply streams from the left with some of their maps.
        return self.rows[name][0] == "fn" and self.golden.tensors[f"param/hc.0.{name}"].ndim == 2 and "weight" not in name

    def run(self) -> dict[str, Tensor]:
        """Everything stored."""
        n, computed = self.golden.about["config"]["n"], self.model.computed()
        states = computed.pop("states")
        mixers: Any = self.model.mixers
        _, residual, write = mixers[1].weights(states[1])
        mixed = torch.einsum("jibt,jbtd->btid", residual, torch.stack(states[1]))
        computed |= {
            "output/beta_1": write.movedim(0, -1),
            "output/mixed_1": mixed,
            "output/reduced": computed["output/collapsed"],
        }
        gradients = (pair for index, mixer in enumerate(mixers) for pair in self._gradients(index, mixer))
        return {**computed, **bare.streams(states, n), **dict(gradients)}

    def _gradients(self, index: int, mixer: Any) -> Iterator[tuple[str, Tensor]]:
        gain, by_fn = self.gain(index), gradient(mixer.fn)
        if gain is not None:
            yield f"grad/hc.{index}.norm.gamma", (by_fn * mixer.fn.detach() / gain).sum(0)
        for name, (ours, part) in self.rows.items():
            whole = by_fn if ours == "fn" else gradient(getattr(mixer, ours))
            found = (whole * gain if ours == "fn" and gain is not None else whole)[part]
            found = found.T if self._turned(name) else found
            yield f"grad/hc.{index}.{name}", found.reshape(self.golden.tensors[f"param/hc.0.{name}"].shape)


def run_relative(golden: Golden) -> Mapping[str, Tensor]:
    """mHC-lite and KromHC, with maps that are transposes of ours: reads and matrix together, and writes apart."""
    residual = {"lite": "permutations", "kromhc": "kronecker"}[golden.name.split("-")[1]]
    n = golden.about["config"]["n"]
    reads_and_matrix = [*range(n), *range(2 * n, golden.tensors["param/hc.0.static_alpha"].numel() + n)]
    rows: Rows = {
        "dynamic_alpha_fn": ("fn", reads_and_matrix),
        "dynamic_beta_fn": ("fn", slice(n, 2 * n)),
        "static_alpha": ("base", reads_and_matrix),
        "static_beta": ("base", slice(n, 2 * n)),
        "pre_branch_scale": ("scale", slice(0, 1)),
        "h_post_scale": ("scale", slice(1, 2)),
        "residual_scale": ("scale", slice(2, 3)),
    }
    depth = MHCConfig.from_data({"residual": residual, "n_streams": n})
    return Relative(golden, depth, golden.about["config"]["norm_eps"], rows).run()


def run_spectral(golden: Golden) -> Mapping[str, Tensor]:
    """sHC, whose maps are rows as ours; its constants are made by formula here."""
    n = golden.about["config"]["n"]
    reads, writes, matrix = slice(0, n), slice(n, 2 * n), slice(2 * n, None)
    rows = {
        "to_alpha_pre.weight": ("fn", reads),
        "to_beta.weight": ("fn", writes),
        "to_alpha_residual.weight": ("fn", matrix),
        "static_alpha_pre": ("base", reads),
        "static_beta": ("base", writes),
        "static_alpha_residual": ("base", matrix),
        **{name: ("scale", slice(place, place + 1)) for place, name in enumerate(SPECTRAL_SCALES)},
        "gamma_u": ("angle_bounds", slice(0, 1)),
        "gamma_v": ("angle_bounds", slice(1, 2)),
    }
    for name in golden.tensors:
        if name.startswith("buffer/"):
            golden.take(name)
    depth = MHCConfig(residual="spectral", n_streams=n)
    return Relative(golden, depth, golden.about["config"]["norm_eps"], rows).run()


SPECTRAL_SCALES = ("pre_branch_scale", "h_post_scale", "residual_rot_scale_u", "residual_rot_scale_v", "residual_val_scale")


def run_depthbench(golden: Golden) -> Mapping[str, Tensor]:
    """DepthBench's mHC, whose maps are transposes of ours, with a tanh and Sinkhorn on logarithms."""
    config = golden.about["config"]
    n = config["n"]
    rows = {}
    for place, (name, part) in enumerate({"pre": slice(0, n), "post": slice(n, 2 * n), "residual": slice(2 * n, None)}.items()):
        rows |= {f"{name}_dynamic_proj": ("fn", part), f"{name}_bias": ("base", part)}
        rows[f"{name}_gate"] = ("scale", slice(place, place + 1))
    options: dict[str, Any] = {"preset": "depthbench", "n_streams": n, "rounds": config["sinkhorn_iters"]}
    options |= {"norm_eps": config["rms_eps"]} | ({} if config["reduce"] == "sum" else {"read_out": config["reduce"]})
    return Relative(golden, MHCConfig.from_data(options), NORM_EPS, rows).run()


NORM_EPS = 1e-6
"""Of the norms of branches, where the fixture names it in words alone."""


def _matrix(change: Callable[..., Tensor]) -> Any:
    """Plants another matrix, made from what the right one is made from."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        right = stream_matrices.StreamMatrix.of
        patch.setattr(stream_matrices.StreamMatrix, "of", lambda self, *given: change(right, self, *given))

    return plant


def _transposed(patch: pytest.MonkeyPatch) -> None:
    _matrix(lambda right, self, *given: right(self, *given).transpose(0, 1))(patch)


def _other_order(patch: pytest.MonkeyPatch) -> None:
    right, turned = stream_matrices.sinkhorn, {"sources_first": "destinations_first", "destinations_first": "sources_first"}

    def turn(logits: Tensor, options: Sinkhorn, impl: Any) -> Tensor:
        return right(logits, replace(options, order=turned[options.order]), impl)

    patch.setattr(stream_matrices, "sinkhorn", turn)


def _other_factors(patch: pytest.MonkeyPatch) -> None:
    right = stream_matrices.kronecker_product
    turned = lambda logits: right(logits.unflatten(0, (-1, 2)).flip(0).flatten(0, 1))  # noqa: E731
    patch.setattr(stream_matrices, "kronecker_product", turned)


def _other_permutations(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stream_matrices, "_PERMUTATIONS", {n: [row[::-1] for row in t] for n, t in TABLES.items()})


TABLES = dict(stream_matrices._PERMUTATIONS)  # pyright: ignore[reportPrivateUsage]


def _one_rotation(patch: pytest.MonkeyPatch) -> None:
    right = stream_matrices.spectral_matrix
    patch.setattr(stream_matrices, "spectral_matrix", lambda angles, values: right(angles[::-1], values))


def _current(patch: pytest.MonkeyPatch) -> None:
    right = mhc.MHC.read

    def read(self: Any, state: Any, *given: Any) -> Any:
        return right(self, (*state[:-1], self.weights(state[:-1])[0].movedim(0, -1)), *given)

    patch.setattr(mhc.MHC, "read", read)


def _first_of_all(patch: pytest.MonkeyPatch) -> None:
    """A first read with the mean of the streams differs from that of stream 0 by the norm's eps alone, so twice as much."""
    right = mhc.MHCEnds.enter

    def enter(self: Any, *given: Any) -> Any:
        (*streams, read), cache = right(self, *given)
        return (*streams, torch.ones_like(read)), cache

    patch.setattr(mhc.MHCEnds, "enter", enter)


def _linear_scores(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(mhc.PRESETS, "depthbench", replace(mhc.PRESETS["depthbench"], coefficients="linear"))


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
        r"mhc-v41(-.*)?": run_single_pass,
        r"mix-(lite|kromhc)(-.*)?": run_relative,
        r"mix-shc(-.*)?": run_spectral,
        r"mhc-depthbench(-.*)?": run_depthbench,
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
        Mistake("a read with the current weights", "mhc-v41-iters20-f64", _current),
        Mistake("a first read of all streams", "mhc-v41-iters20-f64", _first_of_all),
        Mistake("the matrix transposed", "mhc-v41-iters2-f64", _transposed),
        Mistake("the other sum first", "mhc-v41-iters2-f64", _other_order),
        Mistake("a mean where the last sublayer reads", "mhc-v41-iters2-f64", _read_out_of("mean")),
        Mistake("the matrix transposed", "mix-lite-f64", _transposed),
        Mistake("permutations in another order", "mix-lite-f64", _other_permutations),
        Mistake("the last factor most significant", "mix-kromhc-f64", _other_factors),
        Mistake("the matrix transposed", "mix-shc-f64", _transposed),
        Mistake("the rotations exchanged", "mix-shc-f64", _one_rotation),
        Mistake("the matrix transposed", "mhc-depthbench-f64", _transposed),
        Mistake("no tanh", "mhc-depthbench-f64", _linear_scores),
    ),
)
