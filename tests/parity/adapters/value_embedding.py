"""Value embeddings, with the residual scalars beside them: the whole model of nanochat.

Its embedding is smeared over tokens before the stack, and its logits have a soft cap; both are done here.
"""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from twoaxis.checkpoints.layouts import sublayer_paths
from twoaxis.core.layout import TokenLayout
from twoaxis.core.parameters import declarations
from twoaxis.depth import DEPTH, residual_scalars, value_embedding
from twoaxis.depth.residual_scalars import ResidualScalars, ResidualScalarsConfig, StreamAndEmbedding
from twoaxis.depth.value_embedding import ValueEmbedding
from twoaxis.feed_forward import ReLU2Config
from twoaxis.model import Decoder, DecoderConfig
from twoaxis.ops.rope import shared_key
from twoaxis.sequence import AttentionConfig

from ..golden import Golden, gradient
from ..weights import Weights
from . import Adapter, Mistake

SMEAR_CHANNELS, HEAD_GAIN = 24, 1.2
SCALARS = {"stream_weight": "resid_lambdas", "embedding_weight": "x0_lambdas"}


def run(golden: Golden) -> Mapping[str, Tensor]:
    """The whole model: its published scalars, the stream after each block, logits, every gradient."""
    config = decoder_config(golden)
    model, weights = Decoder(config), Weights(golden)
    starts = {name: declared.init for name, _, declared in declarations(model)}
    stream = {index: path_of_stream(model, index) for index in range(config.n_layers)}
    place(weights, model, golden, stream)
    computed = {**forward(model, golden), **dict(weights.gradients(model))}
    for ours, theirs in SCALARS.items():
        names = [f"{stream[index]}.{ours}" for index in range(config.n_layers)]
        computed[f"grad/{theirs}"] = torch.cat([gradient(model.get_parameter(name)) for name in names])
        values = [getattr(starts[name], "value") for name in names]  # noqa: B009
        computed[f"output/init_{theirs}"] = torch.tensor(values, dtype=torch.float64)
    computed["grad/backout_lambda"] = gradient(model.get_parameter("ends.backout_weight"))
    backout: Any = starts["ends.backout_weight"]
    computed["output/init_backout_lambda"] = torch.tensor([backout.value], dtype=torch.float64)
    # What is smeared is the adapter's own.
    return {**computed, "output/init_smear_lambda": torch.zeros(1, dtype=torch.float64)}


def decoder_config(golden: Golden) -> DecoderConfig:
    """Our decoder at the sizes of the fixture."""
    about, eps = golden.about["config"], torch.finfo(torch.float64).eps
    heads = {"n_heads": about["heads"], "n_kv_heads": about["kv_heads"], "rope_theta": about["rope_base"]}
    hidden = golden.tensors["param/transformer.h.0.mlp.c_fc.weight"].shape[0]
    windows = [left + 1 for left, _ in about["window_sizes"]]
    return DecoderConfig(
        vocab_size=about["V"],
        d_model=about["d"],
        n_layers=about["layers"],
        norm_eps=eps,
        tie_embeddings=False,
        depth=DEPTH["value_embedding"].example("nanochat"),
        blocks=tuple(
            (AttentionConfig(**heads, qk_norm="after_rope", window=window), ReLU2Config(d_ff=hidden)) for window in windows
        ),
    )


def path_of_stream(model: Decoder, index: int) -> str:
    """Where the scalars of a block are: in the mixer of its attention, or one further in where that has a table."""
    mixer = model.get_submodule(f"blocks.{index}.attention.depth")
    return f"blocks.{index}.attention.depth" + (".stream" if isinstance(mixer, ValueEmbedding) else "")


