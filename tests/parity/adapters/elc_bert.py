"""ELC-BERT: the authors' four encoders with their head for masked tokens, and the two combinations alone."""

from collections.abc import Mapping
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from twoaxis.checkpoints.layouts import denseformer as state_maps
from twoaxis.core.position import LayerStack
from twoaxis.depth import ElcBertConfig, elc_bert, history
from twoaxis.depth.elc_bert import ElcBert, ElcBertEnds
from twoaxis.depth.history import History

from ..backbones.depth_loop import DepthLoop
from ..backbones.elc_bert import Encoder, norm
from ..golden import Golden, gradient
from . import Adapter, Mistake

LOGITS = "prev_layer_weights"


def run(golden: Golden) -> Mapping[str, Tensor]:
    """The encoder and its head."""
    config = golden.about["config"]
    n_blocks = config["num_hidden_layers"]
    depth = ElcBertConfig(variant=golden.about["variant"], source_eps=config["layer_norm_eps"])
    mask = golden.take("input/attention_mask")[:, None, None, :]
    layer = "transformer.layers.{}."
    encoder = Encoder(golden, mask, f"{layer}attention", f"{layer}mlp.mlp", gated=False)
    loop = DepthLoop(depth, config["hidden_size"], n_blocks)
    names = {ours: theirs for ours, (theirs,) in state_maps.elc_bert(loop.paths).names().items()}
    _place(loop, golden, names)
    for kind in ("param", "init"):
        # One source has weight 1 whatever its logit is.
        assert golden.take(f"{kind}/{layer.format(0)}{LOGITS}").numel() == 1
    passed = loop.run(encoder.rows() if depth.norms_embedding else encoder.embeddings(), encoder.branch)
    first = passed.states[0].sources[0]
    first.retain_grad()
    logits = _head(golden, encoder, passed.left)
    logits.backward(golden.take("input/cotangent"))
    hidden = [state.sources[-1] for state in passed.states[::2]]
    return {
        "output/logits": logits,
        **{f"output/hidden.{i}": h for i, h in enumerate([*hidden, passed.left])},
        **{f"output/mixed.{i}": u for i, u in enumerate(passed.views[::2])},
        "grad/embedding.word_embedding.weight": gradient(encoder.word_embedding),
        "grad/h0": gradient(first),
        **{f"grad/{theirs}": loop.gradient(ours) for ours, theirs in names.items()},
    }


def _place(loop: DepthLoop, golden: Golden, names: Mapping[str, str]) -> None:
    values = {ours: [golden.take(f"param/{theirs}")] for ours, theirs in names.items()}
    started = {ours: [golden.take(f"init/{theirs}")] for ours, theirs in names.items()}
    loop.place(values, started)


def _head(golden: Golden, encoder: Encoder, x: Tensor) -> Tensor:
    weight, bias, last_bias = (
        golden.take(f"param/classifier.nonlinearity.{name}") for name in ("1.weight", "1.bias", "5.bias")
    )
    eps = encoder.eps
    return F.linear(norm(F.gelu(F.linear(norm(x, eps), weight, bias)), eps), encoder.word_embedding, last_bias)


def run_combination(golden: Golden) -> Mapping[str, Tensor]:
    """What a block reads from its sources, or what the head of `weighted_output` reads."""
    config = golden.about["config"]
    n = config["n_sources"] if golden.about["variant"] == "op-mix" else config["L"] + 1
    sources = tuple(golden.take(f"input/h.{i}").requires_grad_() for i in range(n))
    if golden.about["variant"] == "op-mix":
        stack = LayerStack(config["d"], 1e-6, (2,) * n)
        reader: Any = ElcBertConfig(variant="zero").build(stack)[0][2 * (n - 1)].double()
        combination, mixed = reader.combination, lambda: reader.read(History(sources))[0]
    else:
        stack = LayerStack(config["d"], 1e-6, (2,) * config["L"])
        ends: Any = ElcBertConfig(variant="weighted_output").build(stack)[1].double()
        combination, mixed = ends.combination, lambda: ends.leave(History(sources))[0]
    combination.logits.data = golden.take(f"param/{LOGITS}")
    output = mixed()
    output.backward(golden.take("input/cotangent"))
    gradients = {f"grad/h.{i}": gradient(h) for i, h in enumerate(sources)}
    return {"output/mixed": output, f"grad/{LOGITS}": gradient(combination.logits), **gradients}


def _weights_without_softmax(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(history.torch, "softmax", lambda logits, dim: logits)


def _reads_its_own_input_again(patch: pytest.MonkeyPatch) -> None:
    """A feed-forward that reads U + A in every variant."""
    right = ElcBert.write

    def write(self: ElcBert, state: History, update: Tensor, context: Any, carry: Any) -> History:
        following = right(self, state, update, context, carry)
        return following if self.closes_block else following._replace(inside=(following.inside[0], *carry))

    patch.setattr(ElcBert, "write", write)


def _reads_only_what_was_added(patch: pytest.MonkeyPatch) -> None:
    right = ElcBert.read

    def read(self: ElcBert, state: History, *given: Any) -> Any:
        return right(self, state._replace(inside=state.inside[:1]) if not self.opens_block else state, *given)

    patch.setattr(ElcBert, "read", read)


def _norm_with_another_eps(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(elc_bert, "layer_norm", lambda x, eps, impl: F.layer_norm(x, x.shape[-1:], eps=1e-5))


def _embedding_as_it_is(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ElcBertEnds, "enter", lambda self, embeddings, *_: (History((embeddings,)), None))


def _returns_the_last_output(patch: pytest.MonkeyPatch) -> None:
    def leave(self: ElcBertEnds, state: History, *_: Any) -> tuple[Tensor, None]:
        combination = cast(torch.nn.Module, self.combination)
        return state.sources[-1] + 0 * combination(state.sources), None

    patch.setattr(ElcBertEnds, "leave", leave)


ADAPTER = Adapter(
    claims={
        r"elcbert-(base|zero|normalized|weighted_output)(-.*)?": run,
        r"elcbert-op-(mix|finalmix)(-.*)?": run_combination,
    },
    mistakes=(
        Mistake("weights without a softmax", "elcbert-op-mix", _weights_without_softmax),
        Mistake("the last output in place of the combination", "elcbert-op-finalmix", _returns_the_last_output),
        Mistake("a feed-forward that reads the block's input", "elcbert-base", _reads_its_own_input_again),
        Mistake("a feed-forward that does not read the block's input", "elcbert-zero", _reads_only_what_was_added),
        Mistake("an eps of 1e-5", "elcbert-normalized", _norm_with_another_eps),
        Mistake("an embedding that is not normalised", "elcbert-normalized", _embedding_as_it_is),
        Mistake("the last output in place of the combination", "elcbert-weighted_output", _returns_the_last_output),
    ),
)
