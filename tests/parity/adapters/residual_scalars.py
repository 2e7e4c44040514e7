"""Residual scalars: a decoder written from the equations of nanochat, with each way to take the embedding."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from twoaxis.checkpoints.layouts import state_map, sublayer_paths
from twoaxis.depth import residual_scalars
from twoaxis.depth.residual_scalars import ResidualScalars, ResidualScalarsConfig, StreamAndEmbedding, StreamAndEmbeddingEnds
from twoaxis.feed_forward import SwiGLUConfig
from twoaxis.model import Decoder, DecoderConfig
from twoaxis.model.trace import sublayer_list
from twoaxis.sequence import AttentionConfig

from ..golden import Golden, gradient
from ..trace import logits_and_gradients, states
from ..weights import Weights
from . import Adapter, Mistake

FORMS = {
    "nanochat": ResidualScalarsConfig(embedding="normalised_start", granularity="block"),
    "normalised": ResidualScalarsConfig(),
    "raw": ResidualScalarsConfig(embedding="raw"),
}
SCALARS = {"stream_weight": "resid_lambdas", "embedding_weight": "x0_lambdas"}


def run(golden: Golden) -> Mapping[str, Tensor]:
    """The whole decoder: logits, the stream around every sublayer, every gradient."""
    about = golden.about["config"]
    config = DecoderConfig(
        vocab_size=about["vocab_size"],
        d_model=about["d_model"],
        n_layers=about["n_layers"],
        norm_eps=about["norm_eps"],
        tie_embeddings=False,
        depth=FORMS[golden.name.split("-")[2]],
        blocks=((AttentionConfig(n_heads=about["n_heads"]), SwiGLUConfig(d_ff=about["d_ff"])),),
    )
    model, weights = Decoder(config), Weights(golden)
    weights.follow(state_map("llama", config.replace(depth="residual")))
    step = 2 if config.depth.granularity == "block" else 1  # type: ignore[attr-defined]
    for ours, theirs in SCALARS.items():
        for prefix, value in zip(sublayer_paths(config)[::step], golden.take(f"param/{theirs}"), strict=True):
            weights.state[f"{prefix}.depth.{ours}"] = value.reshape(1)
    weights.load(model)
    computed = {**logits_and_gradients(model, golden), **dict(weights.gradients(model))}
    for ours, theirs in SCALARS.items():
        scalars = [gradient(getattr(sublayer.depth, ours)) for sublayer in sublayer_list(model)[::step]]
        computed[f"grad/{theirs}"] = torch.cat(scalars)
    streams = [model.ends.leave(state)[0] for state in states(model, golden)]
    return {**computed, **{f"output/stream_{index}": stream for index, stream in enumerate(streams)}}


def _raw_embedding(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(residual_scalars, "rms_norm", lambda x, gain, eps, impl: x)


def _stream_starts_raw(patch: pytest.MonkeyPatch) -> None:
    right = StreamAndEmbeddingEnds.enter
    patch.setattr(
        StreamAndEmbeddingEnds, "enter", lambda self, e, *_: (StreamAndEmbedding(e, right(self, e)[0].embedding), None)
    )


def _stream_starts_normalised(patch: pytest.MonkeyPatch) -> None:
    right = StreamAndEmbeddingEnds.enter

    def enter(self: Any, e: Tensor, *_: Any) -> Any:
        added = right(self, e)[0].embedding
        return StreamAndEmbedding(added, added), None

    patch.setattr(StreamAndEmbeddingEnds, "enter", enter)


def _eps_of_the_model(patch: pytest.MonkeyPatch) -> None:
    right = residual_scalars.rms_norm
    patch.setattr(residual_scalars, "rms_norm", lambda x, gain, eps, impl: right(x, gain, 1e-6, impl))


def _adds_to_the_unmixed_stream(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ResidualScalars, "write", lambda self, s, update, context, carry: s._replace(stream=s.stream + update))


ADAPTER = Adapter(
    claims={r"residual-scalars-(nanochat|normalised|raw)(-.*)?": run},
    mistakes=(
        Mistake("the raw embedding added", "residual-scalars-normalised", _raw_embedding),
        Mistake("the raw embedding added", "residual-scalars-nanochat", _raw_embedding),
        Mistake("a stream that starts as the raw embedding", "residual-scalars-nanochat", _stream_starts_raw),
        Mistake("a stream that starts as the normalised embedding", "residual-scalars-normalised", _stream_starts_normalised),
        Mistake("the eps of the model's norms", "residual-scalars-normalised", _eps_of_the_model),
        Mistake("updates added to the unmixed stream", "residual-scalars-raw", _adds_to_the_unmixed_stream),
    ),
)
