"""Measurements whose values are known: at initialisation, with forced parameters, or by hand."""

import math
from typing import Any

import pytest
import torch

from twoaxis import DEPTH
from twoaxis.audit.observe import Distances, Observer
from twoaxis.audit.open_loop import Sample, sequence_losses
from twoaxis.audit.result import Routing
from twoaxis.audit.run import _add_gradients
from twoaxis.audit.summary import attention_of, gates_of, norms_of, streams_of
from twoaxis.audit.token_classes import token_classes
from twoaxis.core.layout import TokenLayout
from twoaxis.core.measure import noise
from twoaxis.model.trace import sublayer_list, trace
from twoaxis.ops.local_attention import visible

from .toy import BLOCK, TOKENIZER, TOKENS, batches, model


def observed(decoder: Any, *, packed: bool = True) -> Observer:
    given = batches(packed=packed)
    observer = Observer(decoder, token_classes((batch.tokens for batch in given), TOKENIZER, decoder.config.vocab_size))
    for batch in given:
        observer.observe(Sample.of(batch))
    return observer


def reads(decoder: Any) -> list[Routing]:
    return [one for one in observed(decoder).routing.result() if one.role == "read"]


def test_zero_queries_weigh_all_sources_alike() -> None:
    found = reads(model("attention_residuals", moved=False))
    assert [one.sublayer for one in found] == [1, 2, 3, 4, 5, 6]
    for one in found:
        n = one.sublayer + 1
        assert one.sources == ("embedding", *(f"sublayer {s}" for s in range(n - 1)))
        assert one.classes["all"].entropy == pytest.approx(math.log(n), rel=1e-5)
        assert one.share == pytest.approx([1 / n] * n, rel=1e-5)
        assert one.deviation == (0.0,) * n


def test_a_fresh_denseformer_weighs_the_newest_alone() -> None:
    for one in reads(model("denseformer", moved=False)):
        assert one.result == "stream"
        assert one.classes["first"].weight == (*(0.0,) * (len(one.sources) - 1), 1.0)
        assert one.classes["all"].favourite == one.sources[-1] == f"block {one.sublayer // 2}"
        assert one.classes["all"].entropy == 0.0


def test_weights_keep_their_sign_and_shares_do_not() -> None:
    decoder = model("denseformer", n_layers=2)
    with torch.no_grad():
        sublayer_list(decoder)[3].depth.weights.copy_(torch.tensor([-2.0, 0.5, 1.5]))
    one = reads(decoder)[-1]
    assert one.classes["all"].weight == one.classes["first"].weight == (-2.0, 0.5, 1.5)
    assert one.classes["all"].favourite == "embedding"
    assert one.share == (0.5, 0.125, 0.375)
    assert one.deviation == (0.0, 0.0, 0.0)
    assert one.classes["all"].entropy == pytest.approx(-sum(p * math.log(p) for p in one.share), rel=1e-5)


def test_trained_weights_depend_on_the_token_and_its_class() -> None:
    one = reads(model("attention_residuals"))[-1]
    assert all(deviation > 0 for deviation in one.deviation)
    assert one.classes["first"].weight != one.classes["all"].weight
    assert sum(one.share) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("name", ["code", "paper", "two_layer", "time_code", "ddl_tc", "channel_linear", "channel_conv_code"])
def test_a_full_gate_leaves_no_discrepancy(name: str) -> None:
    decoder = model(DEPTH["deep_delta"].example(name))
    with torch.no_grad():
        for sublayer in sublayer_list(decoder):
            sublayer.depth.gate.weight.zero_()
            sublayer.depth.gate.bias.zero_()
    found = gates_of(observed(decoder))
    assert len(found) == 6
    for one in found:
        assert (one.near_0, one.between, one.near_1, one.above_1, one.mean) == (0, 0, 1, 0, 1)
        assert one.before > 0.1
        assert one.after < 1e-6


