"""No trace reaches a user: whatever happens in a verb is one line, and developers can still see all of it."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import typer

from twoaxis.cli import main
from twoaxis.cli.app import app

COMMANDS = {command.name: command for command in app.registered_commands}


def broken() -> None:
    """Has a fault."""
    raise KeyError("nobody thought of this\nat all")


@pytest.mark.parametrize("verb", sorted(str(name) for name in COMMANDS))
def test_an_unforeseen_error_is_one_line_and_its_trace_is_kept(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a verb whose faults show a trace, and a fault whose trace is lost."""
    monkeypatch.setattr(COMMANDS[verb], "callback", broken)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert main([verb]) == 2
    captured = capsys.readouterr()
    [kept] = tmp_path.iterdir()
    said = r"twoaxis: stopped by an unexpected error (KeyError: 'nobody thought of this\nat all')"
    assert captured.err == f"{said}; its traceback is in {kept}; please report it\n"
    assert captured.out == "" and "in broken" in kept.read_text() and "Traceback" in kept.read_text()
    with pytest.raises(KeyError):
        main(["--debug", verb])


def test_where_no_trace_can_be_kept_the_line_says_how_to_see_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(COMMANDS["list"], "callback", broken)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    assert main(["list"]) == 2
    assert "; --debug shows its traceback; please report it\n" in capsys.readouterr().err


@pytest.mark.parametrize("error", [KeyboardInterrupt, typer.Abort])
def test_an_interrupt_is_one_line(
    error: type[BaseException], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        raise error

    monkeypatch.setattr(COMMANDS["list"], "callback", interrupted)
    assert main(["list"]) == 130
    assert capsys.readouterr().err == "twoaxis: interrupted\n"


def test_a_full_disk_and_a_closed_pipe_behind_the_output_show_no_trace() -> None:
    """Catches output that fails only when the process ends, where Python shows a trace of its own."""
    command = [sys.executable, "-m", "twoaxis", "--version"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        found = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=environment)
    message = "twoaxis: No space left on device; free space, or check the path and its permissions\n"
    assert (found.returncode, found.stderr) == (2, message)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1
