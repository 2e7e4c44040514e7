"""Our decoder as the Llama of transformers, with the stored rotation instead of ours, which is rounded elsewhere."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from twoaxis.checkpoints.layouts.llama import body
from twoaxis.core.layout import TokenLayout
from twoaxis.depth import DepthConfig, ResidualConfig
from twoaxis.feed_forward import SwiGLUConfig
from twoaxis.model import Decoder, DecoderConfig
from twoaxis.ops.rope import Rotation, shared_key
from twoaxis.sequence import AttentionConfig

from ..golden import Golden, gradient
from ..weights import Weights


def llama_decoder(config: Mapping[str, Any], attention: AttentionConfig, depth: DepthConfig | None = None) -> Decoder:
    """Our decoder at the sizes of a configuration in the words of transformers."""
    return Decoder(
        DecoderConfig(
            vocab_size=config["vocab_size"],
            d_model=config["hidden_size"],
            n_layers=config["num_hidden_layers"],
            norm_eps=config.get("rms_norm_eps") or config["norm_eps"],
            tie_embeddings=config.get("tie_word_embeddings", False),
            depth=depth or ResidualConfig(),
            blocks=((attention, SwiGLUConfig(d_ff=config["intermediate_size"])),),
        )
    )


def lettered_llama(config: Mapping[str, Any], n_layers: int, attention: AttentionConfig, depth: DepthConfig) -> Decoder:
    """The same at the sizes of a configuration in letters."""
    words = {"vocab_size": "V", "hidden_size": "d", "norm_eps": "eps", "intermediate_size": "f"}
    sizes = {word: config[letter] for word, letter in words.items()}
    return llama_decoder({**sizes, "num_hidden_layers": n_layers}, attention, depth)


def place_llama(weights: Weights, config: DecoderConfig) -> None:
    """Places everything but the projections to heads, which differ between methods."""
    for entry in body(config):
        if not entry.ours.endswith(".qkv.weight"):
            weights.put(entry.ours, *(part.name for part in entry.parts))


def stored_rotation(golden: Golden, tokens: int) -> Rotation:
    """The rotation of the stored frequencies, or of the stored cosines and sines."""
    if "buffer/rope_inv_freq" in golden:
        angles = torch.arange(tokens).double().unsqueeze(-1) * golden.take("buffer/rope_inv_freq").double()
        cos, sin = angles.cos(), angles.sin()
    else:
        cos, sin = (golden.take(f"buffer/rope_{name}").double().reshape(tokens, -1).chunk(2, -1)[0] for name in ("cos", "sin"))
    return torch.cat((cos, cos), -1)[None, :, None], torch.cat((-sin, sin), -1)[None, :, None]


def run_llama(model: Decoder, golden: Golden) -> dict[str, Tensor]:
    """Runs forward and backward through the decoder, and returns logits, hidden states and gradients of the embeddings.

    The last hidden state is the normalised one; what the norm was given is `left`.
    """
    embeddings = model.embed(golden.take("input/input_ids"))
    embeddings.retain_grad()
    tokens = embeddings.shape[1]
    layout = TokenLayout.contiguous(tokens)
    attention: Any = model.config.layers[0][0]
    turn = stored_rotation(golden, tokens)
    layout.shared(shared_key(attention.rotation(model.config.d_model), torch.float64), lambda: turn)
    state = model.ends.enter(embeddings)[0]
    found = {"output/hidden_0": embeddings}
    for index, block in enumerate(model.blocks):
        state, _ = block(state, layout)
        found[f"output/hidden_{index + 1}"] = model.ends.leave(state)[0]
    found["left"] = model.ends.leave(state)[0]
    hidden = model.norm(found["left"])
    found[f"output/hidden_{len(model.blocks)}"] = hidden
    logits = model.logits(hidden)
    logits.backward(golden.take("input/cotangent"))
    return {**found, "output/logits": logits, "grad/input_embeddings": gradient(embeddings)}


def llama_gradients(weights: Weights, model: Decoder) -> dict[str, Tensor]:
    """The gradient of every stored parameter."""
    return dict(weights.gradients(model))
