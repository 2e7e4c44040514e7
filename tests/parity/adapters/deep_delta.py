"""Deep Delta Learning: the authors' decoders, with one value channel and with several.

Names that end in `papertarget` are their code with one line patched: the target of their text, which their code does not offer.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from twoaxis.checkpoints.layouts import StateMap, state_map
from twoaxis.depth import DeepDelta, DeepDeltaConfig, deep_delta, delta_gate, value_channels
from twoaxis.feed_forward import SwiGLUConfig
from twoaxis.model import Decoder, DecoderConfig, block
from twoaxis.sequence import AttentionConfig, heads

from ..golden import Golden
from ..trace import logits_and_gradients, states
from ..weights import Weights
from . import Adapter, Mistake

WRITE_ONLY_PATCH = "'(beta * (v - proj))' -> '(beta * (v))'"
PAPER_PATCH = "one line: v = v_proj(x_in) -> v = v_proj.weight @ context (no bias), and ddl_v_sigmoid=False"
OF_THE_CODE: Mapping[str, Any] = {
    "ddl_v_sigmoid_scale": 4.0,
    "rms_eps": 1e-5,
    "rope_base": 10000.0,
    "tied_embeddings": True,
}
"""The defaults of the code, where a fixture leaves them to its description."""
NAMES = {"input/cotangent": "input/cotangent_logits", "grad/input_embeddings": "grad/input_embeds"}
"""What the runner calls the tensors that the fixtures of the paper's target name otherwise."""


def run(golden: Golden) -> Mapping[str, Tensor]:
    """The whole decoder of one channel: logits, the state after every sublayer, every stored gradient."""
    model, computed = _run(golden)
    for index, state in enumerate(states(model, golden)):
        block, inside = divmod(index, 2)
        names = [f"after_attn_{block + 1}"] if inside else [f"state_{block}", f"hidden_{block}"]
        computed.update({f"output/{name}": state for name in names})
    return computed


def run_channels(golden: Golden) -> Mapping[str, Tensor]:
    """The whole decoder of several channels, and what its readout makes of every state between blocks."""
    model, computed = _run(golden)
    for index, state in enumerate(states(model, golden)):
        block, inside = divmod(index, 2)
        computed[f"output/after_attn_{block + 1}" if inside else f"output/state_{block}"] = torch.stack(state, dim=-1)
        if not inside and index:
            computed[f"output/hidden_{block}"] = model.ends.leave(state)[0]
    computed["output/hidden_0"] = model.embed(golden.take("input/input_ids"))
    return computed


def _run(golden: Golden) -> tuple[Decoder, dict[str, Tensor]]:
    weights = Weights(golden)
    model = Decoder(_config(golden))
    weights.follow(_layout(model.config))
    weights.load(model)
    return model, {**logits_and_gradients(model, golden), **dict(weights.gradients(model))}


def run_paper_target(golden: Golden) -> Mapping[str, Tensor]:
    """The same decoders with the target of the paper."""
    renamed = Golden(golden.name, golden.about, {NAMES.get(name, name): tensor for name, tensor in golden.tensors.items()})
    model, computed = _run(renamed)
    for index, state in enumerate(list(states(model, renamed))[::2]):
        computed[f"output/state_{index}"] = torch.stack(state, dim=-1) if isinstance(state, tuple) else state
    head_dim = golden.about["config"]["head_dim"]
    frequencies = OF_THE_CODE["rope_base"] ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    for name in golden.tensors:
        if name.startswith("buffer/"):
            # What the rotation of the fixture was; ours computes it from the base.
            torch.testing.assert_close(renamed.take(name), frequencies, rtol=1e-7, atol=0)
    golden.taken.update({theirs for theirs, ours in NAMES.items() if ours in renamed.taken}, renamed.taken)
    return {**computed, "grad/input_embeddings": computed["grad/input_embeds"]}


