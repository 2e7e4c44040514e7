"""The README says what is so: its table is the tables', its Python runs, its commands exist."""

import re
import tomllib
from pathlib import Path
from typing import Any

from twoaxis import DEPTH, FEED_FORWARD, LOCAL, SEQUENCE
from twoaxis.cli.app import app
from twoaxis.study.report_data import read_report

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def relation(row: Any) -> str:
    return row.example(next(iter(row.examples))).init_equivalence.relation.replace("_", " ")


def expected_rows() -> list[str]:
    rows = [f"| depth | `{r.kind}` | {r.summary} | {relation(r)} | {r.evidence} |" for r in DEPTH]
    rows += [f"| sequence | `{r.kind}` | {r.summary} | | {r.evidence} |" for r in SEQUENCE]
    return rows + [f"| local | `{r.kind}` | {r.summary} | | {r.evidence} |" for r in LOCAL]


def test_mixer_table_is_the_tables():
    found = [line for line in README.splitlines() if re.match(r"\| (depth|sequence|local) \|", line)]
    assert found == expected_rows()
    (feed_forwards,) = re.findall(r"Feed-forwards: (.*)\.$", README, re.MULTILINE)
    assert feed_forwards == ", ".join(f"`{row.kind}`" for row in FEED_FORWARD)


def test_python_block_runs(capsys, tmp_path, monkeypatch):
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "README.md", "exec"), {})
    answer, text = capsys.readouterr().out.split("\n", 1)
    assert answer.endswith(".") and text
    report = read_report(tmp_path / "runs" / "ten-lines")
    assert report.complete and report.answer == answer
    assert report.control == "residual" and len(report.arms["deep_delta"].losses) == 2


def test_every_command_shown_is_a_verb():
    shown = set(re.findall(r"^twoaxis (\w+)", README, re.MULTILINE))
    assert shown == {command.name for command in app.registered_commands}


def test_readme_is_short():
    assert len(README.splitlines()) <= 120


def test_files_it_names_exist():
    for name in re.findall(r"(?:examples|studies|docs)/[\w./-]+", README):
        assert (ROOT / name).exists(), name
        if name.endswith(".toml"):
            tomllib.loads((ROOT / name).read_text(encoding="utf-8"))
