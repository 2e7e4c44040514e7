"""DenseFormer: the authors' package alone and in their decoder, their training code with its baselines, and GPT-BERT's form."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from twoaxis.checkpoints.layouts import denseformer as state_maps
from twoaxis.depth import DenseFormerConfig
from twoaxis.depth.denseformer import DenseFormer, SkipGain
from twoaxis.depth.history import History

from ..backbones.depth_loop import DepthLoop, Passed
from ..backbones.elc_bert import Encoder
from ..backbones.gpt import GPT
from ..golden import Golden, gradient
from . import Adapter, Mistake

Row = tuple[int, ...]
Rows = Mapping[str, tuple[str, ...]]
"""What the authors call the parts of our rows."""

VARIANTS = {"connecttolast": "connect_to_last", "skipgains": "skip_gains"}
LAYOUTS_OF = {
    "dwa": state_maps.denseformer_training,
    "connect_to_last": state_maps.connect_to_last,
    "skip_gains": state_maps.skip_gains,
}


def run_operator(golden: Golden) -> Mapping[str, Tensor]:
    """The rows alone, over block outputs that do not depend on each other."""
    config = golden.about["config"]
    n_blocks = config["n_blocks"]
    depth = DenseFormerConfig(dilation=config["dilation"], period=config["period"])
    loop = DepthLoop(depth, config["d"], n_blocks, sublayers=1)
    rows = {ours: (theirs.removeprefix("dwa."),) for ours, (theirs,) in state_maps.denseformer(loop.paths).names().items()}
    _place(loop, golden, rows)
    x = [golden.take(f"input/x.{i}").requires_grad_() for i in range(n_blocks + 1)]
    # A block adds the stored output minus the stream, so that its output is the stored one and no gradient flows along.
    passed = loop.run(x[0], lambda index, view: x[index + 1] - view)
    y = [*passed.views[1:], passed.left]
    torch.autograd.backward(y, [golden.take(f"input/cotangent.{i + 1}") for i in range(n_blocks)])
    return {
        **{f"output/y.{i + 1}": value for i, value in enumerate(y)},
        **{f"grad/x.{i}": gradient(value) for i, value in enumerate(x)},
        **_row_gradients(loop, rows),
    }


def run_package(golden: Golden) -> Mapping[str, Tensor]:
    """Their decoder with the package's module after every block."""
    config = golden.about["config"]
    depth = DenseFormerConfig(dilation=config["dilation"], period=config["period"])
    n_blocks = config["n_layer"]
    loop = DepthLoop(depth, config["n_embd"], n_blocks)
    rows = state_maps.denseformer(loop.paths).names()
    _place(loop, golden, rows)
    gpt = GPT(golden, "gpt.transformer.", [f"gpt.transformer.h.{b}" for b in range(n_blocks)])
    passed, computed = _run_gpt(loop, gpt)
    passed_on = [*passed.views[2::2], passed.left]
    return {
        **computed,
        "grad/gpt.transformer.wte.weight": gradient(gpt.wte),
        **{f"output/dwa.{i + 1}": y for i, y in enumerate(passed_on)},
        **_row_gradients(loop, rows),
    }


def run_training_code(golden: Golden) -> Mapping[str, Tensor]:
    """Their training code: grouped rows, and the two baselines."""
    config, variant = golden.about["config"], VARIANTS.get(golden.about["variant"], "dwa")
    size, n_blocks = config["increase_T_every"], config["n_layer"]
    options: Any = {"variant": variant}
    if variant == "dwa":
        options = {"dilation": config["dilation_factor"], "period": size, "stored": "groups"}
    depth = DenseFormerConfig(**options)
    loop = DepthLoop(depth, config["n_embd"], n_blocks)
    blocks = [f"transformer.h.{b // size}.{b % size}" for b in range(n_blocks)]
    if variant == "skip_gains":
        blocks = [f"transformer.h.{b}" for b in range(n_blocks)]
    rows = LAYOUTS_OF[variant](loop.paths).names()
    _place(loop, golden, rows)
    gpt = GPT(golden, "transformer.", blocks)
    passed, computed = _run_gpt(loop, gpt)
    return {
        **computed,
        "grad/transformer.wte.weight": gradient(gpt.wte),
        "output/group_input.final": passed.left,
        **{f"output/group_input.{g}": y for g, y in enumerate(passed.views[:: 2 * size])},
        **_row_gradients(loop, rows),
    }


