"""The page of a plan: its formulas are those of Python, its models those of the planner, and it needs nothing else."""

import ast
import json
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from twoaxis.core.errors import ConfigError, DataError
from twoaxis.planner.coefficients import coefficients
from twoaxis.planner.evidence import evidence
from twoaxis.planner.formulas.page_content import advice, best_rows, figure, table_rows
from twoaxis.planner.formulas.rows import method_row, methods_of, refusal, sorted_by, step_of, unpacked
from twoaxis.planner.formulas.written import BYTES, amount, log2_of, percent, three_digits
from twoaxis.planner.methods import Refusal, fitted, methods
from twoaxis.planner.model import read_model
from twoaxis.planner.model.shape import ModelShape
from twoaxis.planner.page import planner_page, write_page
from twoaxis.planner.page.data import OF_ONE_MODEL, WINDOWS, Data, Pool, first_choice, with_layers
from twoaxis.planner.page.document import sides
from twoaxis.planner.quantities import Precision
from twoaxis.planner.setting import ParallelLayout, Setting

from ..scripts import DOCS, load_script
from .page_example import model, numbers_of, page_tables, page_text, setting, setting_of, some_choice


@pytest.fixture(scope="module")
def export() -> ModuleType:
    return load_script(DOCS / "page_formulas.py")


def test_the_formulas_of_the_page_are_up_to_date(export: ModuleType) -> None:
    assert export.WRITTEN.read_text(encoding="utf-8") == export.javascript(), "run `make docs`"


OUTSIDE = [
    "def f(x):\n    return sum(x)",
    "def f(x):\n    return round(x)",
    "def f(x):\n    if x:\n        return 1\n    return 0",
    "def f(x):\n    return x or 1",
    "def f(x):\n    return not x",
    "def f(x):\n    return [y for y in x if y]",
    "def f(x):\n    return x[-1]",
    "def f(x, y):\n    return (x - y) % 3",
    "def f(x):\n    return -x % 3",
    "def f(x):\n    return x.items()",
    "def f(x):\n    return x in [1, 2]",
    "def f(x):\n    return x == [1]",
    "def f(x):\n    return [1] + x",
    "def f(x):\n    return [0] * x",
    "def f(x):\n    return max(x)",
    "def f(x):\n    return f(x=1)",
    "def f(x=1):\n    return x",
    "def f(x):\n    return g(x)",
    "def f(x):\n    return 0 < x < 3",
    "def f(x):\n    return 9007199254740993",
    "def f(x):\n    return lambda: x",
    "def f(x):\n    return f'{x}'",
    "def f(x):\n    return {y: 1 for y in x}",
    "def f(default):\n    return default",
    "def f(x):\n    for i in range(len(x)):\n        x.append(i)\n    return x",
    "def f(x):\n    for i in range(x):\n        x = 2\n    return x",
    "def f(x):\n    for i in range(x):\n        i = 2\n    return x",
    "def f(x):\n    for i in range(x):\n        x += 1\n    return x",
    "def f(x):\n    for i in range(x):\n        pass\n    return i",
    "def f(x):\n    try:\n        return 1\n    finally:\n        x = 2",
    "def f(x):\n    return x is 1",
    "def f(x):\n    del x\n    return 1",
    "def f(x):\n    with x:\n        return 1",
    "def f(x):\n    return x << 2",
]


@pytest.mark.parametrize("source", OUTSIDE)
def test_what_means_something_else_in_javascript_is_found(export: ModuleType, source: str) -> None:
    assert list(export.problems(ast.parse(source), {"f"}))


def test_what_means_the_same_is_not(export: ModuleType) -> None:
    source = "def f(x, y):\n    z = x < 1 and not y == 'a'\n    for i in range(3):\n        if z:\n            x += i % 2\n"
    assert list(export.problems(ast.parse(source), {"f"})) == []


