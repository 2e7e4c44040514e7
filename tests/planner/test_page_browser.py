"""The page of a plan in a real browser, without a screen: it computes and draws what Python does."""

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from twoaxis.planner.formulas import collectives, counts, roofline, written
from twoaxis.planner.formulas import schedules as pipeline
from twoaxis.planner.formulas.page_content import advice, best_rows, facts, figure, table_rows
from twoaxis.planner.formulas.rows import method_row, methods_of, refusal, step_of, unpacked
from twoaxis.planner.page.document import FIGURES, WIDTHS

from ..browsing import Seen, launched_browser, looking, skip_without_browser
from .page_example import numbers_of, page_tables, page_text, setting, some_choice

READY = "html[data-state=ready]"

skip_without_browser()


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.html"
    path.write_text(page_text(), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched_browser() as launched:
        yield launched


class SeenPlan(Seen):
    """A plan that is open and has drawn its figures."""

    def __init__(self, browser: Any, plan: Path, width: int, **options: Any) -> None:
        super().__init__(browser, plan, width, **options)
        if options.get("java_script_enabled", True):
            self.page.wait_for_selector(READY)

    def choose(self, **values: Any) -> None:
        """Sets controls as a reader does, and waits for the numbers."""
        self.page.evaluate(SET, values)
        self.page.wait_for_selector(READY)


SET = """(values) => {
  for (const [name, value] of Object.entries(values)) {
    const control = document.getElementById(`set-${name}`);
    control.value = control.type === 'range' ? JSON.parse(control.dataset.values).indexOf(value) : value;
    if (control.value === '') throw new Error(`${name} cannot be ${value}`);
    control.dispatchEvent(new Event('input', { bubbles: true }));
  }
}"""


@pytest.fixture
def see(browser: Any, plan: Path) -> Iterator[Any]:
    with looking(SeenPlan, browser, plan) as look:
        yield look


def runnable(seeds: range) -> list[dict[str, Any]]:
    choices = [some_choice(seed) for seed in seeds]
    found = page_tables()
    return [
        choice
        for choice in choices
        if not refusal(choice, found["devices"][choice["device"]], found["layers"][choice["layers"]])
    ]


def test_the_browser_computes_what_python_does(see: Any) -> None:
    seen = see()
    choices = runnable(range(60))[:4]
    assert len(choices) == 4
    for choice in choices:
        seen.choose(**choice)
        shown = seen.page.evaluate("({ choice: window.plan.choice, rows: window.plan.rows })")
        assert shown["choice"] == choice
        assert [row["method"] for row in shown["rows"]] == methods_of(page_tables(), choice)
        for row in shown["rows"]:
            expected = numbers_of(choice, row["method"])
            assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-9), row["method"]
    assert seen.complaints == []


def test_the_browser_draws_what_python_does(see: Any) -> None:
    seen = see()
    choice = runnable(range(60))[-1]
    seen.choose(**choice, goal="local-mixing", chosen="7")
    view = {"goal": "local-mixing", "chosen": 7}
    rows = [method_row(page_tables(), choice, method) for method in methods_of(page_tables(), choice)]
    step = step_of(page_tables(), choice, 7)
    for name in FIGURES:
        for width in WIDTHS[name]:
            drawn = seen.page.evaluate(DRAW, [name, width])
            assert drawn == figure(page_tables(), choice, rows, step, view, name, width), name
    for tables_of in (table_rows, best_rows):
        assert seen.page.evaluate(TABLE, tables_of.__name__) == tables_of(page_tables(), choice, rows, view)
    assert seen.page.locator("#advice").inner_text() == advice(page_tables(), choice, rows, "local-mixing")
    assert seen.page.locator(".evidence:visible").count() == 1
    told = seen.page.locator("#facts dd").all_inner_texts()
    assert told == [value for _, value in facts(choice, rows, step, view)]


TABLE = """(name) => {
  const { tables } = JSON.parse(document.getElementById('data').textContent);
  return formulas[name](tables, window.plan.choice, window.plan.rows, window.plan.view);
}"""

DRAW = """([name, width]) => {
  const { choice, rows, step, view } = window.plan;
  const { tables } = JSON.parse(document.getElementById('data').textContent);
  return formulas.figure(tables, choice, rows, step, view, name, width);
}"""