def _layout(config: DecoderConfig) -> StateMap:
    """The layout of the released code; with the target of the paper it has no biases of targets."""
    depth = config.depth
    assert isinstance(depth, DeepDeltaConfig)
    released = depth.replace(value_target="code") if depth.value_target == "paper" else depth
    whole = state_map("deep_delta", config.replace(depth=released))
    if depth is released:
        return whole
    return dataclasses.replace(whole, entries=tuple(e for e in whole.entries if not e.ours.endswith("target_bias")))


def _config(golden: Golden) -> DecoderConfig:
    config, defaults = golden.about["config"], golden.about.get("defaults_in_force", OF_THE_CODE)
    assert defaults["ddl_v_sigmoid_scale"] == deep_delta.TARGET_SCALE
    attention = AttentionConfig(
        n_heads=config["num_attention_heads"],
        head_dim=config["head_dim"],
        rope_theta=defaults["rope_base"],
        qk_norm="after_rope",
    )
    d_ff = golden.tensors["param/transformer.h.0.mlp.c_proj.weight"].shape[1]
    return DecoderConfig(
        vocab_size=config["vocab_size"],
        d_model=config["hidden_size"],
        n_layers=config["num_hidden_layers"],
        norm_eps=defaults["rms_eps"],
        tie_embeddings=defaults["tied_embeddings"],
        depth=_depth(golden, config, defaults),
        blocks=((attention, SwiGLUConfig(d_ff=d_ff)),),
    )


