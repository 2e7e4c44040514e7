"""N-gram tables: Engram's demo and operators, DeepSeek-V4.1, Qwen3.8, LongCat and modded-nanogpt.

Models with M streams are M of our mixers, one for each stream, that share the table and the map of values.
"""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoaxis.core.layout import TokenLayout
from twoaxis.core.position import LayerStack, SublayerInfo
from twoaxis.ops import ngram_gate, ngram_hash
from twoaxis.ops.ngram_hash import NOTHING, RowHash, bigram_rows, sign_rows, token_window
from twoaxis.ops.norm import rms_norm
from twoaxis.sequence import NgramEmbeddingConfig, ngram_embedding, ngram_table
from twoaxis.sequence.ngram_embedding import NgramEmbedding

from ..golden import Golden, gradient
from . import Adapter, Mistake


def mixers(options: list[dict[str, Any]], width: int, vocab_size: int, eps: float, layer: int, before: int) -> list[Any]:
    """One mixer for each stream, in block `layer` behind as many mixers of the same kind; table and values are those of the
    first one."""
    configs = [NgramEmbeddingConfig(**each) for each in options]
    slots = [SublayerInfo()] * (layer + 1)
    slots[:before] = [SublayerInfo(hashed=configs[0].hashed)] * before
    site = LayerStack(width, eps, (1,) * (layer + 1), tuple(slots), vocab_size).sites[layer]
    built = [config.build(site).double() for config in configs]
    for mixer in built[1:]:
        mixer.table.weight = built[0].table.weight
    return built