def place(weights: Weights, model: Decoder, golden: Golden, stream: Mapping[int, str]) -> None:
    """Sets all parameters; norms have no gain there, and ours keep the value that stands for none."""
    config, about = model.config, golden.about["config"]
    weights.put("embedding.weight", "transformer.wte.weight")
    weights.put("head.weight", "lm_head.weight")
    weights.put("ends.backout_weight", "backout_lambda")
    for index in range(about["layers"]):
        ours, theirs = f"blocks.{index}", f"transformer.h.{index}"
        weights.put(f"{ours}.attention.mixer.qkv.weight", *(f"{theirs}.attn.c_{x}.weight" for x in "qkv"))
        weights.put(f"{ours}.attention.mixer.output.weight", f"{theirs}.attn.c_proj.weight")
        weights.put(f"{ours}.relu2.mixer.up.weight", f"{theirs}.mlp.c_fc.weight")
        weights.put(f"{ours}.relu2.mixer.down.weight", f"{theirs}.mlp.c_proj.weight")
        for name in ("q_gain", "k_gain"):
            weights.state[f"{ours}.attention.mixer.{name}"] = torch.full(
                (about["d"] // about["heads"],), HEAD_GAIN, dtype=torch.float64
            )
        if f"param/value_embeds.{index}.weight" in golden:
            weights.put(f"{ours}.attention.depth.table", f"value_embeds.{index}.weight")
            weights.put(f"{ours}.attention.depth.gate_weight", f"{theirs}.attn.ve_gate.weight")
    for name, values in SCALARS.items():
        for index, value in enumerate(golden.take(f"param/{values}")):
            weights.state[f"{stream[index]}.{name}"] = value.reshape(1)
    for name in ("norm.gain", *(f"{path}.norm.gain" for path in sublayer_paths(config))):
        weights.state[name] = torch.ones(about["d"])
    weights.load(model)


def forward(model: Decoder, golden: Golden) -> dict[str, Tensor]:
    """Runs both passes; their rotation is the other way round."""
    ids, config = golden.take("input/input_ids"), model.config
    attention: Any = config.layers[0][0]
    layout = TokenLayout.contiguous(ids.shape[1]).of(ids)
    cos, sin = (golden.take(f"buffer/{name}")[:, : ids.shape[1]].squeeze(2) for name in ("cos", "sin"))
    turn = torch.cat((cos, cos), -1).unsqueeze(2), torch.cat((sin, -sin), -1).unsqueeze(2)
    layout.shared(shared_key(attention.rotation(config.d_model), torch.float64), lambda: turn)
    gate, weight = (golden.take(f"param/{name}").requires_grad_() for name in ("smear_gate.weight", "smear_lambda"))
    state: Any = model.ends.enter(model.embed(ids), layout)[0]
    x = state.stream
    amount = weight * torch.sigmoid(x[:, 1:, :SMEAR_CHANNELS] @ gate.T)
    smeared = torch.cat((x[:, :1], x[:, 1:] + amount * x[:, :-1]), dim=1)
    state, found = state._replace(stream=smeared, embedding=smeared), {}
    for index, block in enumerate(model.blocks):
        state, _ = block(state, layout)
        found[f"output/hidden_{index}"] = state.stream
    cap = golden.about["config"]["softcap"]
    logits = cap * torch.tanh(model.logits(model.norm(model.ends.leave(state, layout)[0])) / cap)
    logits.backward(golden.take("input/cotangent"))
    smear = {"grad/smear_gate.weight": gradient(gate), "grad/smear_lambda": gradient(weight)}
    return {**found, **smear, "output/logits": logits}


def _smaller_gate(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(value_embedding.LARGEST, "nanochat", 2.0)


def _rows_of_other_tokens(patch: pytest.MonkeyPatch) -> None:
    right = F.embedding

    def shifted(ids: Tensor, table: Tensor, *rest: Any) -> Tensor:
        return right(ids.roll(1, 1) if table.shape[1] < 32 else ids, table, *rest)

    patch.setattr(value_embedding.F, "embedding", shifted)


def _gate_of_the_stream(patch: pytest.MonkeyPatch) -> None:
    right = ValueEmbedding.mix_heads

    def mix_heads(self: ValueEmbedding, heads: Any, context: Any, state: StreamAndEmbedding, layout: Any = None) -> Any:
        return right(self, heads, state.stream, state, layout)

    patch.setattr(ValueEmbedding, "mix_heads", mix_heads)


def _starts_without_depth(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ResidualScalarsConfig, "starts", lambda self, unit, units: (1.15, 0.2))


def _backout_of_the_next_block(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ResidualScalarsConfig, "backout_block", lambda self, stack: stack.n_blocks // 2 + 1)


def _backout_is_added(patch: pytest.MonkeyPatch) -> None:
    def leave(self: Any, state: StreamAndEmbedding, layout: Any = None, cache: Any = None) -> Any:
        return state.stream + state.middle[0] * self.backout_weight, cache

    patch.setattr(residual_scalars.StreamAndEmbeddingEnds, "leave", leave)


def _scalars_on_the_update(patch: pytest.MonkeyPatch) -> None:
    right = ResidualScalars.write

    def write(self: ResidualScalars, state: StreamAndEmbedding, update: Tensor, context: Any, carry: Any) -> Any:
        return right(self, state, update, context, state.stream if self.mixes else carry)

    patch.setattr(ResidualScalars, "write", write)


FIXTURE = "nanochat-ve-f64"

ADAPTER = Adapter(
    claims={r"nanochat-ve(-.*)?": run},
    mistakes=(
        Mistake("a gate up to 2", FIXTURE, _smaller_gate),
        Mistake("rows of the tokens before", FIXTURE, _rows_of_other_tokens),
        Mistake("a gate that sees the stream before its norm", FIXTURE, _gate_of_the_stream),
        Mistake("scalars that start alike in every block", FIXTURE, _starts_without_depth),
        Mistake("backout of the block after the middle", FIXTURE, _backout_of_the_next_block),
        Mistake("backout that is added", FIXTURE, _backout_is_added),
        Mistake("updates added to the stream before the scalars", FIXTURE, _scalars_on_the_update),
    ),
)
