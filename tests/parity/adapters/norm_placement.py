"""Norm placements, ResiDual and SiameseNorm: blocks of DepthBench, Mix-LN and the authors around one tiny decoder.

Its branches have no norm: those before them are as the sublayer of a decoder would have them, from what the depth mixer asks.
"""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

from twoaxis.core.position import SublayerPosition
from twoaxis.depth import (
    DepthConfig,
    NormPlacementConfig,
    ResidualDualConfig,
    SiameseNormConfig,
    norm_placement,
    residual_dual,
)
from twoaxis.depth.norm_placement import Form
from twoaxis.depth.residual_dual import ResidualDual, ResidualDualEnds
from twoaxis.depth.siamese_norm import SiameseNorm, SiameseNormEnds

from ..backbones.tinylm import TinyLM
from ..golden import Golden, gradient
from . import Adapter, Mistake

Names = dict[str, str]
"""Stored parameters by ours: `before.S` stands for the gain before a sublayer, `final` for the last one."""


class Bare(TinyLM):
    """The decoder with gains of its own."""

    def __init__(self, golden: Golden, depth: DepthConfig, names: Names) -> None:
        super().__init__(golden, depth)
        for tensor in self.body.values():
            tensor.requires_grad_()
        self.names = names
        self.gains = {ours: self._take(theirs) for ours, theirs in names.items() if ours not in self.state_dict()}
        self.load_state_dict({ours: self._take(theirs).detach() for ours, theirs in names.items() if ours not in self.gains})

    def _take(self, theirs: str) -> Tensor:
        return self.golden.take(f"param/{theirs}").requires_grad_()

    def rms(self, x: Tensor, gain: str) -> Tensor:
        eps = self.golden.about["config"].get("final_norm_eps", self.stack.norm_eps)
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * self.gains[gain]

    def context(self, index: int, x: Any) -> Tensor:
        slot = self.stack.sites[index].slot
        return x if slot.norm == "none" else slot.norm_scale * self.rms(x, f"before.{index}")

    def heads(self, block: int, name: str, x: Tensor) -> Tensor:
        return self.rms(x, f"{name}.{block}") if f"{name}.{block}" in self.gains else x

    def last(self, x: Tensor) -> Tensor:
        return self.rms(x, "final") if "final" in self.gains else x

    def computed(self) -> dict[str, Any]:
        """What the fixture stores, without states, which are `states`."""
        found = self.run()
        found["output/collapsed"] = self.last(found["output/collapsed"])
        parameters = {**self.gains, **dict(self.named_parameters())}
        found |= {f"grad/{theirs}": gradient(parameters[ours]) for ours, theirs in self.names.items()}
        return found | {f"grad/body.{name}": gradient(tensor) for name, tensor in self.body.items()}


