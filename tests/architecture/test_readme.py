"""The README says what is so: its table is the tables', its Python runs, its commands exist."""

import io
import re
import tomllib
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch

from twoaxis import DEPTH, FEED_FORWARD, LOCAL, SEQUENCE
from twoaxis.cli.app import app, main
from twoaxis.study.report_data import read_report
from twoaxis.study.timing import measure

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def relation(row: Any) -> str:
    return row.example(next(iter(row.examples))).init_equivalence.relation.replace("_", " ")


def expected_rows() -> list[str]:
    return [f"| depth | `{r.kind}` | {r.summary} | {relation(r)} | {r.evidence} |" for r in DEPTH]


def test_mixer_table_is_the_tables():
    found = [line for line in README.splitlines() if re.match(r"\| (depth|sequence|local) \|", line)]
    assert found == expected_rows()
    tables = {"Sequence mixers": SEQUENCE, "Local mixers, inside a sublayer": LOCAL, "Feed-forwards": FEED_FORWARD}
    for words, table in tables.items():
        (names,) = re.findall(rf"^{words}: (.*)\.$", README, re.MULTILINE)
        assert names == ", ".join(f"`{row.kind}`" for row in table)


class EngineWithoutProcesses:
    """Trains where the test runs: that a run is a process of its own is for tests of the runner."""

    def __init__(self, jobs: int, processes: int) -> None:
        self.threads = torch.get_num_threads()

    def run(self, tasks: Any, listener: Any) -> None:
        for task in tasks:
            assert task.command[1:4] == ("-m", "twoaxis", "train")
            listener.began(task)
            with redirect_stdout(io.StringIO()):
                code = main(task.command[3:])
            listener.ended(task, code)


def test_python_block_runs(capsys, tmp_path, monkeypatch):
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    monkeypatch.setattr("twoaxis.study.running.engine.LocalEngine", EngineWithoutProcesses)
    monkeypatch.setattr("twoaxis.study.running._process_timer", lambda folder, progress: measure)
    monkeypatch.setattr("twoaxis.study.timing.ROUNDS", 1)
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