def test_two_functions_of_one_name_are_found(export: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "MODULES", (*export.MODULES, "../formulas/rows.py"))
    with pytest.raises(ValueError, match="unpacked is defined twice"):
        export.javascript()


def test_unpacked_models_are_those_of_the_planner() -> None:
    found = page_tables()
    # All methods with the second choices; with the first ones every fourth, since no method packs its numbers in its own way.
    for depth, window, every in ((0, 64, 4), (1, 128, 1)):
        for at, method in list(enumerate(methods(window)))[::every]:
            shape = fitted(method, with_layers(model(), found["layers"][depth]))
            assert isinstance(shape, ModelShape)
            own = coefficients(shape)
            packs = [found["packs"][pack] for pack in found["models"][depth][at]]
            ours = {name: value for name, value in own.items() if name not in ("name", "depth_kind")}
            assert [unpacked(found, pack, window) for pack in packs] == [ours, ours], method.name
            assert set(found["shared"]) == set(own) - set(OF_ONE_MODEL)


def empty() -> Data:
    return {"windows": list(WINDOWS), **{name: [] for name in ("rows", "depths", "packs", "families")}}


def test_a_model_that_generates_in_another_form_has_both() -> None:
    whole = read_model("kimi-linear-48b-a3b")
    # One block of each sort: linear attention with a dense feed-forward, latent attention with experts.
    shape = replace(whole, blocks=(whole.blocks[0], whole.blocks[3]))
    found = empty()
    pool, refused = Pool(found), 0
    for at, method in enumerate(methods(64)):
        if method.kind not in ("residual", "attention_residuals", "short_swa", "kv_shift"):
            continue
        fit, packs = fitted(method, shape), pool.model(at, shape, Precision())
        refused += isinstance(fit, Refusal)
        assert bool(packs) != isinstance(fit, Refusal), method.name
        if isinstance(fit, ModelShape):
            assert packs[0] != packs[1]
            for pack, form in zip(packs, (fit, fit.in_generation()), strict=True):
                assert unpacked(found, found["packs"][pack], 64)["sublayers"] == coefficients(form)["sublayers"], method.name
    assert refused == 1


def test_a_model_keeps_the_windows_that_are_its_own() -> None:
    own = fitted(next(method for method in methods(128) if method.kind == "short_swa"), model())
    assert isinstance(own, ModelShape)
    found = empty()
    pool = Pool(found)
    seen = []
    for method in (0, [method.kind for method in methods()].index("short_swa")):
        pack = found["packs"][pool.model(method, own, Precision())[0]]
        seen.append({pair[1] for sub in unpacked(found, pack, 32)["sublayers"] for pair in sub["pairs"]})
    assert seen == [{0, 128}, {0, 128, 32}]


def test_the_page_computes_what_a_setting_does() -> None:
    compared = 0
    for seed in range(24):
        choice = some_choice(seed)
        device, n_layers = page_tables()["devices"][choice["device"]], page_tables()["layers"][choice["layers"]]
        if refusal(choice, device, n_layers):
            continue
        for method in methods_of(page_tables(), choice)[seed % 4 :: 4]:
            row = method_row(page_tables(), choice, method)
            expected = numbers_of(choice, method)
            assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-12), (seed, method)
            compared += 1
    assert compared > 50


def test_a_choice_is_refused_where_python_refuses_it() -> None:
    seen = set()
    for seed in range(300):
        choice = some_choice(seed)
        device, n_layers = page_tables()["devices"][choice["device"]], page_tables()["layers"][choice["layers"]]
        try:
            plan = setting_of(choice)
            plan.layout.check(with_layers(model(), n_layers), choice["tokens"])
            assert plan.links
            accepted = True
        except ConfigError:
            accepted = False
        reason = refusal(choice, device, n_layers)
        assert accepted == (reason == ""), (choice, reason)
        seen.add(re.sub(r"\d+", "N", reason))
    assert len(seen) >= 6


