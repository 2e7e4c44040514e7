"""Every kind of both axes is audited, says in words what it has, and fits a small file."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from twoaxis import DEPTH, SEQUENCE, Decoder
from twoaxis.audit import Audit, audit_model, run
from twoaxis.audit.ablation import Removal
from twoaxis.audit.result import Ablation
from twoaxis.cli.audit import audit_tables

from .test_sums import SUMMED
from .toy import BLOCK, TOKENIZER, batches, model

MOST_BYTES = 200_000

SHOW_ATTENTION = {"attention", "short_swa", "kv_shift"}


@pytest.mark.parametrize("kind", [row.kind for row in DEPTH])
def test_every_depth_kind_is_audited(kind: str) -> None:
    row = DEPTH[kind]
    found = audit_model(model(row.example(next(iter(row.examples))), n_layers=2), batches(1), TOKENIZER)
    assert Audit.from_data(json.loads(json.dumps(found.to_data(), allow_nan=False))) == found
    assert row.summary in found.routing_note
    if kind in SUMMED:
        assert found.routing
        assert found.source_names
        for shares in found.shares().values():
            assert sum(shares.values()) == pytest.approx(1, abs=1e-4)
    else:
        assert found.routing_note.endswith("no weighted sum of depth sources, so there are no weights to show")
    assert bool(found.gates) == (kind == "deep_delta")
    assert (found.streams is not None) == (kind in {"hyper_connections", "mhc", "gated_residual", "frac_connections"})
    assert len(found.norms) == 4
    assert all(one.loss_change is not None and one.control_loss_change is not None for one in found.ablations)
    assert len([one for one in found.ablations if one.what == "sublayer"]) == 8
    tables = audit_tables(found)
    assert all(len(row) == len(table.columns) for table in tables for row in table.rows)


@pytest.mark.parametrize("kind", [row.kind for row in SEQUENCE])
def test_every_sequence_kind_is_audited(kind: str) -> None:
    row = SEQUENCE[kind]
    for sublayer in _audited_differently([row.example(name).to_data() for name in row.examples]):
        decoder = model("residual", n_layers=1, blocks=[[sublayer, BLOCK[1]]])
        found = audit_model(decoder, batches(1), TOKENIZER)
        assert (kind in SHOW_ATTENTION) == any(one.place == "mixer" for one in found.attention)
        assert {one.target.split()[0] for one in found.ablations if one.what == "local"} == _places(sublayer)


def _places(sublayer: dict[str, Any]) -> frozenset[str]:
    return frozenset(place for place in ("input_local", "projected_local", "update_local") if sublayer.get(place))


def _audited_differently(sublayers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All forms of a kind whose attention is computed from its options; of others, one with each set of local mixers."""
    if sublayers[0]["kind"] in SHOW_ATTENTION:
        return sublayers
    return list({_places(sublayer): sublayer for sublayer in reversed(sublayers)}.values())


@pytest.mark.parametrize("kind", ["attention_residuals", "muddformer", "hyper_connections", "frac_connections"])
def test_an_audit_of_24_sublayers_is_a_small_file(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def outcomes(model: Decoder, batches: Any, taken: Sequence[Removal], seed: int, progress: Any) -> tuple[Ablation, ...]:
        changes = ("loss_change", "standard_error", "control_loss_change", "control_standard_error")
        numbers = dict.fromkeys(changes, -0.000123456)
        common = ("what", "sublayer", "target", "replacement", "choice")
        return tuple(Ablation(**{n: getattr(one, n) for n in common}, change_norm=1 / 3, **numbers) for one in taken)

    # All of its passes would take a while; only how many there are matters here.
    monkeypatch.setattr(run, "_ablate", outcomes)
    found = audit_model(model(kind, n_layers=12), batches(1), TOKENIZER)
    assert len(found.sublayers) == 24
    assert len(found.ablations) > 48
    assert len(json.dumps(found.to_data(), indent=1)) < MOST_BYTES
