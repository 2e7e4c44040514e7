"""MUDDFormer: the authors' PyTorch models, sequential and parallel, with decoding, and their JAX training code."""

from collections.abc import Mapping
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoaxis.checkpoints.layouts.muddformer import muddformer_sums
from twoaxis.core.parameters import initialise
from twoaxis.core.position import LayerStack, SublayerInfo
from twoaxis.core.views import QKV
from twoaxis.depth import MUDDFormerConfig, token_sums
from twoaxis.depth.muddformer import MUDDFormer, MUDDFormerEnds
from twoaxis.depth.token_sums import BlockOutputs, Sum
from twoaxis.feed_forward import SwiGLUConfig
from twoaxis.ops import weight_mlp

from ..backbones.depth_loop import loop_paths
from ..backbones.muddformer import Body, Cache, Jax, Pythia, Torch
from ..golden import Golden, gradient
from . import Adapter, Mistake

Pairs = Mapping[str, str]


class Model(nn.Module):
    """Our depth mixers and ends around the branches of a body."""

    def __init__(self, depth: MUDDFormerConfig, body: Body, d_model: int, n_blocks: int) -> None:
        super().__init__()
        slots = (SublayerInfo("attention", takes_views=True), SublayerInfo("swiglu")) * n_blocks
        stack = self.stack = depth.prepare(LayerStack(d_model, body.eps, (2,) * n_blocks, slots))
        self.body = body
        mixers, ends = depth.build(stack)
        self.mixers, self.ends = nn.ModuleList(mixers), ends
        initialise(self, 0)
        self.to(body.golden.tensors["input/cotangent"].dtype)

    def sum_after(self, block: int) -> Sum:
        """Our sum after this many blocks."""
        owner: Any = self.mixers[2 * block] if 2 * block < len(self.mixers) else self.ends
        return owner.sum

    def forward(self, embeddings: Tensor, cache: Cache | None = None) -> tuple[list[BlockOutputs], list[Any], Tensor]:
        """Returns the states between blocks, what each block reads on its ways, and what is left."""
        ends = cast(MUDDFormerEnds, self.ends)
        state, states, read = ends.enter(embeddings)[0], [], []
        for index, module in enumerate(self.mixers):
            mixer = cast(MUDDFormer, module)
            views, carry, _ = mixer.read(state)
            if index % 2 == 0:
                states.append(state)
                read.append((views, carry))
                inputs = tuple(views) if isinstance(views, QKV) else (views,) * 3
                update = self.body.attention(index // 2, cast(Any, inputs), cache)
            else:
                update = self.body.feed_forward(index // 2, cast(Tensor, views))
            state = mixer.write(state, update, views, carry)
        return [*states, state], read, ends.leave(state)[0]


def run(golden: Golden) -> Mapping[str, Tensor]:
    """The PyTorch code: logits, every weight and input of a block, and token-by-token decoding."""
    config = golden.about["config"]
    is_pythia = golden.name.startswith("muddpythia")
    depth = MUDDFormerConfig(
        residual="parallel" if is_pythia else "sequential",
        hidden="round64" if config["round64"] else "paper",
        expand_last=4 if config["expand_last"] else 1,
    )
    n_blocks = config["n_layer"]
    _assert_widths(golden.about["ffn_widths"], config["intermediate_size"])
    model = Model(depth, (Pythia if is_pythia else Torch)(golden), config["dim"], n_blocks)
    names = {ours: theirs for ours, (theirs,) in muddformer_sums(loop_paths(depth, model.stack)).names().items()}
    _load(model, {ours: golden.take(f"param/{theirs}") for ours, theirs in names.items()})
    table = model.body.embedding()
    ids = golden.take("input/input_ids")
    embeddings = F.embedding(ids, table)
    embeddings.retain_grad()
    states, read, left = model(embeddings)
    logits = model.body.logits(left)
    logits.backward(golden.take("input/cotangent"))
    computed: dict[str, Tensor] = {
        "output/logits": logits,
        "output/decode_logits": _decode(model, embeddings.detach(), golden.about["decode_prefill_len"]),
        f"output/stream_{n_blocks - 1}_r": left,
        "grad/tok_embeddings.weight": gradient(table),
        "grad/input_embeddings": gradient(embeddings),
        **{f"output/X_{i}": state.stream for i, state in enumerate(states)},
        **{f"grad/{theirs}": gradient(model.get_parameter(ours)) for ours, theirs in names.items()},
    }
    for i, (views, (_, base)) in enumerate(read[1:]):
        computed |= {f"output/stream_{i}_{way}": x for way, x in zip("qkvr", (*views, base), strict=True)}
    for i, state in enumerate(states[1:]):
        module = model.sum_after(i + 1)
        total = module.weights(state.stream).permute(0, 2, 3, 1)
        computed |= {f"output/dw_total_{i}": total, f"output/dw_dynamic_{i}": total - module.static[:, None, None]}
    return computed


def run_training_code(golden: Golden) -> Mapping[str, Tensor]:
    """The JAX code, with and without its norms around the sums."""
    config = golden.about["config"]
    n_blocks, normed = config["base_num_decoder_layers"], config["mudd_prenorm"]
    assert normed == config["mudd_postnorm"]
    depth = MUDDFormerConfig(
        hidden="round64" if config["dynamic_dense_hidden_round"] else "paper",
        expand_last=config["dynamic_dense_hidden_expand"][-1],
        gelu="tanh",
        source_norm="rms" if normed else "none",
        post_norm="residual" if normed else "none",
        weight_eps=1e-6,
    )
    widths = [golden.tensors[f"param/decoder/layers_{i}/mlp/wi_0/kernel"].shape[1] for i in range(n_blocks)]
    if config["dynamic_mlp_dim"]:
        _assert_widths(widths, config["base_mlp_dim"])
    model = Model(depth, Jax(golden), config["base_emb_dim"], n_blocks)
    names: dict[str, str] = {}
    for i in range(n_blocks + 1):
        ours = f"mixers.{2 * i}.sum" if i < n_blocks else "ends.sum"
        if normed:
            names[f"{ours}.source_gain"] = f"mudd_prenorm_{i - 1}/scale" if i else "mudd_prenorm/scale"
        if i:
            layer = f"layers_{i - 1}"
            names[f"{ours}.static"] = f"{layer}/dense_proj2.bias"
            names[f"{ours}.to_hidden"] = f"{layer}/dynamic_dense_conn1/kernel"
            names[f"{ours}.to_weights"] = f"{layer}/dynamic_dense_conn2/kernel"
        if i and normed:
            names[f"{ours}.input_gain"] = f"layers_{i - 1}/pre_dense_proj1_norm/scale"
            names[f"{ours}.post_gain"] = f"mudd_postnorm_{i - 1}/scale"
    for i in range(n_blocks if "init_min_max_std" in golden.about else 0):
        # They start where ours do: at nothing but the newest output.
        low, high, _ = golden.about["init_min_max_std"][f"decoder/layers_{i}/dense_proj2.bias"]
        start = model.sum_after(i + 1).static.detach()
        assert (float(start.min()), float(start.max())) == (low, high)
    _load(model, {ours: _from_jax(golden.take(f"param/decoder/{theirs}"), theirs) for ours, theirs in names.items()})
    table = model.body.embedding()
    _, _, left = model(F.embedding(golden.take("input/input_ids"), table))
    logits = model.body.logits(left)
    logits.backward(golden.take("input/cotangent"))
    gradients = {}
    for ours, theirs in names.items():
        stored = golden.tensors[f"param/decoder/{theirs}"].shape
        gradients[f"grad/decoder/{theirs}"] = _to_jax(gradient(model.get_parameter(ours)), theirs).reshape(stored)
    return {"output/logits": logits, "grad/token_embedder/embedding": gradient(table), **gradients}


def _from_jax(value: Tensor, name: str) -> Tensor:
    """Their second kernel is [K C S], ours [C S, K]; the first one is transposed too."""
    return value.flatten(1).T if "dynamic_dense_conn" in name else value


def _to_jax(value: Tensor, name: str) -> Tensor:
    return value.T if "dynamic_dense_conn" in name else value


@torch.no_grad()
def _load(model: Model, values: Mapping[str, Tensor]) -> None:
    parameters = dict(model.named_parameters())
    assert parameters.keys() == values.keys(), sorted(parameters.keys() ^ values.keys())
    for name, value in values.items():
        parameters[name].copy_(value.reshape(parameters[name].shape))


@torch.no_grad()
def _decode(model: Model, embeddings: Tensor, prefill: int) -> Tensor:
    """The first tokens at once, then one at a time; only keys and values are carried along positions."""
    cache: Cache = {}
    pieces = embeddings.split([prefill, *(1,) * (embeddings.shape[1] - prefill)], dim=1)
    return torch.cat([model.body.logits(model(piece, cache)[2]) for piece in pieces], dim=1)


def _assert_widths(widths: list[int], mean: int) -> None:
    sites = LayerStack(8, 1e-6, (1,) * len(widths)).sites
    assert [SwiGLUConfig(d_ff=mean, d_ff_by_depth="rising").width_at(site) for site in sites] == widths


def _sources_before_ways(patch: pytest.MonkeyPatch) -> None:
    right = Sum.weights

    def weights(self: Sum, newest: Tensor) -> Tensor:
        found = right(self, newest)
        return found.flatten(0, 1).unflatten(0, (found.shape[1], found.shape[0])).transpose(0, 1)

    patch.setattr(Sum, "weights", weights)


def _other_gelu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(weight_mlp, "_approximation", lambda form: "none" if form == "tanh" else "tanh")


def _sequential(patch: pytest.MonkeyPatch) -> None:
    right = MUDDFormer.read

    def read(self: MUDDFormer, state: BlockOutputs, *given: Any) -> tuple[Any, Any, Any]:
        return right(self, state, *given) if self.opens_block else (state.stream, None, None)

    patch.setattr(MUDDFormer, "read", read)


def _sums_of_sums(patch: pytest.MonkeyPatch) -> None:
    """The residual way, not the block output, becomes a source."""
    right = Sum.forward

    def forward(self: Sum, state: BlockOutputs) -> Any:
        ways, kept = right(self, state)
        return ways, (*kept[:-1], ways[-1]) if kept and self.form.selection.read else kept

    patch.setattr(Sum, "forward", forward)


def _no_norm_of_the_last_way(patch: pytest.MonkeyPatch) -> None:
    right = token_sums.rms_norm

    def norm(x: Tensor, gain: Tensor, eps: float, impl: Any) -> Tensor:
        return x * gain if gain.grad_fn is not None else right(x, gain, eps, impl)

    patch.setattr(token_sums, "rms_norm", norm)


ADAPTER = Adapter(
    claims={
        r"mudd(former|pythia)-qkvr(-.*)?|muddformer-plainhid(-.*)?": run,
        r"muddformer-jax-(nonorm|prepostnorm)(-.*)?": run_training_code,
    },
    mistakes=(
        Mistake("weights laid out by source", "muddformer-plainhid-f64", _sources_before_ways),
        Mistake("weights laid out by source", "muddformer-qkvr-f32", _sources_before_ways),
        Mistake("the tanh form of GELU", "muddformer-qkvr-f64", _other_gelu),
        Mistake("sums as sources", "muddformer-qkvr-f64", _sums_of_sums),
        Mistake("a feed-forward after the attention", "muddpythia-qkvr-f64", _sequential),
        Mistake("a feed-forward after the attention", "muddpythia-qkvr-f32", _sequential),
        Mistake("sums as sources", "muddformer-jax-nonorm-f32", _sums_of_sums),
        Mistake("no norm of the residual way", "muddformer-jax-prepostnorm-f32", _no_norm_of_the_last_way),
    ),
)
