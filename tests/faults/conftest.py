"""What the tests of faults begin with: a process that runs verbs, and a run and a study that it has made."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from .verbs import write_inputs


@dataclass
class Ended:
    """How a command line has ended."""

    status: int
    count: int
    said: str


@dataclass
class Forks:
    """Runs command lines, each in a fork of a process that has everything loaded."""

    process: subprocess.Popen[str]
    log: Path

    def run(self, words: list[object], within: Path, fault: str = "none", at: int = 0) -> Ended:
        self.log.write_bytes(b"")
        request = {
            "words": [str(word) for word in words],
            "within": str(within),
            "fault": fault,
            "at": at,
            "log": str(self.log),
            "environment": {"TWOAXIS_CACHE": str(within / "cache"), "HF_HUB_OFFLINE": "1", "TMPDIR": str(self.log.parent)},
        }
        assert self.process.stdin and self.process.stdout
        print(json.dumps(request), file=self.process.stdin, flush=True)
        answer = json.loads(self.process.stdout.readline())
        return Ended(answer["status"], answer["count"], self.log.read_text())


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    server = Path(__file__).with_name("forks.py")
    log = tmp_path_factory.mktemp("log") / "log.txt"
    with subprocess.Popen([sys.executable, server], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Forks(process, log)
        assert process.stdin
        process.stdin.close()


@pytest.fixture(scope="session")
def given(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("given")
    write_inputs(path)
    ended = [
        forks.run(["train", path / "recipe.toml", "--run", path / "run"], path),
        forks.run(["study", path / "study.toml", "--out", path / "study"], path),
    ]
    assert [one.status for one in ended] == [0, 0], [one.said for one in ended]
    return path