def calls(seed: int) -> list[tuple[Any, list[Any]]]:
    """Formulas with arguments at random."""
    pick = random.Random(seed)
    ranks, virtual = pick.randint(1, 5), pick.randint(1, 3)
    microbatches = ranks * pick.randint(1, 4)
    stages = ranks * virtual
    order = pipeline.schedule_order("interleaved", ranks, virtual, microbatches)
    forward, backward = ([pick.uniform(0, 2) for _ in range(stages)] for _ in range(2))
    link = [pick.uniform(0, 1) for _ in range(stages - 1)]
    held = [[pick.randint(0, 10**9) for _ in range(stages)] for _ in range(3)]
    sent = [pick.randint(0, 10**8) for _ in range(stages - 1)]
    transfers = pick.choice(["overlapped", "blocking"])
    result = pipeline.simulate(order, forward, backward, link, link, transfers)
    leaves = [[first, pick.randint(first, 2 * stages), pick.randint(1, 9999), 1] for first in range(2 * stages)]
    forwarding = pick.choice(["naive", "cached", "cached_own"])
    edges = [2 * stage for stage in range(stages + 1)]
    op = [10 ** pick.uniform(0, 15) for _ in range(5)]
    rates = setting().rates
    numbers = unpacked(page_tables(), page_tables()["packs"][pick.randrange(len(page_tables()["packs"]))], 32)
    work = {"batch": pick.randint(1, 8), "tokens": pick.randint(1, 9), "context": pick.randint(0, 999), "tensor": 2}
    work |= {"sequence": pick.choice(["none", "tensor"]), "engine": "fused"}
    value = pick.choice([1, -1]) * 10 ** pick.uniform(-9, 14)
    experts = {"routed": [64, pick.randint(1, 8), 10**6], "params": 10**8, "tables": pick.randint(0, 10**6)}
    return [
        (pipeline.gpipe_order, [ranks, microbatches]),
        (pipeline.one_f_one_b_order, [ranks, microbatches]),
        (pipeline.interleaved_order, [ranks, virtual, microbatches]),
        (pipeline.simulate, [order, forward, backward, link, link, transfers]),
        (pipeline.exposed_seconds, [order, forward, backward, link, link, transfers]),
        (pipeline.peak_memory, [result, held[0][:ranks], held[1], sent, sent, [held[2], held[2]]]),
        (collectives.hop_bytes, [leaves, edges, ranks, forwarding]),
        (collectives.waiting_bytes, [leaves, edges, ranks, forwarding]),
        (collectives.even_cuts, [pick.randint(stages, 99), stages]),
        (collectives.data_parallel_bytes, [ranks, op[0], 4, 2, microbatches, pick.choice(["none", "optimizer", "weights"])]),
        (collectives.tensor_parallel_bytes, [ranks, 3, op[0], 64, 2, work["sequence"]]),
        (collectives.stored_bytes, [op[0], pick.randint(1, 9999), pick.choice([0, 512]), ranks, work["sequence"]]),
        (roofline.operator_seconds, [roofline.operator(*op), rates]),
        (roofline.bound, [roofline.operator(*op), rates]),
        (roofline.fused, [[roofline.operator(*op), roofline.operator(*op[::-1])], op[2]]),
        (counts.visible_pairs_of, [pick.randint(1, 10**6), pick.choice([0, 128])]),
        (counts.forward_counts, [numbers, work["batch"], work["tokens"]]),
        (counts.parameter_counts, [numbers]),
        (roofline.weights_read, [experts, pick.randint(1, 100)]),
        (roofline.sublayer_seconds, [numbers, numbers["sublayers"][0], work, rates, setting().links["tensor"]]),
        (written.fixed, [value, pick.randint(0, 3)]),
        (written.three_digits, [value]),
        (written.percent, [value]),
        (written.amount, [value, written.BYTES]),
        (written.log2_of, [abs(value)]),
    ]


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[name], expected[name]) for name in expected)
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(expected, str):
        return found == expected
    return math.isclose(found, expected, rel_tol=1e-9)


def test_formulas_answer_alike_in_both_languages(see: Any) -> None:
    page = see().page
    for seed in range(50):
        asked = calls(seed)
        given = [[function.__name__, arguments] for function, arguments in asked]
        answers = page.evaluate("(given) => given.map(([name, values]) => formulas[name](...values))", given)
        for (function, arguments), answer in zip(asked, answers, strict=True):
            expected = function(*arguments)
            assert same(answer, expected), f"{function.__name__}{arguments}: {answer}, in Python {expected}"


