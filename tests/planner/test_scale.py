"""The scale page: what is committed is what the formulas give, and what it says follows from its rows."""

import json
from pathlib import Path
from typing import Any

import pytest

from planner.scale import rounded, scale_text
from planner.scale.axes import TOKENS, WINDOW, axes
from planner.scale.break_even import by_layers, by_stages, crossing
from planner.scale.cases import CASES, CONTEXTS, SHAPES, Case, case
from planner.scale.compute import LIMIT, plain, scale, shape_of
from planner.scale.figures import scale_figures
from planner.scale.findings import pick, training_breaks, treated, under_limit
from planner.scale.page import scale_page
from twoaxis.display.theme import NARROW, WIDE
from twoaxis.planner.formulas.counts import forward_counts
from twoaxis.planner.formulas.training_step import training_step

PAGES = Path(__file__).parents[2] / "docs" / "planner"
AGAIN = "run `python docs/build.py scale`"

# A few methods of each sort; all of them take a minute and a half.
FEW = [
    (case("dense-7b", 2**13), ("AttnRes full", "mHC", "ShortSWA w=128")),
    (case("dense-70b", 2**20), ("DDL",)),
    (case("moe-1t", 2**17), ("mHC", "DCA")),
]


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    return json.loads((PAGES / "scale.json").read_text(encoding="utf-8"))


def close(value: Any, kept: Any) -> bool:
    if isinstance(value, dict):
        return value.keys() == kept.keys() and all(close(value[name], kept[name]) for name in value)
    # Differences of steps of seconds lose digits.
    return kept == (pytest.approx(value, rel=1e-4, abs=1e-6) if isinstance(value, float) else value)


def test_page_says_what_the_data_says(data: dict[str, Any]) -> None:
    assert (PAGES / "scale.md").read_text(encoding="utf-8") == scale_page(data), AGAIN
    assert json.loads(scale_text(data)) == data


@pytest.mark.parametrize(("at", "names"), [pytest.param(*each, id=each[0].name) for each in FEW])
def test_rows_are_what_the_formulas_give(at: Case, names: tuple[str, ...], data: dict[str, Any]) -> None:
    found = rounded(scale([at], names))
    assert found[0]["method"] == "residual" and {row["method"] for row in found[1:]} == set(names)
    for row in found:
        assert close(row, pick(data["rows"], row["method"], at.shape, at.tokens)), AGAIN


def test_break_even_and_axes_are_what_the_formulas_give(data: dict[str, Any]) -> None:
    names = ("AttnRes blocks, two-phase", "ELC-BERT")
    for found, kept in ((by_layers(names, (8, 16)), "by_layers"), (by_stages(names[:1], (1, 2)), "by_stages")):
        for row in rounded(found):
            same = [r for r in data[kept] if all(r[name] == row[name] for name in row if name != "overhead")]
            assert len(same) == 1 and close(row, same[0]), AGAIN
    assert all(close(row, kept) for row, kept in zip(rounded(axes()), data["axes"], strict=True)), AGAIN


def test_every_case_can_be_run_and_the_control_fits() -> None:
    assert {(at.shape, at.tokens) for at in CASES} == {(shape, tokens) for shape in SHAPES for tokens in CONTEXTS}
    for at in CASES:
        at.layout.check(shape_of(at.shape), at.tokens)
        at.serving().layout.check(shape_of(at.shape), at.tokens)
        assert at.layout.data % at.context == 0


@pytest.mark.parametrize("at", CASES, ids=lambda at: at.name)
def test_ranks_that_share_a_sequence_compute_it_once(at: Case) -> None:
    numbers, setting = plain(at.shape)[0], at.training()
    step = training_step(numbers, at.run(setting), setting.rates, setting.links)
    sequences = at.layout.data // at.context * at.layout.microbatches * at.sequences
    assert step["flops"] == pytest.approx(3 * sequences * forward_counts(numbers, 1, at.tokens)["all"], rel=1e-9)


def test_parts_add_up_and_blocks_cost_less_than_the_full_history(data: dict[str, Any]) -> None:
    for row in treated(data["rows"]):
        training = row["training"]
        parts = sum(training[name] for name in ("depth", "sublayers", "exposed", "idle", "update"))
        assert parts == pytest.approx(training["overhead"], abs=1e-5)
        sent = [row["forwarding"][way] for way in ("naive", "cached", "cached_own")]
        assert sent[0]["boundary_bytes"] >= sent[1]["boundary_bytes"] >= sent[2]["boundary_bytes"]
    for at in CASES:
        full, blocks = (pick(data["rows"], name, at.shape, at.tokens) for name in ("AttnRes full", "AttnRes blocks"))
        assert blocks["training"]["overhead"] < full["training"]["overhead"] / 5
        assert blocks["serving"]["state_bytes"] < full["serving"]["state_bytes"] / 5


def test_the_two_axes_hold_their_windows_at_different_cuts() -> None:
    rows = {row["operator"]: row for row in axes()}
    depth, sequence = rows[f"Depth ShortSWA w={WINDOW}"], rows[f"ShortSWA w={WINDOW}, equal heads"]
    D, blocks = 4096, 32
    # One set of matrices W_Q, W_K, W_V, W_O and a gain for the model, as one for all positions in each of the blocks.
    assert depth["params"] == 4 * D**2 + D and sequence["params"] == blocks * depth["params"]
    # w - 1 keys and values of D numbers in bfloat16: for every token at a stage boundary, or in every block at a cut.
    assert depth["naive_bytes"] == (WINDOW - 1) * 2 * D * 2 and sequence["naive_bytes"] == 0
    assert sequence["halo_bytes"] == blocks * (WINDOW - 1) * 2 * D * 2 and depth["halo_bytes"] == 0
    assert sequence["flops"] == pytest.approx(depth["flops"], rel=0.01)
    assert depth["naive_bytes"] * TOKENS > 100 * sequence["halo_bytes"]


def test_findings_follow_the_rows(data: dict[str, Any]) -> None:
    under = under_limit(data["rows"], lambda row: row["training"]["overhead"])
    for name in {row["method"] for row in treated(data["rows"])}:
        assert (name in under) == (training_breaks(data["rows"], name) == "")
    assert training_breaks(data["rows"], "DenseFormer 4x5").startswith("boundary bytes: ")
    assert crossing([(1, 0.0), (2, 2 * LIMIT)]) == 1.5


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_figures_draw_every_case(width: int, data: dict[str, Any]) -> None:
    figures = scale_figures(data)
    assert {path.stem for path in PAGES.glob("scale-*.svg")} == {figure.name for figure in figures}, AGAIN
    drawn = [figure.draw(width).to_dict() for figure in figures]
    heat = drawn[0]["layer"][0]["data"]["values"]
    assert len(heat) == len([row for row in data["rows"] if row["method"] != "residual"])
    assert sum(cell["rim"] > 0 for cell in heat) == sum(row["training"]["overhead"] > LIMIT for row in treated(data["rows"]))
