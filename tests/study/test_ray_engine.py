"""What runs get of a Ray cluster, and what becomes of runs that it loses; Ray itself is replaced by a stub here."""

import itertools
import random
import re
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from twoaxis.core.errors import StudyError
from twoaxis.study.running import ray_engine
from twoaxis.study.running.engine import Task
from twoaxis.study.running.ray_engine import RayEngine, worker_file
from twoaxis.study.running.ray_placement import GPUs, Share, gpus_for, share_out


@pytest.mark.parametrize(
    ("machines", "jobs", "share"),
    [
        # More than one machine has would wait for ever.
        ([{"CPU": 1}, {"CPU": 1}], 1, Share(1, 1, 0)),
        ([{"CPU": 16}, {"CPU": 16}], 3, Share(3, 8, 0)),
        ([{"CPU": 4}, {"CPU": 12}], 2, Share(2, 6, 0)),
        # A run computes on one GPU, which it shares with no other.
        ([{"CPU": 16, "GPU": 3}], 2, Share(2, 8, 1)),
        ([{"CPU": 16, "GPU": 4}, {"CPU": 16, "GPU": 4}], 1, Share(1, 16, 1)),
        ([{"CPU": 8, "GPU": 1}], 6, Share(1, 8, 1)),
        ([{"CPU": 8, "GPU": 2}], 3, Share(2, 4, 1)),
        ([{"CPU": 2, "GPU": 8}], 8, Share(2, 1, 1)),
        # The largest machine has no GPU, and a GPU without a processor runs nothing.
        ([{"CPU": 16, "GPU": 4}, {"CPU": 64}], 2, Share(2, 8, 1)),
        ([{"CPU": 0, "GPU": 4}, {"CPU": 8}], 2, Share(2, 4, 0)),
        # A head that runs nothing, and more jobs than there is room for.
        ([{"CPU": 0}, {"CPU": 2}], 5, Share(2, 1, 0)),
        ([{"CPU": 1.5, "memory": 1e9}], 1, Share(1, 1, 0)),
    ],
)
def test_shares_fit_on_machines(machines: list[dict[str, float]], jobs: int, share: Share) -> None:
    assert share_out(machines, jobs) == share


def test_any_share_fits_as_often_as_it_says_and_gpus_are_ones_that_ray_takes() -> None:
    chance = random.Random(0)
    for _ in range(500):
        machines = [
            {"CPU": float(chance.randint(1, 9)), "GPU": float(chance.choice([0, 0, 1, 2, 3, 8]))}
            for _ in range(chance.randint(1, 4))
        ]
        share = share_out(machines, chance.randint(1, 9))
        assert share.gpus in (0, 1)
        free = [dict(one) for one in machines]
        for _ in range(share.jobs):
            place = next(one for one in free if one["CPU"] >= share.cpus and one["GPU"] >= share.gpus - 1e-9)
            place["CPU"], place["GPU"] = place["CPU"] - share.cpus, place["GPU"] - share.gpus


def test_what_no_machine_can_ever_hold_is_refused_at_once() -> None:
    message = "a run needs 1 processor; the cluster has 1 machine with 0 processors and 0 GPUs; add a machine with `ray start`"
    with pytest.raises(StudyError, match=message):
        share_out([{"CPU": 0.0}], 1)
    message = (
        'device = "cuda" needs 1 GPU and 1 processor on one machine; the cluster has 2 machines with 4 processors and 0 GPUs'
    )
    with pytest.raises(StudyError, match=message):
        share_out([{"CPU": 4}, {"CPU": 4}], 1, "required")


@pytest.mark.parametrize(
    ("devices", "gpus", "share"),
    [
        (["cpu", "cpu"], "none", Share(6, 1, 0)),
        (["cpu", "auto"], "available", Share(1, 6, 1)),
        (["auto", "cuda:1"], "required", Share(1, 6, 1)),
    ],
)
def test_runs_on_processors_take_no_gpu(devices: list[str], gpus: GPUs, share: Share) -> None:
    assert gpus_for(devices) == gpus
    assert share_out([{"CPU": 6, "GPU": 1}], 6, gpus) == share