def run_sublayers(golden: Golden) -> Mapping[str, Tensor]:
    """The encoder of GPT-BERT with its rows after every sublayer."""
    config = golden.about["config"]
    n_blocks = config["num_hidden_layers"]
    loop = DepthLoop(DenseFormerConfig(granularity="sublayer"), config["hidden_size"], n_blocks)
    rows = state_maps.gpt_bert(loop.paths).names()
    _place(loop, golden, rows)
    mask = golden.take("input/attention_mask")[:, None]
    encoder = Encoder(golden, mask, "encoder.attention_layers.{}", "encoder.mlp_layers.{}.mlp", gated=True)
    passed = loop.run(encoder.embeddings(), encoder.branch)
    passed.left.backward(golden.take("input/cotangent"))
    x = [passed.embeddings, *(view + update for view, update in zip(passed.views, passed.updates, strict=True))]
    return {
        "output/out": passed.left,
        **{f"output/x.{s}": value for s, value in enumerate(x)},
        **{f"output/y.{s + 1}": value for s, value in enumerate([*passed.views[1:], passed.left])},
        "grad/embedding.word_embedding.weight": gradient(encoder.word_embedding),
        "grad/x0": gradient(passed.embeddings),
        **_row_gradients(loop, rows),
    }


def _run_gpt(loop: DepthLoop, gpt: GPT) -> tuple[Passed, dict[str, Tensor]]:
    passed = loop.run(gpt.embeddings(), gpt.branch)
    logits = gpt.logits(passed.left)
    logits.backward(gpt.golden.take("input/cotangent"))
    # What a block gives before its row: what its last sublayer read and added.
    gain = [mixer.gain if isinstance(mixer, SkipGain) else 1.0 for mixer in loop.mixers[1::2]]
    raw = [g * x + f for g, x, f in zip(gain, passed.views[1::2], passed.updates[1::2], strict=True)]
    return passed, {
        "output/logits": logits,
        **{f"output/block.{i}": value for i, value in enumerate([passed.embeddings, *raw])},
        "grad/x0": gradient(passed.embeddings),
    }


def _place(loop: DepthLoop, golden: Golden, rows: Rows) -> None:
    values = {ours: [golden.take(f"param/{name}") for name in names] for ours, names in rows.items()}
    started = {ours: names for ours, names in rows.items() if f"init/{names[0]}" in golden}
    loop.place(values, {ours: [golden.take(f"init/{name}") for name in names] for ours, names in started.items()})


def _row_gradients(loop: DepthLoop, rows: Rows) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for ours, (first, *others) in rows.items():
        whole = loop.gradient(ours)
        if others:
            found.update({f"grad/{name}": whole[i : i + 1] for i, name in enumerate((first, *others))})
        else:
            # Their linear maps have one output.
            found[f"grad/{first}"] = whole[None] if first.endswith(".weight") else whole
    return found


def _sums_of_sums(patch: pytest.MonkeyPatch) -> None:
    """Keeps the sum of a row as the source of later ones, in place of the block's output."""
    right = DenseFormer.write

    def write(self: DenseFormer, state: Any, update: Tensor, context: Any, carry: Any) -> Any:
        following = right(self, state, update, context, carry)
        sources = following.sources
        return History((*sources[:-2], sources[-1], sources[-1])) if self.row and len(sources) > 1 else following

    patch.setattr(DenseFormer, "write", write)


def _change_rows(patch: pytest.MonkeyPatch, change: Callable[[Row], Row]) -> None:
    right = DenseFormerConfig.rows
    patch.setattr(DenseFormerConfig, "rows", lambda self, n: {end: change(row) for end, row in right(self, n).items()})


def _newest_first(patch: pytest.MonkeyPatch) -> None:
    _change_rows(patch, lambda row: row[::-1])


def _first_output_for_the_embedding(patch: pytest.MonkeyPatch) -> None:
    _change_rows(patch, lambda row: tuple(source or 1 for source in row))


def _first_blocks_of_groups(patch: pytest.MonkeyPatch) -> None:
    _change_rows(patch, lambda row: tuple(source - 1 if 0 < source < row[-1] else source for source in row))


def _gain_on_the_update(patch: pytest.MonkeyPatch) -> None:
    def write(self: SkipGain, state: Any, update: Tensor, context: Any, carry: Any) -> Any:
        return state + self.gain * update

    patch.setattr(SkipGain, "write", write)


ADAPTER = Adapter(
    claims={
        r"denseformer-op-\d+x\d+(-.*)?": run_operator,
        r"denseformer-lm-\d+x\d+(-.*)?": run_package,
        r"denseformer-(exp|connecttolast|skipgains)(-.*)?": run_training_code,
        r"denseformer-sublayer-gptbert(-.*)?": run_sublayers,
    },
    mistakes=(
        Mistake("sums of sums", "denseformer-op-1x1", _sums_of_sums),
        Mistake("weights from the newest source to the oldest", "denseformer-op-4x5", _newest_first),
        Mistake("sums of sums", "denseformer-lm-1x1", _sums_of_sums),
        Mistake("the first output for the embedding", "denseformer-lm-2x3", _first_output_for_the_embedding),
        Mistake("groups that store their first block", "denseformer-exp-group2-k2", _first_blocks_of_groups),
        Mistake("the first output for the embedding", "denseformer-connecttolast", _first_output_for_the_embedding),
        Mistake("a gain of the update", "denseformer-skipgains", _gain_on_the_update),
        Mistake("the first output for the embedding", "denseformer-sublayer-gptbert", _first_output_for_the_embedding),
    ),
)