def test_a_method_is_left_out_where_python_refuses_its_cut() -> None:
    refused = set()
    for ranks in (1, 2, 4, 8):
        layout = ParallelLayout(gpus=ranks, tensor=ranks)
        fitting = methods_of(page_tables(), some_choice(0) | {"layers": 1, "tensor": ranks})
        for at, method in enumerate(methods()):
            shape = fitted(method, model())
            assert isinstance(shape, ModelShape)
            try:
                layout.check(shape, 512)
                assert at in fitting, (ranks, method.name)
            except ConfigError:
                assert at not in fitting, (ranks, method.name)
                refused.add((ranks, method.kind))
    assert (4, "short_swa") in refused
    # The reason stands on a page that starts there.
    layout = ParallelLayout(gpus=4, tensor=4)
    page = planner_page(model(), setting().replace(layout=layout))
    assert "tensor=4: must be a divisor of the 2 heads of" in page and "2 heads" not in page_text()


def test_the_page_starts_with_the_sequences_of_the_plan() -> None:
    assert '"prompts":32' in planner_page(with_layers(model(), 1), one_device(), prompts=32)
    assert '"prompts":8' in page_text()


def test_the_page_needs_nothing_and_says_what_it_is_of() -> None:
    page = page_text()
    assert not re.findall(r"(?:src|href)=\"(?!#|data:)", page) and "@import" not in page and "url(" not in page
    assert "Plan of decoder" in page and all(f">{method['name']}</text>" in page for method in page_tables()["methods"])
    # Names stand in SVG as they are.
    assert not any(set('<>&"') & set(method["name"]) for method in page_tables()["methods"])
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None and json.loads(data[1])["tables"] == page_tables()
    assert len(page) < 1_000_000


def one_device() -> Setting:
    return setting().replace(layout=ParallelLayout(gpus=1), batch=1)


def test_a_model_may_be_called_anything() -> None:
    page = planner_page(replace(with_layers(model(), 1), name="</script><b>"), one_device(), "local-mixing")
    assert "</script><b>" not in page
    at = [method["name"] for method in page_tables()["methods"]].index("ShortSWA")
    assert f'<option value="{at}" selected>' in page


def test_the_method_in_detail_is_the_one_for_the_goal() -> None:
    at = {method["name"]: at for at, method in enumerate(page_tables()["methods"])}
    assert f'<option value="{at["DDL"]}" selected>' in page_text()
    with pytest.raises(ConfigError, match="goal"):
        planner_page(model(), setting(), "speed")


def test_a_setting_that_cannot_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="more stages than the 1 blocks"):
        planner_page(with_layers(model(), 1), setting())


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write_page(tmp_path / "plan.html", model(), setting(), "shortcut")
    assert (tmp_path / "plan.html").read_text(encoding="utf-8") == page_text()
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError):
        write_page(tmp_path / "file" / "plan.html", with_layers(model(), 1), one_device())


def methods_in(drawn: str) -> list[str]:
    return re.findall(r' data-method="(\d+)"', drawn)