class Lost(Exception):
    pass


class Failed(Exception):
    def __init__(self, cause: Exception) -> None:
        self.cause = cause


class Stub:
    """A Ray whose tasks end as they are told to, in order."""

    exceptions = SimpleNamespace(RayTaskError=Failed, RayError=Exception)

    def __init__(self, endings: Sequence[Any], fails: Exception | None = None) -> None:
        self.endings, self.fails, self.started, self.address = list(endings), fails, [], ""
        self.machines: list[Mapping[str, float]] = [{"CPU": 2.0}]
        self.cancelled: list[int] = []

    def is_initialized(self) -> bool:
        return False

    def init(self, address: str, **_: Any) -> None:
        self.address = address
        # As Ray does.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))
        if self.fails:
            raise self.fails

    def nodes(self) -> list[dict[str, Any]]:
        dead = {"Resources": {"CPU": 64.0}, "Alive": False}
        return [dead, *({"Resources": one, "Alive": True} for one in self.machines)]

    def remote(self, **options: Any) -> Callable[[Any], Any]:
        def submit(task: Task, environment: Mapping[str, str]) -> int:
            self.started.append((task.name, options, environment))
            return len(self.started) - 1

        return lambda function: SimpleNamespace(remote=submit)

    def wait(self, references: list[int], **_: Any) -> tuple[list[int], list[int]]:
        return references[:1], references[1:]

    def available_resources(self) -> dict[str, float]:
        return {"memory": 1e9}

    def cancel(self, reference: int, force: bool) -> None:
        assert not force
        self.cancelled.append(reference)

    def get(self, reference: int) -> int:
        ending = self.endings[reference]
        if isinstance(ending, Exception):
            raise ending
        return ending


class Told:
    """What a study is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.ends: dict[str, int] = {}

    def began(self, task: Task) -> None: ...

    def watch(self) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)

    def ended(self, task: Task, code: int) -> None:
        self.ends[task.name] = code


def run(stub: Stub, folder: Path, monkeypatch: pytest.MonkeyPatch, tasks: int = 1, jobs: int = 1) -> Told:
    monkeypatch.setitem(sys.modules, "ray", stub)
    told = Told()
    made = [Task(f"run {number}", ("true",), folder / "run", folder / "log", {}) for number in range(tasks)]
    RayEngine(jobs).run(made, told)
    return told


@pytest.mark.parametrize(("losses", "code"), [(0, 0), (3, 0), (4, -9)])
def test_a_run_that_is_lost_starts_again(losses: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a lost worker that costs its run, and one that is tried for ever."""
    stub = Stub([Lost("a worker")] * losses + [0])
    told = run(stub, tmp_path, monkeypatch)
    assert told.ends == {"run 0": code} and len(stub.started) == min(losses, 3) + 1
    assert told.notes[1:] == [f"run 0: lost (Lost); starts again, {n} of 3 times" for n in range(1, min(losses, 3) + 1)]


def test_a_run_that_cannot_start_says_why_and_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Stub([Failed(FileNotFoundError("/there: is not shared with this machine"))])
    assert run(stub, tmp_path, monkeypatch).ends == {"run 0": 1} and len(stub.started) == 1
    assert (tmp_path / "log").read_text() == "/there: is not shared with this machine\n"


def test_shares_are_those_of_live_machines_and_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Stub([0, 0, 0])
    told = run(stub, tmp_path, monkeypatch, tasks=3, jobs=3)
    assert told.notes == ["Ray at local: 2 runs at once, since there is no room for 3, each with 1 processor and 0 GPUs"]
    options = {"max_retries": 0, "num_cpus": 1, "num_gpus": 0}
    assert stub.started == [(f"run {number}", options, {"OMP_NUM_THREADS": "1"}) for number in range(3)]


