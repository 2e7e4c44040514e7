"""`benchmarks/serve_load.py` succeeds only when its clients lived and were answered."""

import argparse
from collections import Counter
from types import ModuleType
from typing import Any

import pytest

from ...scripts import ROOT, load_script


@pytest.fixture(scope="module")
def load() -> ModuleType:
    return load_script(ROOT / "benchmarks" / "serve_load.py")


class Idle:
    """A server that stops at once, and has done nothing."""

    def metrics(self) -> dict[str, float]:
        names = ("batch_generations", "queue_generations", "faults_total", "new_tokens_total", "prompt_tokens_total")
        return dict.fromkeys([f"twoaxis_{name}" for name in (*names, "row_steps_total", "steps_total", "disconnects_total")], 0)

    def memory_bytes(self) -> None:
        return None

    def stop(self) -> int:
        return 0


@pytest.mark.parametrize(("events", "status"), [({"answers": 1}, 0), ({}, 1)])
def test_a_run_without_answers_fails(
    load: ModuleType, events: dict[str, int], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(load.Client, "run", lambda client, until: client.events.update(events))
    arguments = argparse.Namespace(requests=0, max_new_tokens=1, clients=1, seconds=1, max_batch=1, queue=1)
    assert load.measure(Idle(), arguments) == status
    assert "exit status after SIGTERM      0" in capsys.readouterr().out


def test_a_client_that_dies_is_noted(load: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(client: Any) -> None:
        raise KeyError("text")

    for act in ("ask", "malformed", "too_long", "leave"):
        monkeypatch.setattr(load.Client, act, broken)
    client = load.Client(0, Idle(), [])
    client.run(float("inf"))
    assert client.events == Counter({"clients that died": 1})
    assert client.wrong == ["a client died: KeyError('text')"]
