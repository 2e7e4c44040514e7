"""DeepCrossAttention: one read in every form, one block, and the decoder of the deep-cross-attention package."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoaxis.core.position import LayerStack
from twoaxis.depth import DeepCrossAttentionConfig, deep_cross_attention
from twoaxis.depth.deep_cross_attention import DeepCrossAttention
from twoaxis.depth.history import History

from ..backbones.dca_gpt import EPS, DCABlocks, norm
from ..golden import Golden, gradient
from . import Adapter, Mistake

PARTS = {"bias": "bias", "score_weight": "to_aggregate.1.weight", "score_gain": "to_aggregate.0.weight"}
IDLE = ("score_weight", "score_gain")
"""What the package allocates without scores."""
PACKAGE: dict[str, Any] = {"activation": "relu", "score_norm": "rms", "score_std": 0.01}


def run_plain(golden: Golden) -> Mapping[str, Tensor]:
    """GRN-v1 and GRN-v2: biases alone, one number or one vector for each source."""
    variant = golden.about["config"]["mode"]
    scores, gain = (golden.take(f"param/{PARTS[name]}") for name in IDLE)
    assert not scores.any()
    computed, _ = _read(golden, DeepCrossAttentionConfig(variant="v2"))
    if variant == "v1":
        # They have a number for each feature, all of them equal; the gradient of one number is the sum of theirs.
        assert not golden.tensors["param/bias"].diff(dim=-1).any()
        numbers, reader = _read(golden, DeepCrossAttentionConfig(variant="v1"))
        total = computed["grad/bias"].sum(-1)
        torch.testing.assert_close(gradient(reader.grn.bias), total, rtol=1e-12, atol=1e-12)
        computed = {**numbers, "grad/bias": computed["grad/bias"]}
    # Some of their runs store zeros for what nothing depends on.
    return {
        **computed,
        **{f"grad/{PARTS[name]}": torch.zeros_like(scores if name == "score_weight" else gain) for name in IDLE},
    }


def run_scores(golden: Golden) -> Mapping[str, Tensor]:
    """GRN-v3 for one and for three ways, and with the scores of the paper."""
    config = golden.about["config"]
    options = PACKAGE if config["mode"] == "v3" else {"activation": "relu", "score_std": 0.01}
    variant: Any = "dca" if config["n_outputs"] == 3 else "v3"
    computed, _ = _read(golden, DeepCrossAttentionConfig(variant=variant, **options))
    return computed


def _read(golden: Golden, depth: DeepCrossAttentionConfig) -> tuple[dict[str, Tensor], Any]:
    """One read of the stored stack."""
    config = golden.about["config"]
    n = config["n_sources"]
    reader: Any = depth.build(LayerStack(config["d"], EPS, (2,) * n))[0][2 * (n - 1)].double()
    _place(golden, reader.grn, "")
    stack = [v.requires_grad_() for v in golden.take("input/stack").unbind()]
    views, _, _ = reader.read(History(tuple(stack)))
    output = torch.stack(views) if reader.splits_views else views
    output.backward(golden.take("input/cotangent"))
    return {"output/out": output, "grad/stack": _stacked_gradients(stack), **dict(_gradients(reader.grn, ""))}, reader


def run_block(golden: Golden) -> Mapping[str, Tensor]:
    """One block over a stored stack."""
    n = golden.about["config"]["n_sources"]
    blocks = DCABlocks(golden, DeepCrossAttentionConfig(**PACKAGE), [""] * n)
    grn = cast(Any, blocks.mixers[2 * (n - 1)]).grn
    _place(golden, grn, "qkv_grn.")
    stack = [v.requires_grad_() for v in golden.take("input/stack").unbind()]
    views, attention, state = blocks.block(n - 1, History(tuple(stack)))
    delta = state.sources[-1]
    delta.backward(golden.take("input/cotangent"))
    return {
        "output/out": delta,
        "output/qkv_in": torch.stack(views),
        "output/attn": attention,
        "grad/stack": _stacked_gradients(stack),
        **dict(_gradients(grn, "qkv_grn.")),
    }


def run_decoder(golden: Golden) -> Mapping[str, Tensor]:
    """The decoder, which keeps the first and the last columns of its stack."""
    config = golden.about["config"]
    n_blocks = config["depth"]
    k = config["past_layers_k"]
    depth = DeepCrossAttentionConfig(k=k, middle="sum" if k is None else "drop", **PACKAGE)
    blocks = DCABlocks(golden, depth, [f"dca_blocks.{b}." for b in range(n_blocks)])
    grns = {f"dca_blocks.{b}.qkv_grn.": cast(Any, blocks.mixers[2 * b]).grn for b in range(n_blocks)}
    grns["final_grn."] = cast(Any, blocks.ends).grn
    for prefix, grn in grns.items():
        # Before the stored values replace it.
        torch.testing.assert_close(grn.bias.detach(), golden.take(f"init/{prefix}bias"), rtol=0, atol=0)
        _place(golden, grn, prefix)
    wte = golden.take("param/token_emb.weight").requires_grad_()
    embeddings = F.embedding(golden.take("input/ids"), wte)
    embeddings.retain_grad()
    state, found = cast(Any, blocks.ends).enter(embeddings)[0], {"output/block.0": embeddings}
    for b in range(n_blocks):
        assert len(state.sources) == config["sources_per_block"][b]
        views, _, state = blocks.block(b, state)
        found[f"output/block.{b + 1}"] = state.sources[-1]
        found[f"output/qkv_in.{b + 1}"] = torch.stack(views)
    assert len(state.sources) == config["sources_final"]
    pooled = cast(Any, blocks.ends).leave(state)[0]
    logits = norm(pooled, golden.take("param/norm.weight")) @ golden.take("param/to_logits.weight").T
    logits.backward(golden.take("input/cotangent"))
    for prefix, grn in grns.items():
        found.update(_gradients(grn, prefix))
    gradients = {"grad/token_emb.weight": gradient(wte), "grad/x0": gradient(embeddings)}
    return {**found, **gradients, "output/pooled": pooled, "output/logits": logits}


@torch.no_grad()
def _place(golden: Golden, grn: nn.Module, prefix: str) -> None:
    for ours, parameter in grn.named_parameters():
        stored = golden.take(f"param/{prefix}{PARTS[ours]}")
        if f"init/{prefix}{PARTS[ours]}" in golden:
            golden.take(f"init/{prefix}{PARTS[ours]}")
        if parameter.ndim < stored.ndim:
            # The biases of v1.
            stored = stored[..., 0]
        parameter.copy_(stored.unsqueeze(1) if parameter.ndim > stored.ndim else stored)


def _gradients(grn: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    for ours, parameter in grn.named_parameters():
        found = gradient(parameter)
        yield f"grad/{prefix}{PARTS[ours]}", found.squeeze(1) if ours == "score_weight" else found


def _stacked_gradients(stack: list[Tensor]) -> Tensor:
    return torch.stack([gradient(v) for v in stack])


def _relu_around_the_bias(patch: pytest.MonkeyPatch) -> None:
    right = deep_cross_attention.grn

    def grn(sources: Any, bias: Tensor, *rest: Any) -> Any:
        return right(sources, bias.relu(), *rest)

    patch.setattr(deep_cross_attention, "grn", grn)


def _newest_first(patch: pytest.MonkeyPatch) -> None:
    right = deep_cross_attention.mix
    patch.setattr(deep_cross_attention, "mix", lambda sources, *rest: right(sources[::-1], *rest))


def _input_in_the_delta(patch: pytest.MonkeyPatch) -> None:
    right = DeepCrossAttention.write

    def write(self: DeepCrossAttention, state: Any, update: Tensor, context: Any, carry: Tensor) -> Any:
        return right(self, state, update + carry if self.closes_block else update, context, carry)

    patch.setattr(DeepCrossAttention, "write", write)


def _one_column_more(patch: pytest.MonkeyPatch) -> None:
    """Drops the newest of the first columns in place of the oldest of the middle."""
    right = DeepCrossAttention._with_column  # type: ignore[attr-defined]

    def with_column(self: Any, columns: Any, delta: Tensor) -> Any:
        kept = right(self, columns, delta)
        if len(kept) > len(columns):
            return kept
        k = self.config.k
        return (*columns[: k - 1], *columns[k:], delta)

    patch.setattr(DeepCrossAttention, "_with_column", with_column)


ADAPTER = Adapter(
    claims={
        r"dca-grn-v[12](-.*)?": run_plain,
        r"dca-grn-v3.*": run_scores,
        r"dca-block(-.*)?": run_block,
        r"dca-gpt-.*": run_decoder,
    },
    mistakes=(
        Mistake("weights from the newest source to the oldest", "dca-grn-v1", _newest_first),
        Mistake("relu around bias and score", "dca-grn-v3", _relu_around_the_bias),
        Mistake("relu around bias and score", "dca-grn-v3-qkv", _relu_around_the_bias),
        Mistake("a delta that holds the input of its block", "dca-block", _input_in_the_delta),
        Mistake("a delta that holds the input of its block", "dca-gpt-full", _input_in_the_delta),
        Mistake("one of the first columns dropped, not the middle", "dca-gpt-k2", _one_column_more),
    ),
)