AFFINE = {"gain": "weight", "bias": "bias"}
BEFORE, BEHIND = ("attention_norm", "feed_forward_norm"), ("post_attention_norm", "post_feed_forward_norm")
PLACEMENTS: Mapping[str, tuple[str, tuple[str, str], tuple[str, str]]] = {
    "sandwich": ("sandwich", BEFORE, BEHIND),
    "reordered": ("reordered", BEFORE, BEFORE),
    "lns": ("layer_scaling", BEFORE, BEFORE),
    "postln": ("post", BEFORE, BEFORE),
    "deepnorm": ("deepnorm", BEFORE, BEFORE),
    "keel": ("keel", BEFORE, BEHIND),
    "mixln": (
        "mix",
        ("input_layernorm", "post_attention_layernorm"),
        ("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
}
"""By the word of a fixture: the placement, and the names of norms before and behind attention and the feed-forward."""


def run_placement(golden: Golden) -> Mapping[str, Tensor]:
    """One stream; it is stored after every block."""
    placement, before, behind = PLACEMENTS[golden.name.split("-")[1]]
    config = golden.about["config"]
    options: dict[str, Any] = {"post_blocks": config["post_layers"]} if placement == "mix" else {}
    if placement == "deepnorm":
        assert config["norm"] == "LayerNorm"
        options = {"layer_eps": config["eps"]}
    depth = NormPlacementConfig.from_data({"placement": placement, **options})
    model = Bare(golden, depth, _placed(golden, before, behind))
    found = model.computed()
    states = found.pop("states")
    return {**found, **{f"output/hidden_{block}": state for block, state in enumerate(states[::2])}}


def _placed(golden: Golden, before: tuple[str, str], behind: tuple[str, str]) -> Names:
    names, post_blocks = {"final": "final_norm.weight"}, golden.about["config"].get("post_layers", 0)
    for index in range(2 * golden.about["config"]["blocks"]):
        unnormed = golden.name.split("-")[1] in ("reordered", "postln", "deepnorm") or index // 2 < post_blocks
        if not unnormed:
            names[f"before.{index}"] = f"blocks.{index // 2}.{before[index % 2]}.weight"
        if unnormed or behind == BEHIND:
            owner = f"blocks.{index // 2}.{behind[index % 2]}"
            stored = {f"mixers.{index}.{ours}": f"{owner}.{theirs}" for ours, theirs in AFFINE.items()}
            names |= {ours: theirs for ours, theirs in stored.items() if f"param/{theirs}" in golden}
    return names


def run_dual(golden: Golden) -> Mapping[str, Tensor]:
    """Both streams after every block, and no norm behind the end."""
    config = golden.about["config"]
    assert config["norm"] == "LayerNorm" and config["dec_res_input_norm_scale"] == config["dec_alpha"] == 1
    names = {f"ends.norm.{ours}": f"layer_norm.{theirs}" for ours, theirs in AFFINE.items()}
    for index in range(2 * config["blocks"]):
        owner = f"blocks.{index // 2}.{('self_attn', 'final')[index % 2]}_layer_norm"
        names |= {f"mixers.{index}.norm.{ours}": f"{owner}.{theirs}" for ours, theirs in AFFINE.items()}
    return _pairs(Bare(golden, ResidualDualConfig(layer_eps=config["eps"]), names), ("x", "res"))


def run_siamese(golden: Golden) -> Mapping[str, Tensor]:
    """Both streams after every block."""
    hybrid = "hybridpre" in golden.name
    names: Names = {}
    for index in range(2 * golden.about["config"]["blocks"]):
        mixer, before, theirs = f"mixers.{index}", f"before.{index}", f"blocks.{index // 2}"
        if not hybrid:
            one = index % 2 + 1
            names |= {
                f"{mixer}.x_gain": f"{theirs}.post_norm{one}.weight",
                f"{mixer}.y_gain": f"{theirs}.pre_norm{one}.weight",
                before: f"{theirs}.input_norm{one}.weight",
            }
        elif index % 2:
            names |= {
                f"{mixer}.x_gain": f"{theirs}.ff_norm.weight",
                f"{mixer}.y_gain": f"{theirs}.ff_y_norm.weight",
                before: f"{theirs}.ff_input_norm.weight",
            }
        else:
            names |= {f"{mixer}.x_gain": f"{theirs}.c1", f"{mixer}.input_gain": f"{theirs}.attn_y_norm.weight"}
            names |= {f"{name}.{index // 2}": f"{theirs}.{name}n.weight" for name in "qkv"}
    ends = ("ln_f", "ln_y_f", "ln_final_f") if hybrid else ("pre_norm", "post_norm", "final_norm")
    names |= {ours: f"{theirs}.weight" for ours, theirs in zip(("ends.x_gain", "ends.y_gain", "final"), ends, strict=True)}
    depth = SiameseNormConfig(form="hybrid_pre" if hybrid else "post_pre")
    return _pairs(Bare(golden, depth, names), ("x", "y"))


def _pairs(model: Bare, names: tuple[str, str]) -> Mapping[str, Tensor]:
    found = model.computed()
    for block, state in enumerate(found.pop("states")[::2]):
        found |= {f"output/{name}_{block}": stream for name, stream in zip(names, state, strict=True)}
    return found


Change = Callable[[Form, SublayerPosition], Any]


def _other_form(**changes: Change) -> Callable[[pytest.MonkeyPatch], None]:
    """Sublayers of another form, with the same parameters."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        right = NormPlacementConfig.form

        def form(self: NormPlacementConfig, site: SublayerPosition) -> Form:
            found = right(self, site)
            return found._replace(**{name: change(found, site) for name, change in changes.items()})

        patch.setattr(NormPlacementConfig, "form", form)

    return plant


def _norm_of(what: str) -> Callable[[pytest.MonkeyPatch], None]:
    return _other_form(after=lambda form, site: what if form.after != "none" else "none")


def _without_mean(patch: pytest.MonkeyPatch) -> None:
    """An RMSNorm with a gain and a bias in place of a LayerNorm."""

    def rms(x: Tensor, eps: float, impl: Any, gain: Tensor, bias: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gain + bias

    for module in (norm_placement, residual_dual):
        patch.setattr(module, "layer_norm", rms)


def _reads_the_sum(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ResidualDual, "read", lambda self, state, *_: (state[1], None, None))


def _sums_what_is_normalised(patch: pytest.MonkeyPatch) -> None:
    def write(self: ResidualDual, state: Any, update: Tensor, context: Any, carry: Any) -> Any:
        x = self.norm(state[0] + update)
        return x, state[1] + x

    patch.setattr(ResidualDual, "write", write)


def _forgets_the_stream(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ResidualDualEnds, "leave", lambda self, state, *_: (self.norm(state[1]), None))


def _share_by_sublayer(patch: pytest.MonkeyPatch) -> None:
    right = SiameseNorm.__init__

    def start(self: SiameseNorm, config: Any, site: SublayerPosition) -> None:
        right(self, config, site)
        self.share = (2 * (site.index + 1)) ** -0.5

    patch.setattr(SiameseNorm, "__init__", start)


def _norm_for_the_sublayer_alone(patch: pytest.MonkeyPatch) -> None:
    right = SiameseNorm.read
    patch.setattr(SiameseNorm, "read", lambda self, state, *_: (right(self, state)[0], state[0], None))


def _crossed_ends(patch: pytest.MonkeyPatch) -> None:
    right = SiameseNormEnds.leave
    patch.setattr(SiameseNormEnds, "leave", lambda self, state, *_: right(self, state[::-1]))


def _norm_before_every_sublayer(patch: pytest.MonkeyPatch) -> None:
    def context(self: Bare, index: int, x: Tensor) -> Tensor:
        return self.rms(x, f"before.{index}") if f"before.{index}" in self.gains else F.rms_norm(x, x.shape[-1:])

    patch.setattr(Bare, "context", context)


ADAPTER = Adapter(
    claims={
        r"norm-(sandwich|reordered|lns|postln|deepnorm|keel|mixln)-f64": run_placement,
        r"norm-residual-f64": run_dual,
        r"siamese-(postpre|hybridpre)-f64": run_siamese,
    },
    mistakes=(
        Mistake("no factor by depth", "norm-lns-f64", _other_form(before=lambda form, site: 1.0)),
        Mistake("a factor by sublayer", "norm-lns-f64", _other_form(before=lambda form, site: (site.index + 1) ** -0.5)),
        Mistake("blocks from 1", "norm-lns-f64", _other_form(before=lambda form, site: (site.block + 2) ** -0.5)),
        Mistake("L for 2 L", "norm-deepnorm-f64", _other_form(stream=lambda form, site: form.stream / 2**0.25)),
        Mistake("L for 2 L", "norm-keel-f64", _other_form(stream=lambda form, site: max(1.0, form.stream / 2))),
        Mistake("alpha in sublayer 1", "norm-keel-f64", _other_form(stream=lambda form, site: site.stack.n_sublayers)),
        Mistake("an RMSNorm with a bias", "norm-deepnorm-f64", _without_mean),
        Mistake("a norm of the sum", "norm-sandwich-f64", _norm_of("sum")),
        Mistake("a norm of the sum", "norm-reordered-f64", _norm_of("sum")),
        Mistake("a norm of the update", "norm-postln-f64", _norm_of("update")),
        Mistake("a norm of the update", "norm-mixln-f64", _norm_of("update")),
        Mistake("sublayers that read the sum", "norm-residual-f64", _reads_the_sum),
        Mistake("a sum of normalised streams", "norm-residual-f64", _sums_what_is_normalised),
        Mistake("an end without the stream", "norm-residual-f64", _forgets_the_stream),
        Mistake("an RMSNorm with a bias", "norm-residual-f64", _without_mean),
        Mistake("a share by sublayer", "siamese-postpre-f64", _share_by_sublayer),
        Mistake("a norm that the sublayer alone sees", "siamese-postpre-f64", _norm_for_the_sublayer_alone),
        Mistake("crossed norms at the end", "siamese-postpre-f64", _crossed_ends),
        Mistake("a share by sublayer", "siamese-hybridpre-f64", _share_by_sublayer),
        Mistake("a norm before attention", "siamese-hybridpre-f64", _norm_before_every_sublayer),
    ),
)