def test_every_chart_and_table_has_one_order_and_marks_what_exceeds_the_memory() -> None:
    found, choice = page_tables(), first_choice(page_tables(), model(), setting(), 8)
    rows = [method_row(found, choice, method) for method in methods_of(found, choice)]
    limit = sum(sorted(row["memory_bytes"] for row in rows)[-6:-4]) / 2
    tight = {**found, "devices": [{**device, "limit_bytes": limit} for device in found["devices"]]}
    view, step = {"goal": "all", "chosen": 0}, step_of(found, choice, 0)
    order = [str(row["method"]) for row in sorted_by(rows, "step_seconds")]
    over = {str(row["method"]) for row in rows if row["memory_bytes"] > limit}
    assert len(over) == 5
    table = table_rows(tight, choice, rows, view)
    assert methods_in(table) == order and table.count(" over</td>") == 5
    for name in ("step", "memory", "token", "cache", "front"):
        drawn = figure(tight, choice, rows, step, view, name, 470)
        assert (sorted if name == "front" else list)(methods_in(drawn)) == (sorted(order) if name == "front" else order), name
        marked = re.findall(r'<g class="(?:bar|point) [^"]*\bover\b[^"]*" data-method="(\d+)"', drawn)
        assert set(marked) == over, name
    shaded = re.search(r'<rect x="[\d.]+" y="([\d.]+)" width="[\d.]+" height="([\d.]+)" class="beyond"/>', drawn)
    words = re.search(r'<text x="[\d.]+" y="([\d.]+)" text-anchor="end" class="limit">shaded: over ', drawn)
    heights = re.findall(
        r'class="point[^"]*?( over)?(?: chosen)?" data-method="\d+"[^>]*><circle cx="[\d.]+" cy="([\d.]+)"', drawn
    )
    assert shaded is not None and words is not None and len(heights) == len(rows)
    top, bottom = float(shaded[1]), float(shaded[1]) + float(shaded[2])
    assert all((float(y) < bottom) == bool(is_over) for is_over, y in heights)
    assert float(words[1]) < top < min(float(y) for _, y in heights)
    best = methods_in(best_rows(tight, choice, rows, view))
    assert best == ["0", *[method for method in order if method != "0" and method not in over][:8]]


def test_the_advice_says_cost_rank_and_limit_in_one_sentence_with_the_studies_for_and_against() -> None:
    found, choice = page_tables(), first_choice(page_tables(), model(), setting(), 8)
    rows = [method_row(found, choice, method) for method in methods_of(found, choice)]
    shortcuts = [row for row in rows[1:] if found["methods"][row["method"]]["goal"] == "shortcut"]
    (ddl,) = (row for row in rows if found["methods"][row["method"]]["name"] == "DDL")
    rank = sum(row["step_seconds"] < ddl["step_seconds"] for row in shortcuts) + 1
    said = advice(found, choice, rows, "shortcut")
    assert said in page_text() and said.startswith("For a better shortcut the paper recommends DDL, which adds ")
    assert (
        f"(number {rank} of {len(shortcuts)})" in said and said.count(".\n") == 0 and " of 72.0 GB, 90 % of one h100." in said
    )
    tight = {**found, "devices": [{**device, "limit_bytes": ddl["memory_bytes"] - 1} for device in found["devices"]]}
    fastest = min((row for row in shortcuts if row["memory_bytes"] < ddl["memory_bytes"]), key=lambda row: row["step_seconds"])
    instead = f"; {found['methods'][fastest['method']]['name']} is the fastest within it"
    assert instead in advice(tight, choice, rows, "shortcut") and "over the limit of" in advice(tight, choice, rows, "all")
    for goal in ("shortcut", "local-mixing"):
        summary = re.search(rf'<details class="evidence" data-goal="{goal}"[^>]*>(.*?)</summary>', page_text(), re.DOTALL)
        assert summary is not None
        for word, studies in sides(evidence(goal)):
            assert f"{word}: {', '.join(one.name for one in studies) or 'none'}." in summary[1]


def test_numbers_are_rounded_and_sorted() -> None:
    assert [three_digits(value) for value in (0.004, 0.996, 9.994, 99.96, -1.005e3)] == [
        "0.00",
        "1.00",
        "9.99",
        "100.0",
        "-1005",
    ]
    assert percent(-0.0001) == "0.0 %"
    assert [log2_of(2.0**n) for n in (-3, 0, 9)] == [-3, 0, 9]
    rows = [{"at": at, "value": value} for at, value in enumerate([3, 1, 2, 1])]
    assert [row["at"] for row in sorted_by(rows, "value")] == [1, 3, 2, 0]


def test_an_amount_that_rounds_to_a_thousand_has_the_next_unit() -> None:
    assert [amount(value, BYTES) for value in (999.4, 999.6, 999.6e6, 1e9)] == ["999 B", "1.00 kB", "1.00 GB", "1.00 GB"]