class Busy(Stub):
    """A Ray that has no place for a run until it is asked often enough."""

    def __init__(self, questions: int) -> None:
        super().__init__([0, 0])
        self.questions = questions
        self.left: list[Mapping[str, float]] = self.machines

    def wait(self, references: list[int], **_: Any) -> tuple[list[int], list[int]]:
        self.questions -= 1
        return (references, []) if self.questions < 0 else ([], references)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second of the engine is one of its questions."""
    seconds = itertools.count()
    monkeypatch.setattr(ray_engine, "time", SimpleNamespace(monotonic=lambda: next(seconds)))


BUSY = (
    "asks for 2 processors and 0 GPUs on one machine; the cluster has 1 machine with 2 processors and 0 GPUs, of which "
    "0 processors and 0 GPUs are free in all; end other work on the cluster, or add machines with `ray start`, or use a "
    "higher --jobs for smaller shares"
)


@pytest.mark.usefixtures("hasty")
def test_a_run_without_a_place_says_what_it_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a study that waits in silence; the time between two lines doubles."""
    told = run(Busy(90), tmp_path, monkeypatch)
    assert told.notes[1:] == [f"run 0: has waited {seconds} s for a place; {BUSY}" for seconds in (20, 40, 80)]
    assert told.ends == {"run 0": 0}


@pytest.mark.usefixtures("hasty")
def test_waiting_for_a_place_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Busy(100_000)
    with pytest.raises(StudyError, match=f"^{re.escape(f'run 0: has waited 600 s for a place; {BUSY}')}$"):
        run(stub, tmp_path, monkeypatch)
    assert stub.cancelled == [0]


@pytest.mark.usefixtures("hasty")
def test_a_run_that_has_a_place_may_take_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what its worker waits for is said, once."""

    class Placed(Busy):
        def wait(self, references: list[int], **_: Any) -> tuple[list[int], list[int]]:
            worker.write_text("host-3\nis still training from an earlier call; waiting for it\n")
            return super().wait(references)

    worker = worker_file(Task("", (), tmp_path, tmp_path / "log", {}))
    told = run(Placed(700), tmp_path, monkeypatch)
    assert told.notes[1:] == ["run 0 on host-3: is still training from an earlier call; waiting for it"]
    assert told.ends == {"run 0": 0} and not worker.exists()


@pytest.mark.usefixtures("hasty")
def test_a_run_whose_machine_left_before_it_began_asks_for_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Shrinks(Busy):
        def wait(self, references: list[int], **_: Any) -> tuple[list[int], list[int]]:
            self.machines = self.left
            return super().wait(references)

    stub = Shrinks(10)
    stub.left = [{"CPU": 1.0}]
    told = run(stub, tmp_path, monkeypatch)
    assert told.notes[1:] == ["run 0: no machine is left with 2 processors and 0 GPUs; asks for 1 processor and 0 GPUs"]
    assert [options["num_cpus"] for _, options, _ in stub.started] == [2, 1] and stub.cancelled == [0]
    stub = Shrinks(10)
    stub.left = [{"CPU": 0.0}]
    with pytest.raises(StudyError, match="a run needs 1 processor"):
        run(stub, tmp_path, monkeypatch)


@pytest.mark.parametrize("code", [1, 2, 130])
def test_a_run_that_ends_by_itself_is_not_tried_again(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Stub([code])
    assert run(stub, tmp_path, monkeypatch).ends == {"run 0": code} and len(stub.started) == 1


def test_without_an_address_the_cluster_is_one_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a cluster of before, perhaps gone or another's, that Ray takes up by itself; and its handler of SIGTERM."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    stub, handler = Stub([0]), signal.getsignal(signal.SIGTERM)
    run(stub, tmp_path, monkeypatch)
    assert stub.address == "local" and signal.getsignal(signal.SIGTERM) == handler


def test_an_address_where_nobody_answers_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    for name in (address, f"ray://{address}"):
        monkeypatch.setenv("RAY_ADDRESS", name)
        stub = Stub([0])
        message = rf"RAY_ADDRESS='{name}': no cluster answers there \(Connection refused\); start it with `ray start`, or unset"
        with pytest.raises(StudyError, match=message):
            run(stub, tmp_path, monkeypatch)
        assert not stub.address and not stub.started


def test_what_ray_says_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(StudyError, match=r"cannot use the cluster at local \(timed out while starting\); free memory, or use"):
        run(Stub([], RuntimeError("timed out\n  while starting")), tmp_path, monkeypatch)