def test_the_page_asks_for_nothing_and_has_no_complaint(see: Any, plan: Path) -> None:
    seen = see()
    seen.page.mouse.move(640, 600)
    assert set(seen.requests) <= {plan.as_uri(), "data:,"}
    assert seen.complaints == []


def test_what_cannot_run_says_why_and_shows_the_last_numbers(see: Any) -> None:
    seen = see()
    before = seen.page.evaluate("window.plan.rows[0].step_seconds")
    seen.choose(batch=1)
    assert "A batch of 1 does not divide" in seen.page.locator("#refusal").inner_text()
    assert seen.page.evaluate("window.plan.rows[0].step_seconds") == before
    seen.choose(batch=16)
    assert not seen.page.locator("#refusal").is_visible()


def test_a_keyboard_is_enough(see: Any) -> None:
    seen = see()
    first = seen.page.evaluate("window.plan")
    for _ in range(3):
        seen.page.keyboard.press("Tab")
    assert seen.page.evaluate("document.activeElement.closest('aside') !== null")
    seen.page.focus("#set-tokens")
    seen.page.keyboard.press("ArrowRight")
    seen.page.wait_for_selector(READY)
    later = seen.page.evaluate("window.plan")
    assert later["choice"]["tokens"] == 2 * first["choice"]["tokens"]
    assert seen.page.locator("output[for=set-tokens]").inner_text() == "4\u202f096"
    assert seen.page.get_attribute("#set-tokens", "aria-valuetext") == "4\u202f096"
    seen.page.focus("form button[type=reset]")
    seen.page.keyboard.press("Enter")
    seen.page.wait_for_timeout(50)
    seen.page.wait_for_selector(READY)
    assert seen.page.evaluate("window.plan.choice") == first["choice"]


def test_a_bar_is_a_way_to_the_method_in_detail(see: Any) -> None:
    seen = see()
    seen.page.locator("#memory .plot.wide .bar[data-method='8'] .name").click()
    seen.page.wait_for_selector(READY)
    assert seen.page.evaluate("window.plan.view.chosen") == 8
    assert seen.page.locator("#set-chosen").input_value() == "8"


OUTSIDE = """() => [...document.querySelectorAll('figure .plot svg text')].filter((text) => {
  const own = text.getBoundingClientRect(), room = text.closest('section').getBoundingClientRect();
  return own.width > 0 && (own.left < room.left - 0.5 || own.right > room.right + 0.5);
}).map((text) => text.closest('section').id + ': ' + text.textContent)"""


def test_nothing_is_wider_than_the_screen(see: Any) -> None:
    for width in (320, 390, 768, 1280):
        seen = see(width)
        seen.open_everything()
        wide = seen.page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, f"at {width} pixels the page is {wide} wide"
        assert seen.page.evaluate(OUTSIDE) == [], f"at {width} pixels"


def test_without_scripts_the_start_is_there(see: Any) -> None:
    seen = see(java_script_enabled=False)
    assert seen.page.locator(".plot.wide svg").count() == len(FIGURES)
    assert seen.page.locator("#numbers tbody tr").count() == len(page_tables()["methods"])
    assert not seen.page.locator("#controls").is_visible()
    assert seen.page.locator("#step .plot.wide").is_visible()


CONTRASTS = """() => {
  const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
  const ground = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const color = numbers(getComputedStyle(one).backgroundColor);
      if (color.length < 4 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  return [...document.querySelectorAll('p, dt, dd, li, label, legend, summary, th, td, figcaption, button, select, svg text')]
    .filter((one) => one.textContent.trim() && one.getBoundingClientRect().width > 0 && !one.matches('svg .number'))
    .map((one) => {
      const style = getComputedStyle(one);
      const [a, b] = [light(numbers(one.closest('svg') ? style.fill : style.color)), light(ground(one))].sort((x, y) => y - x);
      return { text: one.textContent.slice(0, 30), contrast: (a + 0.05) / (b + 0.05) };
    }).filter((one) => one.contrast < 4.5);
}"""


def test_light_and_dark_are_both_legible(see: Any) -> None:
    for scheme in ("light", "dark"):
        assert see(color_scheme=scheme).page.evaluate(CONTRASTS) == [], scheme
