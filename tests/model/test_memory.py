"""What training keeps, beyond the examples of the tables: any options of attention, shared tables, and blocks of many kinds."""

from typing import Any

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from twoaxis.core.cost import Shape
from twoaxis.core.errors import ConfigError
from twoaxis.core.layout import TokenLayout
from twoaxis.core.measure import saved_bytes
from twoaxis.ledger.decoder_memory import (
    blocks_saved_bytes,
    decoder_saved_bytes,
    recomputing_peak_bytes,
    recomputing_saved_bytes,
)
from twoaxis.ledger.sublayer import sublayer_saved_bytes
from twoaxis.model import Decoder, DecoderConfig
from twoaxis.sequence import AttentionConfig, GatedDeltaNetConfig, KVShiftConfig, SequenceConfig
from twoaxis.testing.toy import D_MODEL, TOKENS, toy_context, toy_mixer, toy_site, toy_tokens

CANON = st.fixed_dictionaries(
    {
        "kind": st.just("canon"),
        "kernel": st.integers(2, 4),
        "form": st.sampled_from(["residual", "plain"]),
        "activation": st.sampled_from(["none", "silu"]),
        "bias": st.sampled_from(["none", "channel"]),
    }
)
LOCAL_SWA = st.fixed_dictionaries(
    {
        "kind": st.just("local_swa"),
        "window": st.sampled_from([1, 3, 33]),
        "n_heads": st.sampled_from([1, 2, 4]),
        "head_dim": st.just(2),
        "form": st.sampled_from(["residual", "plain"]),
    }
)
LOCAL = st.none() | CANON | LOCAL_SWA
PLACES = {"input_local": LOCAL, "projected_local": LOCAL}
HEADS = {
    "n_kv_heads": st.sampled_from([1, 2]),
    "head_dim": st.sampled_from([2, 4]),
    "window": st.none() | st.sampled_from([1, 2, 31, 32, 33, 48, 200]),
    "qk_norm": st.sampled_from(["none", "before_rope", "after_rope", "key_after_rope"]),
    "qk_norm_over": st.sampled_from(["head", "all_heads"]),
    "rope_dim": st.sampled_from([None, 0, 2]),
    "sink": st.sampled_from(["none", "learned"]),
}
OPTIONS: st.SearchStrategy[tuple[type[SequenceConfig], dict[str, Any]]] = st.one_of(
    st.tuples(st.just(AttentionConfig), st.fixed_dictionaries({**HEADS, **PLACES, "n_heads": st.sampled_from([2, 4])})),
    st.tuples(st.just(AttentionConfig), st.fixed_dictionaries({**HEADS, "n_heads": st.just(1), "n_kv_heads": st.just(1)})),
    st.tuples(
        st.just(KVShiftConfig),
        st.fixed_dictionaries({**HEADS, "n_heads": st.just(4), "form": st.sampled_from(["fixed", "token"])}),
    ),
    st.tuples(
        st.just(GatedDeltaNetConfig),
        st.fixed_dictionaries(
            {**PLACES, "n_heads": st.integers(1, 3), "head_dim": st.integers(1, 3), "value_dim": st.integers(2, 5)}
        ),
    ),
)


@settings(max_examples=150)
@given(
    options=OPTIONS,
    batch=st.integers(1, 3),
    tokens=st.sampled_from([2, 3, 31, 32, 33, 64, 65, 66, 96, 130]),
    dtype=st.sampled_from([torch.float64, torch.bfloat16]),
)
def test_any_mixer_keeps_what_it_declares(
    options: tuple[type[SequenceConfig], dict[str, Any]], batch: int, tokens: int, dtype: torch.dtype
) -> None:
    kind, values = options
    try:
        config = kind(**values)
    except ConfigError:
        assume(False)
        raise
    mixer, context = toy_mixer(config, dtype=dtype), toy_context(batch, tokens).to(dtype).requires_grad_()
    layout, shape = TokenLayout.contiguous(tokens), Shape(batch, tokens, dtype.itemsize)
    measured = saved_bytes(lambda: mixer(context, layout)[0], lambda update: [context, update, *mixer.parameters()])
    tables = sum(table.saved_bytes(shape) for table in config.rotations(D_MODEL))
    assert measured == sublayer_saved_bytes(config, toy_site(), shape) + tables


def decoder(**values: Any) -> DecoderConfig:
    return DecoderConfig(**values)


LOCALLY = {"input_local": "canon", "projected_local": {"kind": "local_swa", "head_dim": 4}}
MANY_KINDS = decoder(
    vocab_size=11,
    d_model=D_MODEL,
    n_layers=4,
    tie_embeddings=False,
    depth={"kind": "muddformer", "source_norm": "rms"},
    blocks=(
        ({"kind": "short_swa", "n_heads": 2, "window": 3}, {"kind": "attention", "n_heads": 2}, {"kind": "swiglu", **LOCALLY}),
        ({"kind": "attention", "n_heads": 2, "rope_theta": 500.0}, {"kind": "attention", "n_heads": 1}, "relu2"),
    ),
)


def _kept(config: DecoderConfig, dtype: torch.dtype) -> int:
    model, tokens = Decoder.build(config).to(dtype), toy_tokens()
    known: list[Tensor] = [tokens, *model.parameters()]
    return saved_bytes(lambda: model.loss(tokens, tokens), lambda _: known)


def test_blocks_of_many_kinds_add_up() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        shape = Shape(2, TOKENS, dtype.itemsize)
        assert decoder_saved_bytes(MANY_KINDS, shape) == _kept(MANY_KINDS, dtype)


def test_a_rotation_table_counts_once_however_many_layers_read_it() -> None:
    shape, kept = Shape(2, TOKENS), []
    for n_layers in (1, 2, 3):
        config = decoder(vocab_size=11, d_model=D_MODEL, n_layers=n_layers, blocks=(({"kind": "attention", "n_heads": 2},),))
        kept.append(decoder_saved_bytes(config, shape))
        assert kept[-1] == _kept(config, torch.float32)
    assert kept[2] - kept[1] == kept[1] - kept[0]


def test_the_peak_of_recomputing_is_reached_in_the_largest_block() -> None:
    shape = Shape(2, TOKENS)
    blocks = blocks_saved_bytes(MANY_KINDS, shape)
    assert len(set(blocks)) > 1
    assert recomputing_peak_bytes(MANY_KINDS, shape) == recomputing_saved_bytes(MANY_KINDS, shape) + max(blocks)
    assert recomputing_saved_bytes(MANY_KINDS, shape) < decoder_saved_bytes(MANY_KINDS, shape)
