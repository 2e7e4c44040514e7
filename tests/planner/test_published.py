"""Predictions beside published tables: exact counts are equal, differences are explained, and the page is up to date."""

import itertools
import re

import pytest

from planner.published.canon import llama
from planner.published.deep_delta import PARAMS, VARIANTS
from planner.published.muddformer import AS_RELEASED
from planner.published.row import FAR, Row
from planner.published.runs import PLAIN, numbers, params, preset
from twoaxis.planner.coefficients import coefficients
from twoaxis.planner.formulas.roofline import DEPTH_KERNELS, depth_operator, mixer_operators
from twoaxis.planner.methods import methods
from twoaxis.planner.model import ModelShape

from ..scripts import DOCS, computed_pages

WORK = {"batch": 1, "tokens": 4096, "context": 0, "tensor": 1, "sequence": "none", "engine": "fused"}


def test_page_is_up_to_date_and_every_far_prediction_names_a_remark(tmp_path_factory: pytest.TempPathFactory) -> None:
    found = computed_pages(tmp_path_factory)
    page, rows, remarks = found["published"], found["rows"], found["remarks"]
    assert (DOCS / "planner" / "published.md").read_text(encoding="utf-8") == page, "run `python docs/build.py published`"
    assert (DOCS / "planner" / "published.svg").exists()
    letters = set(re.findall(r"^\*\*([A-Z])\.\*\*", "\n".join(itertools.chain(*remarks)), re.MULTILINE))
    for holds, why in rows:
        assert holds or why
        assert set(filter(None, why.split(", "))) <= letters


@pytest.mark.parametrize(
    ("row", "holds", "ratio"),
    [
        (Row("time", 1.10, 1.11), True, 1.1),
        (Row("time", 1.10, 1.12), False, 1.2),
        (Row("count", 0.33, 0.334, "percent", digits=2), True, 0.334 / 0.33),
        (Row("count", 100, 101, "count", digits=0), False, 1.01),
        (Row("bound", 1.04, 1.01, bound=True), True, 0.25),
        (Row("bound", 0.3, 0.31, "GB", bound=True), False, 0.31 / 0.3),
        (Row("traffic", 14, 14 * (1 + 2 * FAR), "widths"), False, 1 + 2 * FAR),
    ],
)
def test_a_row_holds_within_what_its_paper_states(row: Row, holds: bool, ratio: float) -> None:
    assert row.holds == holds
    assert row.ratio == pytest.approx(ratio)


@pytest.mark.parametrize(("name", "count"), PARAMS.items())
def test_parameters_of_deep_delta(name: str, count: int) -> None:
    assert params(numbers(preset("ddl-small"), VARIANTS[name]), "depth") == count


def test_parameters_of_hyper_connections() -> None:
    assert params(numbers(preset("olmo-1b"), {"kind": "hyper_connections"}), "depth") == 394_048


def test_parameters_of_the_released_muddformer() -> None:
    model = numbers(preset("muddformer-2.8b"), AS_RELEASED)
    assert (params(model, "depth"), params(model)) == (8_775_709, 2_804_871_709)


@pytest.mark.parametrize(("dilation", "period"), [(1, 1), (4, 1), (4, 5)])
def test_parameters_of_denseformer(dilation: int, period: int) -> None:
    depth = {"kind": "denseformer", "dilation": dilation, "period": period}
    rows = sum(row // dilation + 1 for row in range(1, 49) if row % period == 0)
    assert params(numbers(preset("denseformer-48"), depth), "depth") == rows


def test_parameters_of_canon() -> None:
    model = llama()
    plain, changed = (params(coefficients(each)) for each in (model, _canon()))
    assert changed - plain == model.n_layers * 4 * (2 * 2048 + 3 * 2048 + 2 * 5504)


def test_traffic_of_fused_hyper_connections() -> None:
    model = preset("mhc-27b")
    depth = numbers(model, {"kind": "mhc"})["sublayers"][1]["depth"]
    assert (depth["read"] + depth["written"]) // (2 * model.d_model) == 3 * 4 + 2


def test_local_mixers_read_and_write_their_channels_on_their_own() -> None:
    plain, changed = coefficients(llama()), coefficients(_canon())
    for index, channels in enumerate((4 * 2048, 2048 + 2 * 5504)):
        before, after = (mixer_operators(model, model["sublayers"][index], WORK) for model in (plain, changed))
        # What no product hides; autograd keeps the taps of each channel beside.
        assert after[-1]["bytes"] - before[-1]["bytes"] == pytest.approx(2 * 4096 * channels * 2, rel=1e-2)
        assert after[-1]["kernels"] - before[-1]["kernels"] == 2
        assert after[0]["bytes"] == pytest.approx(before[0]["bytes"], rel=1e-2)


@pytest.mark.parametrize(("depth", "more"), [(PLAIN, 0), ({"kind": "attention_residuals"}, 0), (AS_RELEASED, 2)])
def test_a_wide_product_is_a_kernel_of_its_own(depth: dict[str, object], more: int) -> None:
    model = numbers(preset("muddformer-1.3b"), depth)
    last = model["sublayers"][2 * 20]
    assert depth_operator(model, last["depth"], WORK, "forward")["kernels"] == DEPTH_KERNELS + more


def _canon() -> ModelShape:
    return next(method for method in methods() if method.name == "Canon ABCD").apply(llama())