@pytest.mark.parametrize(("bias", "regime"), [(-9.0, "near_0"), (-1.0, "between"), (0.0, "near_1"), (9.0, "above_1")])
def test_gates_are_counted_by_regime(bias: float, regime: str) -> None:
    decoder = model("deep_delta")
    with torch.no_grad():
        for sublayer in sublayer_list(decoder):
            sublayer.depth.gate.weight.zero_()
            sublayer.depth.gate.bias.fill_(bias)
    for one in gates_of(observed(decoder)):
        assert {name: getattr(one, name) for name in ("near_0", "between", "near_1", "above_1")}[regime] == 1
        beta = 2 / (1 + math.exp(-bias))
        assert one.after == pytest.approx(abs(1 - beta) * one.before, rel=1e-4, abs=1e-6)


def test_write_only_does_not_come_nearer_to_its_target() -> None:
    decoder = model({"kind": "deep_delta", "update_rule": "write_only"})
    assert gates_of(observed(decoder))[0].after > 0.01


def test_copies_do_not_spread_and_an_identity_has_no_gain() -> None:
    found = streams_of(observed(model("hyper_connections", moved=False)))
    assert found is not None
    assert found.spread == (0.0,) * 7
    assert all((one.row, one.column, one.spectral) == (1, 1, 1) for one in found.gain)


def test_gain_is_that_of_the_product_of_all_matrices() -> None:
    decoder = model({"kind": "hyper_connections", "weights": "static", "n_streams": 3})
    found = streams_of(observed(decoder))
    product = torch.eye(3, dtype=torch.float64)
    assert found is not None
    for one, sublayer in zip(found.gain, sublayer_list(decoder), strict=True):
        product = sublayer.depth.residual_weights.detach().T @ product
        assert one.row == pytest.approx(float(product.abs().sum(1).max()), rel=1e-5)
        assert one.column == pytest.approx(float(product.abs().sum(0).max()), rel=1e-5)
        assert one.spectral == pytest.approx(float(torch.linalg.svdvals(product)[0]), rel=1e-5)


@pytest.mark.parametrize("preset", ["paper", "deepseek_v41"])
def test_doubly_stochastic_matrices_have_bounded_gain(preset: str) -> None:
    """The state of V4.1 carries the weights of the next read behind its streams."""
    found = streams_of(observed(model({"kind": "mhc", "preset": preset})))
    assert found is not None
    assert all(abs(one.spectral - 1) < 1e-2 and abs(one.row - 1) < 1e-2 for one in found.gain)
    assert all(spread > 0.01 for spread in found.spread[1:])


def test_sizes_are_those_of_a_pass_by_hand() -> None:
    decoder = model("residual")
    observer = observed(decoder, packed=False)
    for batch in batches(packed=False):
        _add_gradients(observer, Sample.of(batch))
    with torch.no_grad():
        runs = [trace(decoder, batch.tokens) for batch in batches(packed=False)]
    for index, one in enumerate(norms_of(observer)):
        view = torch.cat([run.views[index][0] for run in runs])
        update = torch.cat([run.updates[index] for run in runs])
        assert one.read == pytest.approx(float(view.square().mean(-1).sqrt().mean()), rel=1e-5)
        assert one.state == one.read
        assert one.update == pytest.approx(float(update.square().mean(-1).sqrt().mean()), rel=1e-5)
        assert one.gradient > 0


def test_the_gradient_of_the_last_update_is_that_of_the_stream() -> None:
    decoder = model("residual")
    batch = batches(1, packed=False)[0]
    observer = observed(decoder, packed=False)
    _add_gradients(observer, Sample.of(batch))
    left = trace(decoder, batch.tokens).left.detach().requires_grad_()
    logits = torch.nn.functional.linear(decoder.norm(left), decoder.head_weight)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum")
    (gradient,) = torch.autograd.grad(loss, left)
    assert norms_of(observer)[-1].gradient == pytest.approx(float(gradient.norm(dim=-1).mean()), rel=1e-5)