def set_to(parameter: nn.Parameter, *parts: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(torch.cat(parts).reshape(parameter.shape))


def values_of(gradients: list[Tensor], width: int) -> Tensor:
    """The gradient of what all streams share, which stands behind that of keys."""
    return torch.stack([each[width:] for each in gradients]).sum(0)


def check_hash(golden: Golden, mixer: Any, factors: Tensor, sizes: Tensor) -> None:
    """Compares multipliers and primes, which the golden tensors have as inputs."""
    found = (mixer.table.hash.factors, mixer.table.hash.sizes)
    assert found == (tuple(factors.tolist()), tuple(sizes.flatten().tolist())), f"{golden.name}: output/hash: {found}"


def hash_ids(mixer: NgramEmbedding, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
    """Our rows within each table."""
    table = mixer.table
    ids = table._ids(tokens)
    return table.hash.rows(table._window(ids, TokenLayout.contiguous(ids.shape[1]), ids.shape[1]))


def run_demo(golden: Golden) -> Mapping[str, Tensor]:
    """The module of one layer, and the ids of every layer; streams take raw ids with the table, or compressed ones."""
    c = golden.about["config"]
    ids, table = golden.take("input/input_ids"), golden.take("input/lookup_table")
    order, D, M = c["max_ngram_size"], c["hidden_size"], c["hc_mult"]
    options: dict[str, Any] = {
        **{"preset": "engram", "order": order, "heads": c["n_head_per_ngram"], "rows": c["engram_vocab_size"]},
        **{"row_width": c["n_embed_per_ngram"] // c["n_head_per_ngram"], "seed": c["seed_hash"], "kernel": c["kernel_size"]},
        **{"key_eps": torch.finfo(torch.float64).eps, "conv_eps": 1e-5},
    }
    raw = {**options, "compression": table.tolist(), "fill_id": c["pad_id_raw"]}
    mapped = {**options, "fill_id": int(table[c["pad_id_raw"]])}
    found: dict[str, Tensor] = {}
    for place, layer in enumerate(c["layer_ids"]):
        (one,) = mixers([raw], D, c["V"], 1e-6, layer, place)
        found[f"output/hash_ids_layer{layer}"] = hash_ids(one, ids)
        check_hash(golden, one, *(golden.take(f"input/{name}_layer{layer}") for name in ("multipliers", "primes")))
    place = c["layer_ids"].index(c["module_layer"])
    with_table = mixers([raw] * M, D, c["V"], 1e-6, c["module_layer"], place)
    without = mixers([mapped] * M, D, c["compressed_V"], 1e-6, c["module_layer"], place)
    streams = [*with_table[: M // 2], *without[M // 2 :]]
    for mixer in streams:
        mixer.table.weight = streams[0].table.weight
    set_to(streams[0].table.weight, golden.take("param/multi_head_embedding.embedding.weight"))
    gains = [golden.take(f"param/norm2.{s}.weight").requires_grad_() for s in range(M)]
    value, value_bias = (golden.take(f"param/value_proj.{name}") for name in ("weight", "bias"))
    taps = golden.take("param/short_conv.conv.weight").unflatten(0, (M, D))
    for s, mixer in enumerate(streams):
        set_to(mixer.maps.weight, golden.take(f"param/key_projs.{s}.weight"), value)
        set_to(mixer.bias, golden.take(f"param/key_projs.{s}.bias"), value_bias)
        set_to(mixer.key_gain, golden.take(f"param/norm1.{s}.weight"))
        set_to(mixer.conv_gain, golden.take(f"param/short_conv.norms.{s}.weight"))
        set_to(mixer.taps, taps[s])
    h = golden.take("input/hidden_states").requires_grad_()
    layout = TokenLayout.contiguous(ids.shape[1])
    updates = []
    for s, mixer in enumerate(streams):
        query = rms_norm(h[:, :, s], gains[s], torch.finfo(torch.float64).eps)
        updates.append(mixer(query, layout.of(ids if s < M // 2 else table[ids]))[0])
    y = torch.stack(updates, dim=2)
    y.backward(golden.take("input/cotangent"))
    found |= {"output/y": y, "grad/hidden_states": gradient(h)}
    rows = streams[0].table(ids, layout, ngram_table.IdHistory()).rows
    found["output/embeddings"] = rows.flatten(2)
    found["grad/multi_head_embedding.embedding.weight"] = gradient(streams[0].table.weight)
    found["grad/value_proj.weight"] = values_of([gradient(mixer.maps.weight) for mixer in streams], D)
    found["grad/value_proj.bias"] = values_of([gradient(mixer.bias) for mixer in streams], D)
    found["grad/short_conv.conv.weight"] = torch.cat([gradient(mixer.taps) for mixer in streams]).unsqueeze(1)
    for s, mixer in enumerate(streams):
        found[f"grad/key_projs.{s}.weight"] = gradient(mixer.maps.weight)[:D]
        found[f"grad/key_projs.{s}.bias"] = gradient(mixer.bias)[:D]
        found[f"grad/norm1.{s}.weight"] = gradient(mixer.key_gain)
        found[f"grad/norm2.{s}.weight"] = gradient(gains[s])
        found[f"grad/short_conv.norms.{s}.weight"] = gradient(mixer.conv_gain)
    return found


def run_v41(golden: Golden) -> Mapping[str, Tensor]:
    """Masked tokens are blanks: an id beyond the vocabulary stands for them."""
    c = golden.about["config"]
    D, M, order, eps = c["hidden_size"], c["hc_mult"], c["engram_max_ngram_size"], c["rms_norm_eps"]
    table = golden.take("input/lookup_table")
    tokens = golden.take("input/input_ids").masked_fill(~golden.take("input/token_mask"), len(table))
    options: dict[str, Any] = {
        **{"preset": "deepseek_v41", "order": order, "heads": c["engram_n_heads"], "rows": [c["engram_vocab_size"]]},
        **{"row_width": c["engram_head_dim"], "key_eps": eps, "blank_ids": [len(table)]},
    }
    raw = {**options, "compression": [*table.tolist(), 0], "fill_id": c["pad_id_raw"]}
    found, ids = {}, []
    for place, layer in enumerate(c["engram_layer_ids"]):
        (one,) = mixers([raw], D, len(table) + 1, eps, layer, place)
        check_hash(golden, one, *(golden.take(f"input/{name}")[place] for name in ("multipliers", "primes")))
        ids.append(hash_ids(one, tokens) + golden.take("input/offsets")[place])
    found["output/hash_ids"] = torch.stack(ids, dim=2)
    # The same ids, compressed before: the blank keeps an id of its own.
    new, size = torch.tensor([*table.tolist(), c["compressed_V"]]), c["compressed_V"]
    mapped = {**options, "fill_id": int(table[c["pad_id_raw"]]), "blank_ids": [size]}
    place = c["engram_layer_ids"].index(c["module_layer"])
    streams = mixers(([raw, mapped] * M)[:M], D, size, eps, c["module_layer"], place)
    weight, rows = golden.take("param/embed.weight"), sum(streams[0].table.hash.sizes)
    set_to(streams[0].table.weight, weight[:rows])
    maps = golden.take("param/wkv.weight").unflatten(0, (M + 1, D))
    gains, keys = (golden.take(f"param/{name}_weight") for name in "qk")
    gains.requires_grad_()
    for s, mixer in enumerate(streams):
        set_to(mixer.maps.weight, maps[s], maps[M])
        set_to(mixer.key_gain, keys[s])
    h = golden.take("input/hidden_streams").requires_grad_()
    layout = TokenLayout.contiguous(tokens.shape[1])
    updates = [
        mixer(rms_norm(h[:, :, s], gains[s], eps), layout.of(new[tokens] if s % 2 else tokens))[0]
        for s, mixer in enumerate(streams)
    ]
    y = h + torch.stack(updates, dim=2)
    y.backward(golden.take("input/cotangent"))
    found |= {"output/streams": y, "grad/hidden_streams": gradient(h), "grad/q_weight": gradient(gains)}
    found["grad/k_weight"] = torch.stack([gradient(mixer.key_gain) for mixer in streams])
    # No hash finds the rows behind those of all tables.
    found["grad/embed.weight"] = F.pad(gradient(streams[0].table.weight), (0, 0, 0, len(weight) - rows))
    by_map = [gradient(mixer.maps.weight) for mixer in streams]
    found["grad/wkv.weight"] = torch.cat([*(each[:D] for each in by_map), values_of(by_map, D)])
    return found


def run_gate(golden: Golden) -> Mapping[str, Tensor]:
    """The operators with M streams."""
    config = golden.about["config"]
    eps, D, layers = config["eps"], config["hidden_size"], []
    window = list(golden.take("input/ngram_token_ids").long().T.unsqueeze(1))
    for factors, sizes, offsets in zip(
        *(golden.take(f"input/{name}") for name in ("multipliers", "vocab_sizes", "offsets")), strict=True
    ):
        one = RowHash("pcg64", config["max_ngram_size"], tuple(sizes.flatten().tolist()), tuple(factors.tolist()))
        assert list(one.offsets) == offsets.tolist()
        layers.append(one.rows(window)[0] + offsets)
    h, k, v = (golden.take(f"input/{name}").requires_grad_() for name in ("hidden_states", "k", "v"))
    gain, key_gain = (golden.take(f"param/weight_{name}").requires_grad_() for name in ("hidden", "embed"))
    query = torch.stack([rms_norm(x, own, eps) for x, own in zip(h.unbind(1), gain, strict=True)], dim=1)
    y = h + ngram_gate.ngram_gate(query, k, key_gain, v.unsqueeze(1), eps)
    y.backward(golden.take("input/cotangent"))
    scores = ngram_gate.ngram_scores(query, k, key_gain, eps)
    norms = [x.square().mean(-1).add(eps).sqrt() for x in (h, k)]
    return {
        "output/hash_ids": torch.stack(layers).to(torch.int32),
        "output/raw_dot": scores * norms[0] * norms[1] * D**0.5,
        "output/gate": torch.sigmoid(ngram_gate.signed_root(scores)),
        "output/y": y,
        **{f"grad/{name}": gradient(leaf) for name, leaf in (("hidden_states", h), ("k", k), ("v", v))},
        "grad/weight_hidden": gradient(gain),
        "grad/weight_embed": gradient(key_gain),
    }


def run_qwen(golden: Golden) -> Mapping[str, Tensor]:
    """One table layer; norms of weight w have the gain 1 + w."""
    c = golden.about["config"]
    D, M, eps, eos = c["hidden_size"], c["hc_count"], c["rms_norm_eps"], c["eos_token_id"]
    columns = c["heads_per_ngram"] * (c["ngram_size"] - 1)
    options: dict[str, Any] = {
        **{"preset": "qwen4exp", "order": c["ngram_size"], "heads": c["heads_per_ngram"], "seed": c["seed"]},
        **{"rows": [c["ngram_vocab_size_base"]], "row_width": c["ple_embed_dim"] // columns, "kernel": c["conv_kernel"]},
        **{"row_multiple": c["make_ngram_vocab_size_divisible_by"], "fill_id": eos, "end_ids": [eos]},
    }
    assert c["dilation"] == c["ngram_size"]
    streams = mixers([options] * M, D, c["vocab_size"], eps, c["ple_layer_index"] + 1, c["ple_layer_index"])
    first, ids = streams[0], golden.take("input/input_ids")
    check_hash(golden, first, *(golden.take(f"input/{name}") for name in ("multipliers", "primes")))
    set_to(first.table.weight, golden.take("param/ple_embedding.ngram_embedding.weight"))
    names = ("norm_query", "norm_key", "norm_conv", "key_proj", "conv1d")
    query, key_gain, conv_gain, keys, taps = (golden.take(f"param/{name}.weight").unflatten(0, (M, D)) for name in names)
    query.requires_grad_()
    value = golden.take("param/value_proj.weight")
    for s, mixer in enumerate(streams):
        set_to(mixer.maps.weight, keys[s], value)
        set_to(mixer.key_gain, 1 + key_gain[s])
        set_to(mixer.conv_gain, 1 + conv_gain[s])
        set_to(mixer.taps, taps[s])
    h = golden.take("input/hidden_states").requires_grad_()
    layout = TokenLayout.contiguous(ids.shape[1]).of(ids)
    split = h.unflatten(-1, (M, D))
    updates = [mixer(rms_norm(split[:, :, s], 1 + query[s], eps), layout)[0] for s, mixer in enumerate(streams)]
    y = torch.cat(updates, dim=-1)
    y.backward(golden.take("input/cotangent"))
    by_map = [gradient(mixer.maps.weight) for mixer in streams]
    return {
        "output/ngram_ids": hash_ids(first, ids) + golden.take("input/offsets"),
        "output/y": y,
        "grad/hidden_states": gradient(h),
        "grad/norm_query.weight": gradient(query).flatten(),
        "grad/norm_key.weight": torch.cat([gradient(mixer.key_gain) for mixer in streams]),
        "grad/norm_conv.weight": torch.cat([gradient(mixer.conv_gain) for mixer in streams]),
        "grad/conv1d.weight": torch.cat([gradient(mixer.taps) for mixer in streams]).unsqueeze(1),
        "grad/key_proj.weight": torch.cat([each[:D] for each in by_map]),
        "grad/value_proj.weight": values_of(by_map, D),
        "grad/ple_embedding.ngram_embedding.weight": gradient(first.table.weight),
    }


def run_longcat(golden: Golden) -> Mapping[str, Tensor]:
    """Rows and token embedding, summed here and divided by their number as the published model does."""
    c = golden.about["config"]
    D, V, order, heads = c["hidden_size"], c["text_vocab_size"], c["emb_neighbor_num"], c["emb_split_num"]
    columns, ids = heads * (order - 1), golden.take("input/input_ids")
    tables = [golden.take(f"param/embedders.{i}.weight") for i in range(columns)]
    maps = [golden.take(f"param/post_projs.{i}.weight") for i in range(columns)]
    ignored, eos = c["oe_ignored_token_ids"], c["eos_token_id"]
    options = {
        **{"preset": "longcat", "order": order, "heads": heads, "rows": [c["ngram_vocab_size_ratio"] * V]},
        **{"row_width": tables[0].shape[1], "untrained_row": c["pad_token_id"]},
        **{"end_ids": [eos], "blank_ids": [0, *ignored]},
    }
    (mixer,) = mixers([options], D, V, 1e-6, 0, 0)
    set_to(mixer.table.weight, *tables)
    set_to(mixer.maps.weight, torch.cat(maps, dim=1))
    words = golden.take("param/word_embeddings.weight").requires_grad_()
    summed = words[ids] + mixer(torch.zeros(*ids.shape, D).double(), TokenLayout.contiguous(ids.shape[1]).of(ids))[0]
    x = torch.where(torch.isin(ids, torch.tensor(ignored)).unsqueeze(-1), summed, summed / (1 + columns))
    x.backward(golden.take("input/cotangent"))
    by_table = gradient(mixer.table.weight).split([len(table) for table in tables])
    by_map = gradient(mixer.maps.weight).chunk(columns, dim=1)
    return {
        "output/ngram_ids": hash_ids(mixer, ids),
        "output/x": x,
        "grad/word_embeddings.weight": gradient(words),
        **{f"grad/embedders.{i}.weight": found for i, found in enumerate(by_table)},
        **{f"grad/post_projs.{i}.weight": found for i, found in enumerate(by_map)},
    }


def run_modded(golden: Golden) -> Mapping[str, Tensor]:
    """The operators; the reference takes the id of no pair for the token before the second one."""
    config, found = golden.about["config"], {}
    for name, rows in (("", config["bigram_vocab_size"]), ("_50304", config["bigram_vocab_size_big"])):
        tokens = golden.take(f"input/ids{name}").long()[None]
        window = token_window(tokens, tokens.shape[1], order=2, fill=NOTHING)
        before = window[1].clone()
        before[:, 1] = rows - 1
        found[name] = bigram_rows(window[0], before, rows)[0]
        if not name:
            found["signs"] = sign_rows(window[0], window[1], config["sign_rows"])[0]
    value = golden.take("param/bigram_embed")[found[""]] * golden.take("param/bigram_sign_table")[found["signs"]]
    return {
        "output/bigram_ids": found[""].to(torch.int32),
        "output/bigram_ids_50304": found["_50304"].to(torch.int32),
        "output/sign_idx": found["signs"],
        "output/x0_bigram": value,
    }


def _other_layer(patch: pytest.MonkeyPatch) -> None:
    right = ngram_hash.pcg64_multipliers
    patch.setattr(ngram_hash, "pcg64_multipliers", lambda seed, layer, order, ids: right(seed, layer + 1, order, ids))


def _primes_used_twice(patch: pytest.MonkeyPatch) -> None:
    right = ngram_hash.distinct_primes
    patch.setattr(ngram_hash, "distinct_primes", lambda wanted: tuple(p for one in wanted for p in right((one,))))


def _sum_for_xor(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tensor, "__xor__", lambda a, b: a + b)


def _undilated(patch: pytest.MonkeyPatch) -> None:
    right = ngram_embedding.causal_conv
    patch.setattr(ngram_embedding, "causal_conv", lambda x, w, **options: right(x, w, **{**options, "dilation": 1}))


def _no_root(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ngram_gate, "signed_root", lambda scores, at_zero="sign": scores)


def _look_back_past_blanks(patch: pytest.MonkeyPatch) -> None:
    right = ngram_table.token_window
    patch.setattr(
        ngram_table, "token_window", lambda ids, tokens, order, fill, documents, ends: right(ids, tokens, order, fill)
    )


def _ends_forgotten(patch: pytest.MonkeyPatch) -> None:
    right = ngram_table.token_window
    patch.setattr(
        ngram_table,
        "token_window",
        lambda ids, tokens, order, fill, documents, ends: right(ids, tokens, order, fill, documents),
    )


def _wide_products(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ngram_hash, "_int32", lambda x: x)


ADAPTER = Adapter(
    claims={
        r"engram-demo.*": run_demo,
        r"engram-v41.*": run_v41,
        r"engram-gate-op.*": run_gate,
        r"ple-qwen4exp.*": run_qwen,
        r"ngram-embed-longcat.*": run_longcat,
        r"bigram-hash-modded.*": run_modded,
    },
    mistakes=(
        Mistake("a convolution of neighbours", "engram-demo", _undilated),
        Mistake("a gate without the root", "engram-demo", _no_root),
        Mistake("look-back past blanks", "engram-v41", _look_back_past_blanks),
        Mistake("a gate without the root", "engram-gate-op", _no_root),
        Mistake("a sum for the exclusive or", "engram-gate-op", _sum_for_xor),
        Mistake("segments that do not end", "ple-qwen4exp", _ends_forgotten),
        Mistake("segments that do not end", "ngram-embed-longcat", _ends_forgotten),
        Mistake("primes that another layer has", "engram-demo", _primes_used_twice),
        Mistake("the hash of another layer", "engram-v41", _other_layer),
        Mistake("products of 64 bits", "bigram-hash-modded", _wide_products),
    ),
)
