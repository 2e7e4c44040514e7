"""Attention Residuals: the read as an operator, with heads, in two phases, and two independent decoders."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from twoaxis.checkpoints.layouts import state_map
from twoaxis.core.parameters import initialise
from twoaxis.core.position import LayerStack, SublayerInfo
from twoaxis.core.views import QKV
from twoaxis.depth import AttentionResidualsConfig, attention_residuals, depth_query
from twoaxis.depth.depth_query import DepthQuery, Sources
from twoaxis.model import Decoder
from twoaxis.model.trace import sublayer_list
from twoaxis.ops import two_phase
from twoaxis.ops.depth_read import depth_read, depth_scores, depth_weights, passing_read, source_factor
from twoaxis.ops.norm import inverse_rms, rms_norm
from twoaxis.sequence import AttentionConfig

from ..backbones.llama import llama_decoder
from ..golden import Golden, gradient
from ..trace import logits_and_gradients, states
from ..weights import Weights
from . import Adapter, Mistake


def run_operator(golden: Golden) -> Mapping[str, Tensor]:
    """One read, with the gain of the key norm and the scale folded into the query, and an optional output norm."""
    config = golden.about["config"]
    residuals = {f"residual_{i}": golden.take(f"input/residual_{i}") for i in range(config["n_sources"])}
    parameters = {name[6:]: golden.take(name) for name in golden.tensors if name.startswith("param/")}
    leaves = {name: tensor.requires_grad_() for name, tensor in {**residuals, **parameters}.items()}
    sources = [leaves[name] for name in residuals]
    factors = [inverse_rms(v, config["rms_eps"]) for v in sources]
    query = config["scale"] * leaves["query"].flatten() * leaves["rms_weight"]
    mixed = depth_read(sources, factors, query)
    if config["output_norm"]:
        mixed = rms_norm(mixed, leaves["output_rms_weight"], config["rms_eps"])
    mixed.backward(golden.take("input/cotangent"))
    return {
        "output/o": mixed,
        "output/p": depth_weights(sources, factors, query),
        **{f"grad/{name}": gradient(tensor) for name, tensor in leaves.items()},
    }


def run_heads(golden: Golden) -> Mapping[str, Tensor]:
    """One read with a softmax per head."""
    config = golden.about["config"]
    query, gain = (golden.take(f"param/{name}").requires_grad_() for name in ("query", "rms_weight"))
    stacked = golden.take("input/sources").requires_grad_()
    sources = [v.contiguous() for v in stacked.unbind()]
    factors = [source_factor(v, config["eps"]) for v in sources]
    mixed = depth_read(sources, factors, query * gain, n_heads=config["heads"])
    mixed.backward(golden.take("input/cotangent"))
    return {
        "output/o": mixed,
        "output/p": depth_weights(sources, factors, query * gain, config["heads"]),
        "grad/query": gradient(query),
        "grad/rms_weight": gradient(gain),
        "grad/sources": gradient(stacked),
    }


def run_inkling2(golden: Golden) -> Mapping[str, Tensor]:
    """The reads of our mixer before one sublayer, over normalised sources; three queries are those of a global attention."""
    config = golden.about["config"]
    blocks, partial, query = (golden.take(name) for name in ("input/block_states", "input/partial", "param/query"))
    n, slots = config["blocks"], (SublayerInfo("attention", takes_views=config["num_queries"] == 3), SublayerInfo("swiglu"))
    stack = LayerStack(config["d"], config["eps"], (2,) * (n + 1), slots * (n + 1))
    # With a source per layer the attention of layer n reads the embedding, n - 1 completed sums and the newest one.
    mixer: Any = AttentionResidualsConfig(form="inkling2", block_size=1, count="layer").build(stack)[0][2 * n]
    initialise(mixer, 0)
    queries = dict(mixer.double().named_parameters())
    assert all(not parameter.any() for parameter in queries.values()), "the released queries start at zero"
    with torch.no_grad():
        for parameter, row in zip(queries.values(), query.view(-1, config["d"]), strict=True):
            parameter.copy_(row)
    sources = [v.contiguous().requires_grad_() for v in (*blocks.unbind(-2), partial)]
    factors = tuple(source_factor(v, config["eps"]) for v in sources)
    views, _, _ = mixer.read(Sources(tuple(sources), factors))
    mixed = torch.stack(views if isinstance(views, QKV) else [views])
    mixed.backward(golden.take("input/cotangent").view_as(mixed))
    *completed, running = [gradient(v) for v in sources]
    return {
        "output/y": mixed.view_as(golden.tensors["output/y"]),
        "grad/block_states": torch.stack(completed, dim=-2),
        "grad/partial": running,
        "grad/query": torch.stack([gradient(parameter) for parameter in queries.values()]).view_as(query),
    }


def run_two_phase(golden: Golden) -> Mapping[str, Tensor]:
    """Completed sources for all queries at once, then the running one."""
    eps = golden.about["config"]["eps"]
    queries = golden.take("param/pseudo_queries")
    sources, running = list(golden.take("input/block_reps")), golden.take("input/partial")
    factors, last = [inverse_rms(v, eps) for v in sources], [inverse_rms(running, eps)]
    early = two_phase.early_reads(sources, factors, queries.unbind())
    # The authors hold the mixture before its division, the largest score and the sum of exponentials apart.
    largest = [depth_scores(sources, factors, query).amax(0) for query in queries]
    totals = [(read.log_total - most).exp() for read, most in zip(early, largest, strict=True)]
    merged = [two_phase.late_read(a, [running], last, query) for a, query in zip(early, queries, strict=True)]
    return {
        "output/phase1_o": torch.stack([read.mixture * total for read, total in zip(early, totals, strict=True)]),
        "output/phase1_max": torch.stack(largest).squeeze(-1),
        "output/phase1_sumexp": torch.stack(totals).squeeze(-1),
        **{f"output/interblock_only_{i}": read.mixture for i, read in enumerate(early)},
        **{f"output/merged_{i}": read for i, read in enumerate(merged)},
    }


def run_fla(golden: Golden) -> Mapping[str, Tensor]:
    """The decoder of flash-linear-attention."""
    config = golden.about["config"]
    attention = AttentionConfig(
        n_heads=config["num_heads"],
        n_kv_heads=config["num_kv_heads"],
        head_dim=config.get("head_dim"),
        rope_theta=config.get("rope_theta", 10_000.0),
        qk_norm="before_rope" if config["qk_norm"] else "none",
    )
    model = llama_decoder(config, attention, AttentionResidualsConfig(block_size=config["attnres_block_size"] or 1))
    weights = Weights(golden)
    weights.follow(state_map("attnres_fla", model.config))
    weights.load(model)
    computed = {**logits_and_gradients(model, golden), **dict(weights.gradients(model))}
    for name in golden.about["parameters_without_gradient"]:
        assert f"grad/{name}" not in golden
    for index, state, mixed, p in _reads(model, golden):
        computed.update({f"output/mix_{index}": mixed, f"output/p_{index}": p})
        if index % 2 == 0:
            computed[f"output/hf_hidden_{index // 2}"] = state.values[-1]
    computed[f"output/hf_hidden_{config['num_hidden_layers']}"] = computed["hidden"]
    return computed


def run_qwen3(golden: Golden) -> Mapping[str, Tensor]:
    """An independent decoder on Qwen3, with blocks counted in layers."""
    config = golden.about["config"]
    attention = AttentionConfig(
        n_heads=config["num_attention_heads"],
        n_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        rope_theta=golden.about["rope_theta"],
        qk_norm="before_rope",
    )
    layers_per_block = math.ceil(config["num_hidden_layers"] / config.get("attnres_num_blocks", math.inf))
    block_size = {"full": 1, "block": 2 * layers_per_block}[config["attnres_mode"]]
    model = llama_decoder(config, attention, AttentionResidualsConfig(block_size=block_size))
    weights = Weights(golden)
    weights.follow(state_map("attnres_qwen3", model.config))
    weights.load(model)
    computed = {**logits_and_gradients(model, golden), **dict(weights.gradients(model))}
    for index, state, mixed, _ in _reads(model, golden):
        computed[f"output/mix_{index}"] = mixed
        if index % 2 == 0:
            computed[f"output/partial_{index // 2}"] = state.values[-1]
    return computed


@torch.no_grad()
def _reads(model: Decoder, golden: Golden) -> Iterator[tuple[int, Sources, Tensor, Tensor]]:
    """Yields the number of each read with its sources, its mixture and its weights; read 0 is that of sublayer 0."""
    for index, state in enumerate(states(model, golden)):
        place = sublayer_list(model)[index].depth if index < len(sublayer_list(model)) else model.ends
        read: Any = place.query
        if read is None:
            yield index, state, state.values[0], torch.ones_like(state.inverse_rms[0])[None]
        else:
            query = read.pseudo_query * read.key_gain
            yield index, state, read(state)[0], depth_weights(state.values, state.inverse_rms, query)


def _no_key_norm(patch: pytest.MonkeyPatch) -> None:
    for module in (attention_residuals, depth_query):
        patch.setattr(module, "passing_factor", lambda v, eps, impl: (torch.ones_like(v[..., 0]), v))


def _no_key_norm_in_operator(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(globals(), "inverse_rms", lambda x, eps: torch.ones_like(x[..., 0]))


def _no_key_gain(patch: pytest.MonkeyPatch) -> None:
    def forward(self: DepthQuery, sources: Sources) -> tuple[Tensor, Sources]:
        assert self.key_gain is not None
        return depth_read(sources.values, sources.inverse_rms, self.pseudo_query + 0 * self.key_gain), sources

    patch.setattr(DepthQuery, "forward", forward)


def _raw_values(patch: pytest.MonkeyPatch) -> None:
    right = passing_read
    patch.setattr(depth_query, "passing_read", lambda *given, values, **options: right(*given, **options))


def _no_scale(patch: pytest.MonkeyPatch) -> None:
    right = AttentionResidualsConfig.read_form

    def read_form(self: AttentionResidualsConfig, index: int, stack: LayerStack) -> depth_query.ReadForm:
        return dataclasses.replace(right(self, index, stack), score_scale=1.0)

    patch.setattr(AttentionResidualsConfig, "read_form", read_form)


def _blocks_begin_one_late(patch: pytest.MonkeyPatch) -> None:
    right = attention_residuals.AttentionResiduals.__init__

    def init(self: Any, config: AttentionResidualsConfig, site: Any) -> None:
        right(self, config, site)
        self.opens_source = site.index == 0 or site.index % config.block_size == 1

    patch.setattr(attention_residuals.AttentionResiduals, "__init__", init)


def _norm_of_each_head(patch: pytest.MonkeyPatch) -> None:
    def read(sources: Any, factors: Any, query: Tensor, n_heads: int) -> Tensor:
        slices = [[v.contiguous() for v in x.chunk(n_heads, -1)] for x in (*sources, query)]
        parts = zip(*slices, strict=True)
        return torch.cat([right(vs, [source_factor(v, 1e-6) for v in vs], q) for *vs, q in parts], -1)

    right = depth_read
    patch.setitem(globals(), "depth_read", read)


def _merge_without_scores(patch: pytest.MonkeyPatch) -> None:
    late_read = two_phase.late_read

    def merge(early: two_phase.EarlyRead, *rest: Any) -> Tensor:
        return late_read(early._replace(log_total=torch.zeros_like(early.log_total)), *rest)

    patch.setattr(two_phase, "late_read", merge)


ADAPTER = Adapter(
    claims={
        r"attnres-op(-.*)?": run_operator,
        r"attnres-twophase-op(-.*)?": run_two_phase,
        r"attnres-inkling2-op(-.*)?": run_inkling2,
        r"mhar-op(-.*)?": run_heads,
        r"attnres-(full|block\d*)-qwen3(-.*)?": run_qwen3,
        r"attnres-(full|block\d*)(-.*)?": run_fla,
    },
    mistakes=(
        Mistake("no norm of the keys", "attnres-op", _no_key_norm_in_operator),
        Mistake("no norm of the keys", "attnres-op-onorm", _no_key_norm_in_operator),
        Mistake("no norm of the keys", "attnres-twophase-op", _no_key_norm_in_operator),
        Mistake("a merge that ignores the scores of the first phase", "attnres-twophase-op", _merge_without_scores),
        Mistake("values that are not normalised", "attnres-inkling2-op", _raw_values),
        Mistake("scores that are not divided by the root of the width", "attnres-inkling2-op", _no_scale),
        Mistake("a norm of the keys per head", "mhar-op", _norm_of_each_head),
        Mistake("no norm of the keys", "attnres-full", _no_key_norm),
        Mistake("no norm of the keys", "attnres-full-qwen3", _no_key_norm),
        Mistake("no gain of the keys", "attnres-block2", _no_key_gain),
        Mistake("blocks that begin one sublayer late", "attnres-block4", _blocks_begin_one_late),
        Mistake("blocks that begin one sublayer late", "attnres-block-qwen3", _blocks_begin_one_late),
    ),
)
