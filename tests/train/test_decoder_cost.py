"""The cost of a decoder, summed from declarations, is what the built decoder has."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from twoaxis import DEPTH, FEED_FORWARD, SEQUENCE, Decoder, DecoderConfig
from twoaxis.core.cost import Shape
from twoaxis.core.parameters import declarations
from twoaxis.ledger.decoder_memory import decoder_cache_bytes
from twoaxis.model.cost import decoder_cost

ATTENTION = {"kind": "attention", "n_heads": 2}


def examples(table: object, slot: str) -> list[Any]:
    rows = list(table)  # type: ignore[call-overload]
    return [pytest.param(slot, row.example(name), id=f"{row.kind}-{name}") for row in rows for name in row.examples]


EXAMPLES = [*examples(DEPTH, "depth"), *examples(SEQUENCE, "sequence"), *examples(FEED_FORWARD, "feed_forward")]
TIED_IN_TURN = [pytest.param(*each.values, number % 2 == 0, id=each.id) for number, each in enumerate(EXAMPLES)]
"""A head of its own is the decoder's and no mixer's."""


def config(slot: str, example: object, tie_embeddings: bool = True) -> DecoderConfig:
    parts = {"depth": "residual", "sequence": ATTENTION, "feed_forward": "swiglu", slot: example}
    blocks = [[parts["sequence"], parts["feed_forward"]], [ATTENTION, parts["sequence"], "gelu"]]
    data = {"vocab_size": 23, "d_model": 16, "n_layers": 3, "tie_embeddings": tie_embeddings}
    return DecoderConfig.from_data({**data, "depth": parts["depth"], "blocks": blocks})


@pytest.mark.parametrize(("slot", "example", "tie_embeddings"), TIED_IN_TURN)
def test_parameters_are_exact(slot: str, example: object, tie_embeddings: bool) -> None:
    decoder = config(slot, example, tie_embeddings)
    built = sum(parameter.numel() for parameter in Decoder(decoder).parameters())
    assert decoder_cost(decoder, Shape(2, 5)).params == built


@pytest.mark.parametrize("kind", ["residual", "deep_delta"])
def test_matrix_products_are_exact(kind: str) -> None:
    decoder = config("depth", kind)
    model = Decoder.build(decoder)
    matrices = {name for name, _, declaration in declarations(model) if declaration.tag == "matrix"}
    assert len(matrices) > 10
    cost = decoder_cost(decoder, Shape(2, 5))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.randint(23, (2, 5)))
    counted = counter.get_flop_counts()["Global"]
    assert cost.matmul_flops == sum(flops for op, flops in counted.items() if op in (torch.ops.aten.mm, torch.ops.aten.addmm))


def test_costs_grow_with_tokens_and_cache_does_not_shrink() -> None:
    decoder = config("depth", "attention_residuals")
    one, two = decoder_cost(decoder, Shape(1, 8)), decoder_cost(decoder, Shape(2, 8))
    assert two.params == one.params
    assert (two.matmul_flops, two.pair_flops, two.elementwise_flops) == (
        2 * one.matmul_flops,
        2 * one.pair_flops,
        2 * one.elementwise_flops,
    )
    assert decoder_cache_bytes(decoder, Shape(2, 8)) == 2 * decoder_cache_bytes(decoder, Shape(1, 8)) > 0