def _depth(golden: Golden, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> DeepDeltaConfig:
    patch = golden.about["patch"]
    assert patch is None or patch.startswith((WRITE_ONLY_PATCH, PAPER_PATCH)), f"{golden.name}: unknown patch {patch}"
    paper = patch is not None and patch.startswith(PAPER_PATCH)
    channels: Mapping[str, Any] = {}
    if "param/readout.read" in golden:
        convolutions = ("param/readout.shortconv.weight", "param/input_embed.conv.weight")
        time, expansion = (golden.tensors[name] if name in golden else None for name in convolutions)
        # We have one length for both convolutions.
        kernels = {taps.shape[-1] for taps in (time, expansion) if taps is not None}
        assert len(kernels) <= 1, f"{golden.name}: convolutions of {sorted(kernels)} taps in one model"
        channels = {
            "value_channels": golden.tensors["param/readout.read"].numel(),
            "compressor": "channel" if time is None else "time",
            "expansion": "repeat" if expansion is None else "embedding_conv",
            **({"kernel_size": kernels.pop()} if kernels else {}),
        }
    return DeepDeltaConfig(
        **channels,
        value_target="paper" if paper else "code" if config.get("ddl_v_sigmoid", True) else "code_linear",
        gate="linear" if config.get("ddl_beta_single_linear", True) else "two_layer",
        gate_width=config.get("ddl_beta_hidden_size", 128),
        update_rule="delta" if patch is None or paper else "write_only",
        direction_eps=config["ddl_k_eps"] if "ddl_k_eps" in config else defaults["ddl_k_eps"],
    )


def _target_from_context(patch: pytest.MonkeyPatch) -> None:
    right = DeepDelta.target
    patch.setattr(DeepDelta, "target", lambda self, state, context: right(self, context, context))


def _target_from_state(patch: pytest.MonkeyPatch) -> None:
    right = DeepDelta.target
    patch.setattr(DeepDelta, "target", lambda self, state, context: right(self, state, state))


def _squashed_target(patch: pytest.MonkeyPatch) -> None:
    right = DeepDelta.target
    patch.setattr(DeepDelta, "target", lambda self, state, context: 4 * torch.sigmoid(right(self, state, context)))


def _eps_of_our_default(patch: pytest.MonkeyPatch) -> None:
    right = block.RMSNorm.forward

    def forward(self: block.RMSNorm, x: Tensor) -> Tensor:
        self.eps = 1e-6
        return right(self, x)

    patch.setattr(block.RMSNorm, "forward", forward)


def _adds_without_erasing(patch: pytest.MonkeyPatch) -> None:
    right = deep_delta.delta_write
    patch.setattr(deep_delta, "delta_write", lambda x, u, v, beta, eps, rule, impl: right(x, u, v, beta, eps, "write_only"))


def _erases(patch: pytest.MonkeyPatch) -> None:
    right = deep_delta.delta_write
    patch.setattr(deep_delta, "delta_write", lambda x, u, v, beta, eps, rule, impl: right(x, u, v, beta, eps, "delta"))


def _channels_add_without_erasing(patch: pytest.MonkeyPatch) -> None:
    right = deep_delta.delta_writes
    patch.setattr(deep_delta, "delta_writes", lambda x, u, v, beta, eps, rule, impl: right(x, u, v, beta, eps, "write_only"))


def _channels_erase(patch: pytest.MonkeyPatch) -> None:
    right = deep_delta.delta_writes
    patch.setattr(deep_delta, "delta_writes", lambda x, u, v, beta, eps, rule, impl: right(x, u, v, beta, eps, "delta"))


def _first_tap_is_current(patch: pytest.MonkeyPatch) -> None:
    right = value_channels.causal_conv_sum
    patch.setattr(value_channels, "causal_conv_sum", lambda x, weights, **rest: right(x, weights.flip(-1), **rest))


def _embeddings_without_past(patch: pytest.MonkeyPatch) -> None:
    def convolve(x: Tensor, weight: Tensor, **rest: Any) -> Tensor:
        return x * weight[:, -1]

    patch.setattr(value_channels, "causal_conv", convolve)


def _padded_on_the_other_side(patch: pytest.MonkeyPatch) -> None:
    right = value_channels._channel_weights
    patch.setattr(value_channels, "_channel_weights", lambda weight, read, dtype: right(weight, read, dtype).roll(1, 0))


def _half_gate(patch: pytest.MonkeyPatch) -> None:
    right = delta_gate.Gate.forward
    patch.setattr(delta_gate.Gate, "forward", lambda self, context: right(self, context) / 2)


def _norm_before_rotation(patch: pytest.MonkeyPatch) -> None:
    right = heads.SoftmaxAttention._before_rotation

    def before_rotation(self: heads.SoftmaxAttention, *args: Any) -> Any:
        self.config = self.config.replace(qk_norm="before_rope")
        return right(self, *args)

    patch.setattr(heads.SoftmaxAttention, "_before_rotation", before_rotation)


ADAPTER = Adapter(
    claims={
        r"ddl-(vdim1|cc-ec)-papertarget(-.*)?": run_paper_target,
        r"ddl-vdim1(-.*)?": run,
        r"ddl-(tc|cc)(-.*)?": run_channels,
    },
    mistakes=(
        Mistake("the target from the normalised context", "ddl-vdim1", _target_from_context),
        Mistake("the target from the normalised context", "ddl-vdim1-twolayerbeta", _target_from_context),
        Mistake("writes without erasing", "ddl-vdim1", _adds_without_erasing),
        Mistake("erases in the write-only control", "ddl-vdim1-writeonly", _erases),
        Mistake("a gate in (0, 1)", "ddl-vdim1-twolayerbeta", _half_gate),
        Mistake("the first tap for the current token", "ddl-tc", _first_tap_is_current),
        Mistake("an embedding convolution that sees no earlier token", "ddl-tc-ec", _embeddings_without_past),
        Mistake("channels padded on the other side", "ddl-cc", _padded_on_the_other_side),
        Mistake("the targets from the normalised context", "ddl-cc-ec", _target_from_context),
        Mistake("writes channels without erasing", "ddl-cc-ec", _channels_add_without_erasing),
        Mistake("erases channels in the write-only control", "ddl-cc-ec-writeonly", _channels_erase),
        Mistake("the target from the un-normalised input", "ddl-vdim1-papertarget", _target_from_state),
        Mistake("a target in (0, 4)", "ddl-cc-ec-papertarget", _squashed_target),
        Mistake("erases nothing of the channels", "ddl-cc-ec-papertarget", _channels_add_without_erasing),
        Mistake("norms with an eps of 1e-6", "ddl-vdim1-papertarget", _eps_of_our_default),
        Mistake("norm of queries and keys before the rotation", "ddl-vdim1", _norm_before_rotation),
    ),
)
