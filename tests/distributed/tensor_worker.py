"""One tensor rank of the cases that test_tensor.py compares."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from twoaxis.core.layout import PADDING, TokenLayout
from twoaxis.core.measure import distance, perturb
from twoaxis.data import Batch
from twoaxis.model import Decoder, DecoderConfig
from twoaxis.planner.formulas.collectives import all_gather_bytes, all_reduce_bytes, reduce_scatter_bytes
from twoaxis.train.parallel.tensor import TensorDecoder, initial_parts, sum_gradients, summed_chunks
from twoaxis.train.parallel.tensor_ranks import TensorRanks
from twoaxis.train.parallel.tensor_split import SequenceSharding

VOCAB, ROWS, TOKENS, WIDTH, LAYERS = 32, 2, 16, 8, 2

BLOCK = [{"kind": "attention", "n_heads": 4, "n_kv_heads": 2, "head_dim": 4}, {"kind": "swiglu", "d_ff": 16}]
FEW_HEADS = [
    {"kind": "short_swa", "n_heads": 4, "n_kv_heads": 1, "head_dim": 4, "window": 5, "bias": "qkv", "sink": "per_token"},
    {"kind": "kv_shift", "n_heads": 4, "n_kv_heads": 2, "head_dim": 2, "form": "token", "sink": "learned"},
    {"kind": "gelu", "d_ff": 16, "input_local": "canon", "projected_local": "canon"},
]
LOCAL_MIXERS = [
    {
        "kind": "attention",
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 4,
        "qk_norm": "after_local",
        "projected_local": {"kind": "dynamic_conv", "taps": "per_head", "head_dim": 2, "scale": "unit_variance"},
        "projected_branches": ["k", "v"],
        "update_local": {"kind": "canon", "scale": "unit_variance"},
    },
    {
        "kind": "swiglu",
        "d_ff": 16,
        "input_local": "token_shift",
        "projected_local": {"kind": "dynamic_conv", "rank": 3},
        "update_local": {"kind": "dynamic_conv", "rank": 2, "kernel": 3},
    },
]

CASES: dict[str, dict[str, Any]] = {
    "plain": {"depth": "residual", "blocks": [BLOCK]},
    "few heads": {"depth": {"kind": "value_residual", "variant": "gated"}, "blocks": [FEW_HEADS]},
    "earlier tokens": {"depth": {"kind": "deep_delta", "preset": "ddl_tc_ec"}, "blocks": [BLOCK]},
    "slots": {
        "depth": "mixture_of_depths_attention",
        "n_layers": 3,
        "blocks": [[{**BLOCK[0], "qk_norm": "before_rope"}, BLOCK[1]]],
    },
    "slots and norms behind": {"depth": {"kind": "mixture_of_depths_attention", "norm": "post"}, "blocks": [BLOCK]},
    "mixed values": {"depth": "depth_value_mixing", "n_layers": 3, "blocks": [[{**BLOCK[0], "n_kv_heads": 4}, BLOCK[1]]]},
    "delayed reads": {"depth": {"kind": "mhc", "preset": "deepseek_v41", "rounds": 2}, "blocks": [BLOCK]},
    "tables of tokens": {
        "depth": {
            "kind": "per_layer_embedding",
            "d_embedding": 3,
            "stream": {"kind": "value_embedding", "stream": {"kind": "laurel_gemma3n", "rank": 2}},
        },
        "blocks": [BLOCK],
    },
    "local mixers": {"blocks": [LOCAL_MIXERS], "embedding_local": {"kind": "smear", "gate_channels": 4}},
    "three views": {"depth": "deep_cross_attention", "blocks": [BLOCK], "tie_embeddings": False},
}
WAYS: dict[str, dict[str, bool]] = {"whole rows": {}, "recomputed documents": {"documents": True, "recompute": True}}
SEQUENCES: tuple[SequenceSharding, ...] = ("none", "tensor")


def decoder_config(case: str) -> DecoderConfig:
    """The decoder of a case."""
    return DecoderConfig.from_data({"vocab_size": VOCAB, "d_model": WIDTH, "n_layers": LAYERS, **CASES[case]})


def batch() -> Batch:
    """Tokens with several documents in each row, and padding at the end of one."""
    tokens = torch.randint(VOCAB, (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    documents = torch.tensor([[0] * 3 + [1] * 7 + [2] * 6, [0] * 9 + [1] * 5 + [PADDING] * 2])
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), documents)


def run(model: Decoder, documents: bool = False, recompute: bool = False) -> Tensor:
    """The loss, with gradients."""
    tokens, targets, packed = batch()
    assert packed is not None
    total, _ = model.loss(tokens, targets, TokenLayout.packed(packed) if documents else None, recompute)
    total.backward()
    return total.detach()


@contextmanager
def counted(ranks: int) -> Iterator[list[float]]:
    """Counts the bytes that a rank of a ring sends."""
    sent, kept = [0.0], (dist.all_reduce, dist.all_gather_single, dist.reduce_scatter_single)

    def all_reduce(x: Tensor, *given: Any, **named: Any) -> Any:
        sent[0] += all_reduce_bytes(ranks, x.nbytes)
        return kept[0](x, *given, **named)

    def all_gather(out: Tensor, x: Tensor, *given: Any, **named: Any) -> Any:
        sent[0] += all_gather_bytes(ranks, out.nbytes)
        return kept[1](out, x, *given, **named)

    def reduce_scatter(out: Tensor, x: Tensor, *given: Any, **named: Any) -> Any:
        sent[0] += reduce_scatter_bytes(ranks, x.nbytes)
        return kept[2](out, x, *given, **named)

    dist.all_reduce, dist.all_gather_single, dist.reduce_scatter_single = all_reduce, all_gather, reduce_scatter
    try:
        yield sent
    finally:
        dist.all_reduce, dist.all_gather_single, dist.reduce_scatter_single = kept


INITIAL: dict[str, dict[str, Tensor]] = {}
"""The initial values of one process, for every case."""

WHOLE: dict[str, tuple[dict[str, Tensor], dict[str, tuple[Tensor, dict[str, Tensor]]]]] = {}
"""Other values of one process, and its loss and gradients by way, for every case."""


def prepare(folder: Path) -> None:
    """Computes what all ranks compare with."""
    torch.set_num_threads(1)
    for case in CASES:
        model = Decoder.build(decoder_config(case), 3)
        INITIAL[case] = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        model = perturb(model.double())
        expected = {way: (run(model, **given), taken_gradients(model)) for way, given in WAYS.items()}
        WHOLE[case] = {name: parameter.detach() for name, parameter in model.named_parameters()}, expected


def measure(case: str, rank: int, ranks: int) -> dict[str, dict[str, float]]:
    """How far loss and gradients are from those of one process, and the bytes of a step, by case, way and sharding."""
    config, (values, expected), found = decoder_config(case), WHOLE[case], dict[str, dict[str, float]]()
    for sequence in SEQUENCES:
        group = TensorRanks(None, rank, ranks, sequence)
        model = TensorDecoder(config, group, TOKENS).double()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(model.splits[name].of(values[name]))
        for way, given in WAYS.items():
            with counted(ranks) as sent:
                loss = run(model, **given)
            gradients = taken_gradients(model)
            sum_gradients(gradients, summed_chunks(model.splits, sequence), group)
            loss = loss if sequence == "none" else group.sum(loss)
            away = []
            for name, split in model.splits.items():
                part = split.of(expected[way][1].get(name, torch.zeros_like(values[name])))
                size = max(1.0, float(part.abs().max()))
                away.append(distance(gradients.get(name, torch.zeros_like(part)), part) / size)
            found[f"{case}, {way}, {sequence}"] = {
                "loss": distance(loss, expected[way][0]),
                "gradients": max(away),
                "bytes": sent[0],
            }
    return found


def taken_gradients(model: Decoder) -> dict[str, Tensor]:
    """The gradients by name, which the model then has no longer."""
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return found


def half_precision(case: str, sequence: SequenceSharding, rank: int, ranks: int) -> dict[str, float]:
    """The same under autocast, where rounding hides most; relative."""
    config = decoder_config(case)
    whole = Decoder.build(config, 3)
    group = TensorRanks(None, rank, ranks, sequence)
    model = TensorDecoder(config, group, TOKENS)
    with torch.no_grad():
        for parameter, (_, _, part) in zip(model.parameters(), initial_parts(model, 3), strict=True):
            parameter.copy_(part)
    with torch.autocast("cpu", torch.bfloat16):
        expected = run(whole)
        with counted(ranks) as sent:
            loss = run(model)
    found = loss if sequence == "none" else group.sum(loss)
    return {"loss": distance(found, expected) / expected.item(), "bytes": sent[0]}


def starts(case: str, rank: int, ranks: int) -> list[str]:
    """The parameters whose initial values are not the parts of those of one process."""
    whole = INITIAL[case]
    model = TensorDecoder(decoder_config(case), TensorRanks(None, rank, ranks, "none"), TOKENS)
    parts = {name: part for name, _, part in initial_parts(model, 3)}
    here = {name: cast(Tensor, one).shape for name, one in model.named_parameters()}
    assert parts.keys() == here.keys() == whole.keys()
    return [name for name in here if not torch.equal(parts[name], model.splits[name].of(whole[name]))]


def main(folder: Path, rank: int, ranks: int) -> None:
    """Measures every case."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "meeting"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    found: dict[str, dict[str, float]] = {}
    for case in CASES:
        found |= measure(case, rank, ranks)
    wrong = {case: starts(case, rank, ranks) for case in CASES}
    half = {sequence: half_precision("plain", sequence, rank, ranks) for sequence in SEQUENCES}
    (folder / f"found-{rank}.json").write_text(json.dumps({"runs": found, "starts": wrong, "half": half}))
    dist.destroy_process_group()