@pytest.mark.parametrize("trained", ["blocks.2", "none"])
def test_frozen_parameters_leave_the_gradients_of_updates_as_they_are(trained: str) -> None:
    decoder, sample = model("denseformer"), Sample.of(batches(1)[0])
    whole, frozen = observed(decoder), observed(decoder)
    _add_gradients(whole, sample)
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_(name.startswith(trained))
    _add_gradients(frozen, sample)
    assert [one.gradient for one in norms_of(frozen)] == [one.gradient for one in norms_of(whole)]


def test_uniform_attention_looks_back_half_way() -> None:
    decoder = model("residual")
    with torch.no_grad():
        for sublayer in sublayer_list(decoder)[::2]:
            sublayer.mixer.qkv.weight[:8].zero_()
    for one in attention_of(observed(decoder, packed=False)):
        # Query t sees t + 1 keys, on average t / 2 away.
        assert one.mean_distance == pytest.approx((TOKENS - 1) / 4, abs=1e-3)
        assert one.distances == (0, 1, 2, 4, 8)
        assert sum(one.mass) == pytest.approx(1, abs=1e-4)
        expected = sum(1 / (t + 1) for t in range(TOKENS)) / TOKENS
        assert one.mass[0] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("window", [None, 3, 70])
@pytest.mark.parametrize("sink", [None, (4,), (2, 4, 150)])
def test_distances_are_those_of_the_whole_score_matrix(window: int | None, sink: tuple[int, ...] | None) -> None:
    B, H, T, K = 2, 4, 150, 4
    q, k = noise((B, H, T, K), "q") * 2, noise((B, 2, T, K), "k")
    documents = torch.tensor([[0] * 70 + [1] * 80, [0] * 150])
    score = noise(sink, "sink") if sink else None
    found = Distances(window)
    found.add(q, k, TokenLayout.packed(documents), score)
    scores = (q @ k.repeat_interleave(2, dim=1).transpose(-1, -2)) / 2
    scores = scores.masked_fill(~visible(T, T, window, documents, documents), -torch.inf)
    if score is not None:
        scores = torch.cat((scores, score.view(-1, H, score.shape[-1] if score.ndim > 1 else 1, 1).expand(B, H, T, 1)), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :T]
    age = torch.arange(T)[:, None] - torch.arange(T)
    mean = float((weights * age).sum() / weights.sum())
    assert found.mean == pytest.approx(mean, rel=1e-9)
    assert found.sink / found.queries == pytest.approx(1 - float(weights.sum()) / (B * H * T), abs=1e-9)
    _, mass = found.bins()
    assert float(mass[0]) == pytest.approx(float(weights.diagonal(dim1=-2, dim2=-1).mean()), rel=1e-9)


@pytest.mark.parametrize("blend", [None, 0.3])
def test_slots_take_their_part_of_the_attention(blend: float | None) -> None:
    B, H, T, K = 1, 2, 5, 4
    q, k, sink, score = noise((B, H, T, K), "q"), noise((B, H, T, K), "k"), noise((H,), "sink"), noise((B, T, H), "score")
    found, without = Distances(None), Distances(None)
    weight = () if blend is None else (torch.tensor([blend], dtype=torch.float64),)
    found.add(q, k, TokenLayout.contiguous(T), sink, (score, score, *weight))
    without.add(q, k, TokenLayout.contiguous(T), sink)
    scores = (q @ k.transpose(-1, -2) / 2).masked_fill(~visible(T, T, None), -torch.inf)
    columns = (scores, sink.view(1, H, 1, 1).expand(B, H, T, 1), score.transpose(1, 2).unsqueeze(-1))
    joint = torch.softmax(torch.cat(columns, dim=-1), dim=-1)
    slots = (1.0 if blend is None else blend) * joint[..., -1]
    assert found.slots == pytest.approx(float(slots.sum()), rel=1e-9)
    assert found.sink + found.slots + float(found.mass.sum()) == pytest.approx(B * H * T, rel=1e-9)
    if blend is None:
        assert found.sink == pytest.approx(float(joint[..., -2].sum()), rel=1e-9)
    assert without.slots == 0


