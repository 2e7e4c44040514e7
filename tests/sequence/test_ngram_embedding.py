"""N-gram tables in a model: their start, what resets them, what is recorded, refused and trained, and what they cost."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from twoaxis import CheckpointError, ConfigError, Decoder, DecoderConfig, load
from twoaxis.core.cost import Shape
from twoaxis.core.layout import PADDING, TokenLayout
from twoaxis.core.parameters import initialise
from twoaxis.model.cost import decoder_cost
from twoaxis.planner import ModelShape
from twoaxis.planner.coefficients import coefficients
from twoaxis.planner.formulas.counts import parameter_counts
from twoaxis.planner.formulas.roofline import weights_read
from twoaxis.sequence import NgramEmbedding, NgramEmbeddingConfig
from twoaxis.sequence.ngram_table import IdHistory
from twoaxis.testing.toy import VOCAB, toy_context, toy_mixer, toy_site
from twoaxis.train.optim import OptimizerConfig, build_optimizer, group_table, parameter_groups

ATTENTION: Any = {"kind": "attention", "n_heads": 2}
EXACT: dict[str, Any] = {"rtol": 0, "atol": 1e-12}
GATED: list[dict[str, Any]] = [{}, {"key_eps": 1e-20, "gate": "copysign"}, {"maps": "biased"}, {"conv": "none"}]


def config(*mixers: Any, **sizes: Any) -> DecoderConfig:
    data = {"vocab_size": 40, "d_model": 16, "n_layers": 2, "max_seq_len": 64, **sizes}
    return DecoderConfig.from_data({**data, "blocks": [[*mixers, ATTENTION, "swiglu"], [ATTENTION, "swiglu"]]})


def table(**options: Any) -> dict[str, Any]:
    return {"kind": "ngram_embedding", "rows": [53], **options}


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 40, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("options", GATED, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_table_of_zeros_adds_nothing_and_is_the_first_to_train(options: dict[str, Any], dtype: torch.dtype) -> None:
    model, plain = (Decoder.build(one).to(dtype) for one in (config(table(**options)), config()))
    text, targets = tokens(2, 12), tokens(2, 12, seed=1)
    assert torch.equal(model(text), plain(text))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for step in range(20):
        optimizer.zero_grad()
        loss = model.loss(text, targets)[0]
        loss.backward()
        losses.append(loss.item())
        own = {n.rpartition("mixer.")[2]: p.grad for n, p in model.named_parameters() if ".ngram_embedding." in n}
        assert all(grad is not None and grad.isfinite().all() for grad in own.values())
        if not step:
            moved = {name for name, grad in own.items() if grad is not None and grad.any()}
            assert moved == {"table.weight", *(["bias"] if options.get("maps") == "biased" else [])}
        optimizer.step()
    assert losses[-1] < losses[0] / 1.5
    assert all(grad is not None and grad.any() for grad in own.values())


def mixer(**options: Any) -> NgramEmbedding:
    return toy_mixer(NgramEmbeddingConfig(**{"rows": [53], "kernel": 2, **options}))


@pytest.mark.parametrize(("reset", "look_back", "conv"), [("both", 0, 0), ("hash_only", 0, 1), ("none", 1, 1)])
def test_documents_reset_the_look_back_and_the_convolution(reset: str, look_back: int, conv: int) -> None:
    one, context = mixer(document_reset=reset), toy_context(batch=1, tokens=8)
    ids = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 10]])
    layout = TokenLayout.packed(torch.tensor([[0] * 4 + [1] * 4])).of(ids)
    alone = one(context[:, 4:], TokenLayout.contiguous(4).of(ids[:, 4:]))[0]
    assert torch.allclose(one(context, layout)[0][:, 4:], alone, **EXACT) == (reset == "both")
    other = ids.clone()
    other[:, 3] = 10
    rows = [one.table(x, layout, IdHistory()).rows for x in (ids, other)]
    assert [not torch.equal(a, b) for a, b in zip(*(each[0, 4:7] for each in rows), strict=True)] == [look_back] * 2 + [0]
    changed = context.clone()
    changed[:, 3] += 1
    outputs = [one(x, layout)[0] for x in (context, changed)]
    assert (not torch.equal(outputs[0][:, 6], outputs[1][:, 6])) == conv


@pytest.mark.parametrize("reset", ["both", "hash_only", "none"])
def test_padding_is_never_read(reset: str) -> None:
    one, context = mixer(document_reset=reset), toy_context(batch=1, tokens=8)
    ids = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 10]])
    layout = TokenLayout.left_padded(torch.tensor([5]), 8).of(ids)
    alone = one(context[:, 3:], TokenLayout.contiguous(5).of(ids[:, 3:]))[0]
    torch.testing.assert_close(one(context, layout)[0][:, 3:], alone, **EXACT)


@pytest.mark.parametrize("chunks", [(1,) * 9, (3, 1, 5), (8, 1)], ids=str)
def test_a_blank_has_no_update_and_stops_every_look_back(chunks: tuple[int, ...]) -> None:
    one, context = mixer(order=4, blank_ids=[9], conv="none"), toy_context(batch=1, tokens=9)
    ids = torch.tensor([[3, 4, 9, 5, 6, 7, 9, 9, 8]])
    y = one(context, TokenLayout.contiguous(9).of(ids))[0]
    assert not y[0, [2, 6, 7]].any() and y[0, [0, 1, 3, 4, 5, 8]].any(-1).all()
    apart = TokenLayout.packed(torch.tensor([[0, 0, PADDING, 1, 1, 1, PADDING, PADDING, 2]])).of(ids)
    torch.testing.assert_close(mixer(order=4, conv="none")(context, apart)[0][0, [3, 4, 5, 8]], y[0, [3, 4, 5, 8]], **EXACT)
    parts, cache, start = [], one.new_cache(), 0
    for length in chunks:
        part = slice(start, start + length)
        found, cache = one(context[:, part], TokenLayout.contiguous(length, start).of(ids[:, part]), cache)
        parts.append(found)
        start += length
    torch.testing.assert_close(torch.cat(parts, dim=1), y, **EXACT)


@pytest.mark.parametrize("preset", ["engram", "deepseek_v41", "qwen4exp", "longcat", "modded"])
def test_ids_in_pieces_are_exact(preset: str) -> None:
    small = {"rows": [53]} if preset == "modded" else {"rows": [53], "heads": 2, "row_width": 3}
    ends = {"end_ids": [5]} if preset in ("qwen4exp", "longcat") else {}
    one: Any = toy_mixer(NgramEmbeddingConfig.from_data({"preset": preset, **small, **ends}))
    table, ids = one.table, torch.tensor([[3, 4, 5, 5, 6, 7, 0, 8, 9, 10], [5, 3, 3, 8, 9, 0, 0, 6, 7, 4]])

    def rows(chunks: tuple[int, ...]) -> Tensor:
        history, found, start = IdHistory(), [], 0
        for length in chunks:
            part = ids[:, start : start + length]
            _, window, history = table(part, TokenLayout.contiguous(length, start), history)
            found.append(table.hash.rows(window))
            start += length
        assert history.length == min(10, one.config.order - 1)
        return torch.cat(found, dim=1)

    for chunks in ((1,) * 10, (3, 1, 6), (9, 1), (2, 2, 2, 2, 2)):
        assert torch.equal(rows(chunks), rows((10,)))


def test_ids_of_32_bits_and_of_64_are_hashed_alike() -> None:
    one, context, ids = mixer(), toy_context(), torch.randint(VOCAB, (2, 9))
    found = [one(context, TokenLayout.contiguous(9).of(each))[0] for each in (ids, ids.int())]
    assert torch.equal(*found)


def hashes(model: DecoderConfig) -> list[Any]:
    with torch.device("meta"):
        decoder: Any = Decoder(model)
    return [s.mixer.table.hash for block in decoder.blocks for s in block.sublayers if isinstance(s.mixer, NgramEmbedding)]


def test_the_block_is_part_of_the_hash_and_no_prime_is_used_twice() -> None:
    """The blocks of the demo, 1 and 3 of those counted from 0, and its golden numbers."""
    engram = {**table(preset="engram", heads=2, row_width=4, seed=5, hash_vocab=47), "rows": [97, 101]}
    model = config(n_layers=4).replace(blocks=[["swiglu"], [engram, "swiglu"], ["swiglu"], [engram, "swiglu"]])
    first, second = hashes(model)
    assert (first.factors[0], second.factors[0]) == (17981981399855193, 21699960885740621)
    assert (first.sizes, second.sizes) == ((97, 101, 103, 107), (109, 113, 127, 131))
    moved = model.replace(blocks=[["swiglu"], ["swiglu"], [engram, "swiglu"], [engram, "swiglu"]])
    assert hashes(moved)[0].factors != first.factors
    qwen = {**engram, "hash": "splitmix64", "seed": 1234, "hash_vocab": 61}
    later = hashes(model.replace(blocks=[["swiglu"], ["swiglu"], [qwen, qwen, "swiglu"], ["swiglu"]]))
    assert later[0].factors[:2] == (100568829612566729, 48448609024713693)
    assert later[1].factors != later[0].factors and not set(later[0].sizes) & set(later[1].sizes)


def test_published_sizes() -> None:
    """Rows of the tables of Qwen3.8 and DeepSeek-V4.1, without memory."""
    stack = config().stack
    shapes = {
        p: NgramEmbeddingConfig(preset=p, hash_vocab=99092).table_shape(stack.sites[0]) for p in ("qwen4exp", "deepseek_v41")
    }
    assert shapes == {"qwen4exp": (320_001_536, 160), "deepseek_v41": (384_006_168, 256)}
    longcat = NgramEmbeddingConfig(preset="longcat", hash_vocab=131_072)
    rows, width = longcat.table_shape(stack.sites[0])
    assert 31.3e9 < rows * width < 31.5e9


def test_the_small_presets_are_as_large_as_each_other() -> None:
    sizes = {"vocab_size": 1024, "d_model": 96, "n_layers": 6, "blocks": [["swiglu"]]}
    plain = decoder_cost(DecoderConfig.from_data(sizes), Shape(1, 1)).params

    def added(preset: str) -> tuple[int, int]:
        own = [[["swiglu"], [{"kind": "ngram_embedding", "preset": preset}, "swiglu"], *[["swiglu"]] * 4]]
        one = DecoderConfig.from_data({**sizes, "blocks": own[0]})
        found = decoder_cost(one, Shape(1, 1))
        return found.params - plain, found.matmul_flops - decoder_cost(DecoderConfig.from_data(sizes), Shape(1, 1)).matmul_flops

    # Table, maps, the norms of query, key and convolution, and taps.
    assert added("engram_tiny") == (49_488 + 9_216 + 288 + 384, 18_432)
    assert added("bigram_tiny") == (59_328 + 96, 0)


def test_an_untrained_row_is_read_and_has_no_gradient() -> None:
    one = mixer(untrained_row=7, rows=[11], heads=1, order=2, conv="none")
    context, ids = toy_context(batch=1, tokens=60), torch.arange(60).remainder(VOCAB).unsqueeze(0)
    y, _ = one(context, TokenLayout.contiguous(60).of(ids))
    rows = one.table.hash.rows(one.table(ids, TokenLayout.contiguous(60), IdHistory()).ids)
    assert (rows == 7).any()
    y.square().sum().backward()
    (grad,) = [p.grad for n, p in one.named_parameters() if n == "table.weight"]
    assert grad is not None and not grad[7].any() and grad.any(-1).sum() > 5
    with torch.no_grad():
        one.table.weight[7] += 1
    assert not torch.equal(one(context, TokenLayout.contiguous(60).of(ids))[0], y)


def test_spellings_of_a_word_share_rows() -> None:
    new = [0, 1, 2, 3, 3, 4, 4, 5, 6, 7, 8]
    one, context = mixer(compression=new), toy_context(batch=1, tokens=5)
    ids, same = torch.tensor([[3, 6, 8, 4, 5]]), torch.tensor([[4, 5, 8, 3, 6]])
    found = [one(context, TokenLayout.contiguous(5).of(each))[0] for each in (ids, same, ids + 2)]
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert one.config.hash_vocab == 9


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"rows": [53, 59, 61]}, r"rows=\(53, 59, 61\): must be one number, or one for each length of 2..3"),
    ({"hash": "int32"}, "hash='int32' with order=3 and heads=2: must have order=2 and heads=1"),
    ({"hash": "polynomial"}, "hash='polynomial': must have fill_id=0 and 0 in blank_ids"),
    ({"preset": "longcat", "rows": [2**31 - 1], "order": 16, "hash_vocab": 2**30}, r"rows=2147483647: must be small enough"),
    ({"rows": [2**31]}, r"rows.*2147483648: must be <= 2147483647"),
    ({"row_width": None}, "row_width=None: must be None, for one table of order 2, with maps='none', and a number"),
    ({"preset": "bigram_tiny", "row_width": 8}, "row_width=8: must be None"),
    ({"preset": "bigram_tiny", "gate": "sign"}, "gate='sign': must be 'none' with maps='none'"),
    ({"gate": "none"}, "conv='dilated': must be 'none' without a gate"),
    ({"sign_rows": 4}, "sign_rows=4: must be 0 but with hash='int32' and maps='none'"),
    ({"compression": [0, 1, 3] + [0] * 37}, "compression of 40 ids: must be new ids from 0 on without a gap"),
    ({"compression": list(range(39))}, "compression of 39 ids: must have one new id for each of the 40 tokens of the model"),
    ({"compression": [0] * 40, "hash_vocab": 2}, "hash_vocab=2: must be 1, the ids of compression"),
    ({"fill_id": 40}, "fill_id=40: must be a token below vocab_size=40"),
    ({"end_ids": [3, 41]}, "end_ids=41: must be a token below vocab_size=40"),
    ({"preset": "engram_small"}, "unknown|engram_tiny"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[str(options) for options, _ in REFUSED])
def test_what_cannot_be_is_refused_with_the_configuration(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        config(table(**options))
    assert "\n" not in str(caught.value)


def test_a_hash_needs_a_vocabulary() -> None:
    with pytest.raises(ConfigError, match="vocab_size is unknown: must be known, since hashes of tokens depend on it"):
        NgramEmbedding(d_model=16)
    assert NgramEmbedding(d_model=16, vocab_size=40).table.hash == NgramEmbedding(d_model=16, hash_vocab=40).table.hash
    assert NgramEmbedding(d_model=16, preset="modded", rows=[9]).table.hash.sizes == (9,)


def test_a_record_holds_the_vocabulary_of_the_hash() -> None:
    """So that a vocabulary that grows later leaves rows where they were."""
    one = config(table())
    recorded = [each.to_data()["blocks"][0][0]["hash_vocab"] for each in (one, config(table(preset="modded")))]
    assert recorded == [40, None]
    assert hashes(one.replace(vocab_size=64)) == hashes(one)
    assert hashes(config(table(), vocab_size=64)) != hashes(one)


def saved(folder: Path, model: DecoderConfig) -> Decoder:
    decoder = Decoder.build(model)
    with torch.no_grad():
        decoder.get_parameter("blocks.0.ngram_embedding.mixer.table.weight").normal_(generator=torch.Generator().manual_seed(0))
    decoder.save(folder)
    return decoder


def change(folder: Path, **options: Any) -> None:
    path = folder / "config.json"
    data = json.loads(path.read_text())
    data["blocks"][0][0].update(options)
    path.write_text(json.dumps(data))


def test_saved_and_loaded_it_is_the_same(tmp_path: Path) -> None:
    new = [i % 31 for i in range(40)]
    decoder = saved(tmp_path / "model", config(table(compression=new), table()))
    again = load(tmp_path / "model")
    assert again.config == decoder.config and hashes(again.config) == hashes(decoder.config)
    assert torch.equal(again(tokens(2, 9)), decoder(tokens(2, 9)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": [59]}, "weights and config.json differ"),
        ({"heads": 3}, "weights and config.json differ"),
        ({"row_multiple": 64}, "weights and config.json differ"),
        ({"hash_vocab": 30}, "hash_vocab=30: must be 31, the ids of compression"),
        ({"compression": [i % 30 for i in range(40)]}, "hash_vocab=31: must be 30, the ids of compression"),
        ({"compression": [i % 31 for i in range(38)]}, "compression of 38 ids: must have one new id for each of the 40 tokens"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_folder_whose_hash_was_changed_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    saved(tmp_path / "model", config(table(compression=[i % 31 for i in range(40)])))
    change(tmp_path / "model", **options)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "model")


def test_a_table_trains_at_five_times_the_rate_without_decay() -> None:
    model, name = Decoder.build(config(table())), "blocks.0.ngram_embedding.mixer.table.weight"
    options = OptimizerConfig(lr=0.1, weight_decay=0.1)
    groups = parameter_groups(model, options)
    (own,) = [group for group in groups if name in group.parameters]
    assert (own.lr_scale, own.weight_decay, own.tags, list(own.parameters)) == (5.0, 0.0, ("table",), [name])
    assert any(line.split()[:4] == ["0", "5", "1e-08", "1"] for line in group_table(groups).splitlines())
    weight, text = model.get_parameter(name), tokens(2, 9)
    with torch.no_grad():
        weight.fill_(0.01)
    optimizer = build_optimizer(groups, options)
    model.loss(text, tokens(2, 9, seed=1))[0].backward()
    optimizer.step()
    read = weight.grad.any(-1)  # type: ignore[union-attr]
    assert torch.equal(weight[~read], torch.full_like(weight[~read], 0.01))
    assert (weight[read] - 0.01).abs().max().item() == pytest.approx(0.5, rel=1e-3)
    changed = OptimizerConfig.from_data({"groups": [{"pattern": "*.table.weight", "lr_scale": 2.0, "weight_decay": 0.3}]})
    (own,) = [group for group in parameter_groups(model, changed) if name in group.parameters]
    assert (own.lr_scale, own.weight_decay) == (2.0, 0.3)


def test_plans_count_a_table_apart_and_read_none_of_it() -> None:
    numbers = coefficients(ModelShape.of_decoder(config(table(rows=[1021]))))
    counts = parameter_counts(numbers)
    assert counts["tables"] == 4124 * 12
    assert counts["non_embedding"] == counts["all"] - counts["embedding_and_head"] - counts["tables"]
    (sub,) = [each for each in numbers["sublayers"] if each["kind"] == "ngram_embedding"]
    assert weights_read(sub, 1) == sub["params"] - 4124 * 12


def test_a_mixer_that_reads_no_context_leaves_its_norm_unread() -> None:
    one = Decoder.build(config(table(preset="bigram_tiny", rows=[40])))
    gain: Any = one.blocks[0].sublayers[0].norm  # type: ignore[union-attr]
    assert gain.declarations["gain"].dead
    initialise(one, 1)
    one.loss(tokens(2, 5), tokens(2, 5))[0].backward()
    assert gain.gain.grad is None
    assert toy_site().stack.vocab_size == VOCAB
