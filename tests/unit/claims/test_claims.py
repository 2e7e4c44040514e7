"""Every claim holds on a small part of its cases, and fails when what it speaks of is broken."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from twoaxis.claims import (
    CLAIMS,
    Evidence,
    Finding,
    chunks,
    complexity,
    delta_algebra,
    depth_as_position,
    duality,
    full_memory,
    recommended_block,
    residual_read,
    routing,
    select,
    systems,
)
from twoaxis.core.errors import ConfigError
from twoaxis.core.key_value_cache import KeyValueCache
from twoaxis.core.table import Row
from twoaxis.depth import DEPTH, DeepCrossAttentionConfig, DeepDeltaConfig, ElcBertConfig
from twoaxis.ops.delta import delta_write
from twoaxis.ops.depth_attention import depth_attention
from twoaxis.ops.local_attention import local_attention
from twoaxis.sequence import heads

PAGE = Path(__file__).parents[3] / "docs" / "claims.md"

VERDICTS = {
    1: "holds within 1e-11",
    2: "holds within 1e-11",
    3: "holds within 1e-10",
    4: "holds exactly",
    5: "holds within 0.05 in every exponent",
    6: "holds exactly",
    7: "holds within 1e-11",
    8: "holds within 1e-12",
    9: "holds within 1e-11",
}

Patch = pytest.MonkeyPatch


def finding(number: int) -> Finding:
    (claim,) = select([number])
    return claim.find()


@pytest.fixture
def small(monkeypatch: Patch) -> None:
    """A few cases of each claim; the page of docs, which a test of its own computes anew, has all of them."""
    sizes = (depth_as_position.EDGES[1], (4, 2, 2, 2, 4, 5))
    for module in (depth_as_position, duality, full_memory):
        monkeypatch.setattr(module, "SIZES", sizes)
    rows = [DEPTH[kind] for kind in ("residual", "denseformer", "muddformer")]
    short = [Row(row.config, row.summary, dict([next(iter(row.examples.items()))])) for row in rows]
    monkeypatch.setattr(routing, "DEPTH", short)
    grids = {"T": (256, 512), "w": (4, 8), "d": (16, 32)}, {"T": (8, 16), "K": (2, 4), "L": (64, 128), "d": (16, 32)}
    monkeypatch.setattr(systems, "PROMPTS", (1, 5, 6))
    monkeypatch.setattr(systems, "PLACEMENTS", [systems.PLACEMENTS[index] for index in (0, 1, 2, 6)])
    monkeypatch.setattr(complexity, "CASES", [(*c[:3], g, c[4]) for c, g in zip(complexity.CASES, grids, strict=False)])


def test_numbers_count_up_and_say_everything() -> None:
    assert [claim.number for claim in CLAIMS] == list(range(1, 11))
    for claim in CLAIMS:
        assert all(text.strip() for text in (claim.title, claim.statement, claim.source, claim.tested))
        assert re.search(r"arXiv:\d{4}\.\d{5}", claim.source)


def test_page_has_the_expected_verdicts() -> None:
    found = dict(re.findall(r"^\| (\d+)\. [^|]+ \| ([^|]+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert {int(number): verdict for number, verdict in found.items() if number != "10"} == VERDICTS


@pytest.mark.parametrize("number", VERDICTS)
@pytest.mark.usefixtures("small")
def test_claim_holds(number: int) -> None:
    found = finding(number)
    assert found.sentence == VERDICTS[number], found.evidence
    assert found.evidence
    assert all(len(row) == len(found.table.columns) for row in found.table.rows) if found.table else True


def wider(q, k, v, *, window=None, **options):  # type: ignore[no-untyped-def]
    return local_attention(q, k, v, window=window and window + 1, **options)


def narrower(q, k, v, *, window=None, **options):  # type: ignore[no-untyped-def]
    return local_attention(q, k, v, window=window and max(1, window - 1), **options)


def steep(*arguments):  # type: ignore[no-untyped-def]
    """The right values with gradients that are 1% too large."""
    y = depth_attention(*arguments)
    return y + 0.01 * (y - y.detach())


def three_blocks(q, blocks, window):  # type: ignore[no-untyped-def]
    for index in range(len(blocks) - 2):
        blocks.load(index)
    return in_chunks(q, blocks, window)


in_chunks = chunks.in_chunks


def own_block_only(q, blocks, window):  # type: ignore[no-untyped-def]
    loaded = [(part, *blocks.load(index)) for index, part in enumerate(q.split(window, dim=2))]
    return torch.cat([local_attention(*part, window=window, impl="reference") for part in loaded], dim=2)


def too_far(x, direction, target, beta, *rest):  # type: ignore[no-untyped-def]
    return delta_write(x, direction, target, 1.001 * beta, *rest)


def heavy(outputs):  # type: ignore[no-untyped-def]
    return 1.001 * sum(outputs[1:], outputs[0])


def one_key_more(window: int | None = None) -> KeyValueCache:
    return KeyValueCache(window and window + 1)


def swapped(row: Row) -> list[Row]:  # type: ignore[type-arg]
    return [row, DEPTH["residual"]]


static_dca = Row(DeepCrossAttentionConfig, "static", {"v1": {"variant": "v1"}})
dynamic_elc = Row(ElcBertConfig, "dynamic", {"normalized": {"variant": "normalized"}})

FAULTS: dict[str, tuple[int, Callable[[Patch], object], str]] = {
    "depth window one too long": (1, lambda m: m.setattr(depth_as_position, "local_attention", wider), "outputs, depth"),
    "depth window one too short": (1, lambda m: m.setattr(depth_as_position, "local_attention", narrower), "outputs, depth"),
    "gradients too large": (1, lambda m: m.setattr(depth_as_position, "depth_attention", steep), "gradients, kernel"),
    "memory one state short": (2, lambda m: m.setattr(depth_as_position, "local_attention", narrower), "window l + 1"),
    "memory one state long": (2, lambda m: m.setattr(depth_as_position, "local_attention", wider), "less than 1e-06"),
    "weights of 1.001": (3, lambda m: m.setattr(residual_read, "unit_read", heavy), "logits, unit reads"),
    "static routing": (4, lambda m: m.setattr(routing, "DEPTH", swapped(static_dca)), "deep_cross_attention is by content"),
    "routing where weights are static": (4, lambda m: m.setattr(routing, "DEPTH", swapped(dynamic_elc)), "elc_bert is static"),
    "window never applied": (
        5,
        lambda m: m.setattr(complexity, "local_attention", lambda q, k, v, window: local_attention(q, k, v)),
        "counted against declared",
    ),
    "cache one key too long": (6, lambda m: m.setattr(heads, "KeyValueCache", one_key_more), "cache of ShortSWA"),
    "undeclared channels": (6, lambda m: m.setattr(DeepDeltaConfig, "state_floats", lambda *_: 8), "payload of deep delta"),
    "three loads": (7, lambda m: m.setattr(chunks, "in_chunks", three_blocks), "loads of each block"),
    "own block only": (7, lambda m: m.setattr(chunks, "in_chunks", own_block_only), "chunks against the whole"),
    "wrong beta": (8, lambda m: m.setattr(delta_algebra, "delta_write", too_far), "spectrum of the shortcut"),
    "other window": (9, lambda m: m.setattr(recommended_block, "WINDOW", 5), "logits"),
    "other names": (9, lambda m: m.setattr(recommended_block, "names", lambda: ["norm.gain"]), "names of the state dict"),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.usefixtures("small")
def test_planted_fault_is_found(name: str, monkeypatch: Patch) -> None:
    number, plant, told = FAULTS[name]
    plant(monkeypatch)
    found = finding(number)
    assert found.verdict == "does not hold"
    assert told in " ".join(found.evidence)
    assert "computation failed" not in found.evidence[0]


def test_failed_computation_is_a_finding_without_a_trace() -> None:
    def broken() -> Finding:
        raise ValueError("no such\nthing")

    claim = dataclasses.replace(CLAIMS[0], compute=broken)
    assert claim.find() == Finding("does not hold", evidence=("The computation failed: ValueError: no such thing",))


def test_not_a_number_is_not_close() -> None:
    found = Evidence()
    found.close("values", torch.tensor([torch.nan]), torch.tensor([0.0]))
    assert found.finding().verdict == "does not hold"


def test_unknown_number_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"claim=11: must be in 1\.\.10"):
        select([3, 11])


def report(arms: dict[str, str | None]) -> str:
    data = {name: {"control": False, "verdict": v, "sentence": f"{name}: {v}."} for name, v in arms.items()}
    return json.dumps({"arms": {"residual": {"control": True}, **data}})


BOTH_BETTER = {"attention_residuals": "better", "denseformer": "better"}
DAMAGED = "{"


@pytest.mark.parametrize(
    ("content", "verdict", "rows"),
    [
        (None, "undecided", ["undecided", "undecided"]),
        (report({**BOTH_BETTER, "deep_delta": None}), "undecided", ["better", "undecided"]),
        (report({**BOTH_BETTER, "denseformer": "undecided", "deep_delta": "worse"}), "undecided", ["undecided", "worse"]),
        (report({"deep_delta": "better"}), "undecided", ["undecided", "better"]),
        (DAMAGED, "undecided", ["undecided", "undecided"]),
    ],
    ids=["no report", "unfinished", "worse", "arms missing", "damaged"],
)
def test_training_claims_follow_the_reports(
    content: str | None, verdict: str, rows: list[str], tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    for study in ("shortcut", "depth_retrieval"):
        path = tmp_path / "studies" / "results" / study / "report.json"
        if content is not None:
            path.parent.mkdir(parents=True)
            path.write_text(content)
    found = finding(10)
    assert found.verdict == verdict
    assert found.table is not None
    assert [row[2] for row in found.table.rows] == [*rows, "undecided", "undecided"]
    first_row = found.table.rows[0][3]
    assert ("no report yet" in first_row) == (content is None)
    assert ("cannot be read" in first_row) == (content in (DAMAGED, report({"deep_delta": "better"})))


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        (["worse", "worse"], "better"),
        (["worse", "undecided"], "undecided"),
        (["better", "better"], "worse"),
        (["worse", "better"], "undecided"),
        ([None], "undecided"),
        ([], "undecided"),
    ],
)
def test_the_fork_is_decided_by_the_companions(
    verdicts: list[str | None], expected: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "studies" / "results" / "fork" / "report.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"contrasts": [{"comparison": verdict and {"verdict": verdict}} for verdict in verdicts]}))
    found = finding(10).table
    assert found is not None and found.rows[3][2] == expected
