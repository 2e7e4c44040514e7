"""Ablations against the same thing done to the parameters, and what an audit refuses."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from twoaxis import Decoder
from twoaxis.audit.ablation import (
    EmbeddingRemoval,
    LocalRemoval,
    Removal,
    SourceRemoval,
    StreamRemoval,
    UpdateRemoval,
    removals,
)
from twoaxis.audit.observe import Observer
from twoaxis.audit.open_loop import Probe, Sample, check_loop, run_pass
from twoaxis.audit.run import audit_model, mean_change
from twoaxis.audit.token_classes import token_classes
from twoaxis.core.errors import ConfigError, DataError
from twoaxis.core.measure import distance
from twoaxis.data import Batch
from twoaxis.depth.attention_residuals import AttentionResiduals
from twoaxis.depth.base import Read
from twoaxis.model.trace import sublayer_list, trace
from twoaxis.ops.cross_entropy import IGNORE

from .toy import BLOCK, TOKENIZER, batches, model

ROUNDING = 1e-10


@torch.no_grad()
def hidden(decoder: Decoder, probe: Probe | None = None) -> torch.Tensor:
    return run_pass(decoder, Sample.of(batches(1)[0]), probe or Probe())


def assert_as_if(decoder: Decoder, removal: Removal, edit: Any) -> None:
    """The removal does what the edit of parameters does, and that is something."""
    before, removed = hidden(decoder), hidden(decoder, removal)
    with torch.no_grad():
        edit()
    assert distance(removed, hidden(decoder)) < ROUNDING
    assert distance(removed, before) > 1e-4


def test_no_update_is_a_disturbance_of_minus_the_update() -> None:
    decoder, batch = model("residual"), batches(1, packed=False)[0]
    plain = trace(decoder, batch.tokens)
    for index in (0, 3, 5):
        expected = trace(decoder, batch.tokens, {index: -plain.updates[index]}).logits
        found = decoder.logits(run_pass(decoder, Sample.of(batch), UpdateRemoval(index, "x", 8)))
        assert distance(expected, found) < ROUNDING
        mean = plain.updates[index].mean((0, 1))
        expected = trace(decoder, batch.tokens, {index: mean - plain.updates[index]}).logits
        found = decoder.logits(run_pass(decoder, Sample.of(batch), UpdateRemoval(index, "x", 8, mean.detach())))
        assert distance(expected, found) < ROUNDING


def test_what_is_emitted_beside_the_update_stays() -> None:
    decoder = model({"kind": "attention_residuals", "key_rank": 3})
    removal = UpdateRemoval(1, "x", 8)
    update = torch.ones(2, 3, 11)
    assert removal.update(1, update)[..., 8:].eq(1).all()
    assert removal.update(1, update)[..., :8].eq(0).all()
    assert distance(hidden(decoder), hidden(decoder, removal)) > 1e-4


@pytest.mark.parametrize("variant", ["v1", "v2"])
def test_without_a_source_is_a_weight_of_zero_in_deep_cross_attention(variant: str) -> None:
    decoder = model({"kind": "deep_cross_attention", "variant": variant})
    grn = sublayer_list(decoder)[4].depth.grn
    assert_as_if(decoder, SourceRemoval(decoder, 4, "block 0", ""), lambda: grn.bias[:, 1].zero_())


@pytest.mark.parametrize("ways", ["qkvr", "single"])
def test_without_a_source_is_a_weight_of_zero_in_muddformer(ways: str) -> None:
    # All ways lose it, also the residual one, which only the block's own sum goes on from.
    decoder = model({"kind": "muddformer", "weights": "static", "ways": ways})
    total = sublayer_list(decoder)[4].depth.sum
    assert_as_if(decoder, SourceRemoval(decoder, 4, "embedding", ""), lambda: total.static[:, 0].zero_())


def test_without_a_source_is_a_weight_of_zero_in_denseformer() -> None:
    decoder = model("denseformer")
    row = sublayer_list(decoder)[3].depth
    assert_as_if(decoder, SourceRemoval(decoder, 3, "block 0", ""), lambda: row.weights[1].zero_())


def test_without_a_source_is_a_weight_of_zero_in_the_final_read() -> None:
    decoder = model({"kind": "deep_cross_attention", "variant": "v1"})
    ends: Any = decoder.ends
    assert_as_if(decoder, SourceRemoval(decoder, 6, "block 1", ""), lambda: ends.grn.bias[:, 2].zero_())


def test_the_embedding_is_taken_out_of_every_sum() -> None:
    decoder = model("residual_scalars")

    def edit() -> None:
        for sublayer in sublayer_list(decoder):
            sublayer.depth.embedding_weight.zero_()

    assert_as_if(decoder, EmbeddingRemoval(decoder, 0), edit)


def test_a_block_goes_on_from_what_it_read_without_the_source() -> None:
    # The base of the block is the same tensor as the view, and has to change with it.
    decoder = model({"kind": "vertical_attention"})
    changed = []

    class Watched(SourceRemoval):
        def read(self, index: int, state: Any, views: Any, carry: Any) -> Any:
            before = views
            views, carry = super().read(index, state, views, carry)
            assert carry is views
            changed.append(views is not before)
            return views, carry

    hidden(decoder, Watched(decoder, 2, "embedding", ""))
    assert changed == [False, False, True, False, False, False]


def test_without_a_stream_is_a_stream_that_nobody_uses() -> None:
    decoder = model({"kind": "hyper_connections", "weights": "static", "n_streams": 3})
    depth = sublayer_list(decoder)[2].depth

    def edit() -> None:
        depth.read_weights[1].zero_()
        depth.residual_weights[1].zero_()

    assert_as_if(decoder, StreamRemoval(2, "stream 1", 1, slice(0, 8)), edit)


def test_without_a_fraction_is_a_fraction_that_nobody_uses() -> None:
    decoder = model({"kind": "frac_connections", "weights": "static", "n_fractions": 2})
    depth = sublayer_list(decoder)[2].depth

    def edit() -> None:
        depth.read_weights[1].zero_()
        depth.residual_weights[1].zero_()

    assert_as_if(decoder, StreamRemoval(2, "fraction 1", 0, slice(4, 8)), edit)


def test_without_a_local_mixer_is_without_its_taps() -> None:
    decoder = model("residual", blocks=[[{**BLOCK[0], "projected_local": "canon"}, BLOCK[1]]])
    local = sublayer_list(decoder)[2].mixer.projected_local
    removal = LocalRemoval(2, "x", local)
    before = hidden(decoder)
    with removal.attached():
        removed = hidden(decoder, removal)
    with torch.no_grad():
        local.weight.zero_()
    assert distance(removed, hidden(decoder)) < ROUNDING
    assert distance(removed, before) > 1e-4
    assert not local._forward_hooks


def test_a_pass_may_begin_anywhere() -> None:
    decoder, sample = model("muddformer"), Sample.of(batches(1)[0])
    states: list[Any] = []

    class States(Probe):
        def state(self, index: int, state: Any) -> Any:
            states.append(state)
            return state

    whole = run_pass(decoder, sample, States())
    for first in range(7):
        probe = Probe()
        probe.first = first
        assert torch.equal(whole, run_pass(decoder, sample, probe, states))


def every_removal(decoder: Decoder) -> list[Removal]:
    given = batches(1)
    observer = Observer(decoder, token_classes([given[0].tokens], TOKENIZER, 64))
    observer.observe(Sample.of(given[0]))
    return removals(observer, observer.routing.result(), seed=0)


def test_a_control_changes_as_much_at_every_token() -> None:
    removal = UpdateRemoval(1, "x", 8)
    update = torch.randn(2, 5, 8, dtype=torch.float64) * torch.arange(5)[:, None]
    removal.direction = "audit/0"
    other = removal.update(1, update)
    assert distance((other - update).norm(dim=-1), update.norm(dim=-1)) < ROUNDING
    assert torch.equal(other, removal.update(1, update))
    removal.direction = "audit/1"
    assert distance(other, removal.update(1, update)) > 0.1


@pytest.mark.parametrize("preset", ["paper", "deepseek_v41"])
def test_everything_that_is_there_is_taken_away(preset: str) -> None:
    decoder = model({"kind": "mhc", "preset": preset}, blocks=[[{**BLOCK[0], "input_local": "canon"}, BLOCK[1]]])
    found = [(one.what, one.sublayer, one.target, one.replacement) for one in every_removal(decoder)]
    assert len(set(found)) == len(found)
    assert sum(what == "sublayer" for what, *_ in found) == 12
    assert {where for what, where, *_ in found if what == "stream"} == {2, 4, 6}
    assert sum(what == "stream" for what, *_ in found) == 24
    assert ("local", 2, "input_local (canon)", "mean") in found
    # Two at each read, and V4.1 reads once more at the end.
    assert sum(what == "source" for what, *_ in found) == (14 if preset == "deepseek_v41" else 12)


def test_the_favourite_and_another_source_of_each_read() -> None:
    decoder = model("attention_residuals")
    found = every_removal(decoder)
    assert [(one.sublayer, one.target) for one in found if one.what == "embedding"] == [(1, "embedding")]
    chosen = {(one.sublayer, one.choice): one.target for one in found if one.what == "source"}
    assert set(chosen) == {(index, choice) for index in range(1, 7) for choice in ("favourite", "random")}
    assert all(chosen[index, "favourite"] != chosen[index, "random"] for index in range(1, 7))


def test_a_sublayer_that_adds_nothing_does_not_matter() -> None:
    decoder = model("residual")
    with torch.no_grad():
        sublayer_list(decoder)[2].mixer.output.weight.zero_()
    found = audit_model(decoder, batches(), TOKENIZER)
    by = {(one.sublayer, one.replacement): one for one in found.ablations}
    for replacement in ("zero", "mean"):
        nothing = by[2, replacement]
        assert (nothing.change_norm, nothing.loss_change, nothing.standard_error, nothing.control_loss_change) == (0, 0, 0, 0)
        assert by[3, replacement].loss_change not in (None, 0)
    changed = by[3, "zero"]
    assert changed.control_loss_change not in (None, 0, changed.loss_change)


def test_the_loss_change_is_that_of_the_whole_sample() -> None:
    decoder, given = model("residual"), batches()
    found = audit_model(decoder, given, TOKENIZER)

    @torch.no_grad()
    def loss(edited: bool) -> float:
        total = 0.0
        for batch in given:
            result = run_pass(decoder, Sample.of(batch), UpdateRemoval(4, "x", 8) if edited else Probe())
            logits = decoder.logits(result).flatten(0, 1)
            total += float(F.cross_entropy(logits, batch.targets.flatten(), reduction="sum", ignore_index=IGNORE))
        return total / sum(batch.n_targets for batch in given)

    one = next(one for one in found.ablations if (one.sublayer, one.replacement) == (4, "zero"))
    assert found.loss == pytest.approx(loss(False))
    assert one.loss_change == pytest.approx(loss(True) - loss(False), rel=1e-4)
    assert (found.tokens, found.sequences) == (54, 6)


def test_the_same_seed_gives_the_same_audit() -> None:
    def audited(seed: int) -> Any:
        found = audit_model(model("attention_residuals", n_layers=1), batches(1), TOKENIZER, seed=seed)
        return [one.to_data() for one in found.ablations]

    one, again, other = audited(0), audited(0), audited(1)
    assert one == again
    assert one != other


def test_mean_change_of_unequal_sequences() -> None:
    changes, counts = torch.tensor([3.0, 1.0, 2.0], dtype=torch.float64), torch.tensor([3, 1, 2])
    assert mean_change(changes, counts) == (1.0, 0.0)
    assert mean_change(changes, torch.tensor([2, 2, 2])) == (1.0, pytest.approx((3 / 2 * 2) ** 0.5 / 6, rel=1e-5))
    assert mean_change(changes[:1], counts[:1]) == (1.0, None)
    assert mean_change(changes * float("inf"), counts) == (None, None)


def test_a_model_that_is_not_its_contract_is_refused() -> None:
    decoder = model("residual")
    decoder.blocks[1].register_forward_hook(lambda module, given, result: (result[0] * 1.001, result[1]))
    with pytest.raises(ConfigError, match="depth mixer 'residual': its reads and writes give a loss of"):
        check_loop(decoder, Sample.of(batches(1)[0]))


def test_a_loss_that_is_not_finite_is_refused() -> None:
    decoder = model("residual")
    with torch.no_grad():
        decoder.norm.gain.fill_(float("nan"))
    with pytest.raises(ConfigError, match="the model's loss is nan: must be finite"):
        audit_model(decoder, batches(), TOKENIZER)


def test_a_sample_without_targets_is_refused() -> None:
    batch = batches(1)[0]
    with pytest.raises(DataError, match="the sample holds no target"):
        audit_model(model("residual"), [Batch(batch.tokens, torch.full_like(batch.targets, IGNORE), None)], TOKENIZER)


def test_a_sum_that_is_not_what_was_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = AttentionResiduals.explain

    def of_a_copy(self: AttentionResiduals, done: Any) -> Any:
        return honest(self, done._replace(views=done.views + 0) if isinstance(done, Read) else done)

    monkeypatch.setattr(AttentionResiduals, "explain", of_a_copy)
    decoder = model("attention_residuals")
    with pytest.raises(ConfigError, match="the sum 'read' of sublayer 2 is no tensor that the mixer has returned"):
        hidden(decoder, SourceRemoval(decoder, 2, "embedding", ""))
