"""The guides of docs run as they stand there: the tutorial, a mixer in its own package, excerpts of examples, and links."""

import io
import re
import tomllib
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from twoaxis.cli.app import app, main
from twoaxis.study import StudyConfig
from twoaxis.study.report_data import read_report
from twoaxis.study.timing import measure

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TUTORIAL = (DOCS / "tutorial.md").read_text(encoding="utf-8")
CELLS = re.findall(r"```\{code-cell\} python\n(.*?)```", TUTORIAL, re.DOTALL)
EMPTY = '<svg xmlns="http://www.w3.org/2000/svg" width="1" height="1"></svg>'


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


def written_pages() -> list[Path]:
    return [path for path in DOCS.rglob("*.md") if "_build" not in path.parts]


def test_tutorial_runs(capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twoaxis.study.running.engine.LocalEngine", EngineWithoutProcesses)
    monkeypatch.setattr("twoaxis.study.running._process_timer", lambda folder, progress: measure)
    monkeypatch.setattr("twoaxis.study.timing.ROUNDS", 1)
    # Other tests draw figures.
    monkeypatch.setattr("vl_convert.vegalite_to_svg", lambda specification: EMPTY)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for cell in CELLS:
        fewer, found = re.subn(r'"steps": \d+', '"steps": 3', cell)
        fewer = fewer.replace('"batch_size": 8', '"batch_size": 8, "validation_tokens": 1024')
        exec(compile(fewer, "tutorial.md", "exec"), names)
        answer, _, text = capsys.readouterr().out.partition("\n")
        assert answer and (text or not found)
    report = read_report(tmp_path / "runs" / "ten-lines")
    assert report.complete and report.control == "residual" and len(report.arms["deep_delta"].losses) == 2


def test_readme_has_the_first_cell() -> None:
    assert re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL) == CELLS[:1]


def test_study_file_of_the_tutorial_is_the_study_in_python() -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", TUTORIAL, re.DOTALL)
    names: dict[str, Any] = {}
    exec(CELLS[0].partition("print(")[0], names)
    assert StudyConfig.parse(tomllib.loads(text)) == StudyConfig.parse(names["study"])


def test_guides_show_verbs_that_exist() -> None:
    pages = "\n".join(path.read_text(encoding="utf-8") for path in DOCS.glob("*.md"))
    shown = set(re.findall(r"^\$ twoaxis ([a-z]\w*)", pages, re.MULTILINE))
    assert len(shown) > 5 and shown <= {command.name for command in app.registered_commands}


def test_excerpts_are_in_the_examples() -> None:
    sources = "".join((ROOT / "examples" / "drop_in" / name).read_text(encoding="utf-8") for name in ("nanogpt.py", "llama.py"))
    excerpts = re.findall(r"```python\n(.*?)```", (DOCS / "drop_in.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(excerpts) == 6 and all(excerpt in sources for excerpt in excerpts)


def test_links_of_pages_lead_to_files() -> None:
    pages = [*written_pages(), *ROOT.glob("*.md"), *(ROOT / "examples").rglob("*.md")]
    for page in pages:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            file = page.parent / link.partition("#")[0]
            assert "://" in link or file.exists(), f"{page.relative_to(ROOT)}: {link}"


def test_every_page_is_in_the_site() -> None:
    named = set(re.findall(r"^(?:[\w ]+ <)?([\w/]+)>?$", (DOCS / "index.md").read_text(encoding="utf-8"), re.MULTILINE))
    written = {path.relative_to(DOCS).with_suffix("").as_posix() for path in written_pages()}
    below = {page for page in written if page.startswith(("mixers/", "studies/")) and not page.endswith("/README")}
    assert named == written - below - {"README", "index"}


def test_install_names_every_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    rows = re.findall(r"^\| (`.*`) \|", (DOCS / "install.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == set(extras) - {"dev"}