def test_slots_and_mixed_values_are_measured_where_heads_are_mixed() -> None:
    observer = observed(model("mixture_of_depths_attention"))
    found = [one for one in observer.routing.result() if one.result == "slots"]
    assert [(one.sublayer, one.sources) for one in found] == [
        (2, ("sublayer 0", "sublayer 1")),
        (4, ("sublayer 0", "sublayer 1", "sublayer 2", "sublayer 3")),
    ]
    shares = [one.slots for one in attention_of(observer)]
    assert shares[0] == 0 and all(0 < share < 1 for share in shares[1:])
    found = [one for one in observed(model("depth_value_mixing")).routing.result() if one.result == "values"]
    assert [(one.sublayer, one.sources) for one in found] == [
        (2, ("sublayer 0", "sublayer 2")),
        (4, ("sublayer 0", "sublayer 2", "sublayer 4")),
    ]


def test_attention_inside_a_sublayer_and_of_mixed_heads_is_found() -> None:
    local = {"kind": "local_swa", "window": 3, "n_heads": 1, "head_dim": 4}
    blocks = [[{"kind": "short_swa", "n_heads": 2, "window": 2}, {**BLOCK[0], "projected_local": local}, BLOCK[1]]]
    found = attention_of(observed(model("lime", blocks=blocks)))
    assert [(one.sublayer, one.place, one.kind, one.window) for one in found[:3]] == [
        (0, "mixer", "short_swa", 2),
        (1, "mixer", "attention", None),
        (1, "projected_local", "local_swa", 3),
    ]
    assert len(found) == 9
    assert len(found[0].mass) == 2


def test_chunks_look_back_to_where_they_begin() -> None:
    local = {"kind": "local_swa", "window": 4, "window_kind": "chunk", "n_heads": 1, "head_dim": 4}
    decoder = model("residual", blocks=[[{**BLOCK[0], "input_local": local}, BLOCK[1]]])
    with torch.no_grad():
        for sublayer in sublayer_list(decoder)[::2]:
            sublayer.mixer.input_local.qkv.weight[:8].zero_()
    (found, *_) = [one for one in attention_of(observed(decoder, packed=False)) if one.place == "input_local"]
    whole, rest = divmod(TOKENS, 4)
    own = [1 / (place + 1) for place in (*range(4), *range(rest))]
    assert found.mass[0] == pytest.approx((whole * sum(own[:4]) + sum(own[4:])) / TOKENS, rel=1e-4)


def test_classes_of_tokens() -> None:
    tokens = torch.tensor([list(b"aaaaaaaa  1."), [*b"aaaaaaaa  ", 200, 201]])
    found = token_classes([tokens], TOKENIZER, 256)
    masks = dict(zip(found.names, found.masks(tokens, TokenLayout.contiguous(12)), strict=True))
    counts = {name: int(mask.sum()) for name, mask in masks.items()}
    assert counts == {
        "all": 24,
        "first": 2,
        "frequent": 16,
        "rare": 2,
        "space": 4,
        "letters": 16,
        "digits": 1,
        "punctuation": 1,
        "other": 2,
    }


def test_observing_changes_nothing() -> None:
    decoder, sample = model("mhc"), Sample.of(batches(1)[0])
    with torch.no_grad():
        hidden, _ = decoder.hidden(decoder.embed(sample.batch.tokens), sample.layout)
    observer = Observer(decoder, token_classes([sample.batch.tokens], TOKENIZER, 64))
    assert torch.equal(observer.observe(sample), sequence_losses(decoder, hidden, sample.batch))
