"""Runs on a Ray cluster write the same files as runs on this machine, wherever they fit, and whatever it loses."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from twoaxis.core.errors import StudyError
from twoaxis.study import StudyConfig
from twoaxis.study.report import read_study_folder
from twoaxis.study.running.engine import Task
from twoaxis.study.running.study_folder import RunKey

from .scripted import FakeTrainer
from .test_ray_engine import Told

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A cluster of two machines with a processor each, which tells nobody that it exists; others that are there stay alone."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    started.add_node(num_cpus=1)
    monkeypatch.setenv("RAY_ADDRESS", str(started.address))
    yield started
    ray.shutdown()
    started.shutdown()


def test_a_cluster_of_two_machines_comes_to_the_same(trainer: FakeTrainer, cluster: Any) -> None:
    from twoaxis.study.running.ray_engine import RayEngine

    trainer.spread(delta=-0.1)
    trainer.actions |= {"local/1": ["kill"], "plain/1": ["bad input"]}
    records = trainer.run(engine=RayEngine(jobs=2))
    assert records[RunKey("local", 1)].status == "failed" and "SIGKILL" in records[RunKey("local", 1)].message
    assert "d_model=7: must be even" in records[RunKey("plain", 1)].message
    assert (trainer.folder / "runs" / "plain" / "seed-1" / "starts.txt").read_text() == "x", "a user error is not tried again"
    assert {record.status for record in trainer.run(engine=RayEngine(jobs=2)).values()} == {"finished"}
    here = FakeTrainer(trainer.study, trainer.folder.parent / "here" / "study", trainer.script, {}, trainer.losses)
    here.run()
    there, local = (read_study_folder(one.folder).replace(made="", command="") for one in (trainer, here))
    assert there.arms == local.arms and there.pairing == local.pairing
    one_at_a_time(trainer.study, trainer.folder.parent / "again" / "study", trainer.script, trainer.losses)
    a_full_cluster(trainer.folder.parent)
    a_machine_that_leaves(trainer.folder.parent, cluster)


def one_at_a_time(study: StudyConfig, folder: Path, script: Path, losses: dict[str, float]) -> None:
    """One run at once fits on either machine, and starts again when its worker is killed; the same cluster serves for it."""
    from twoaxis.study.running.ray_engine import RayEngine

    again = FakeTrainer(study, folder, script, {}, losses, step_seconds=0.05)
    metrics = folder / "runs" / "plain" / "seed-0" / "metrics.jsonl"

    def kill_a_worker() -> None:
        while not metrics.exists():
            time.sleep(0.02)
        os.kill(parent_of_the_lock_holder(metrics.parent), signal.SIGKILL)

    killer = threading.Thread(target=kill_a_worker)
    killer.start()
    records = again.run(engine=RayEngine(jobs=1))
    killer.join()
    assert {record.status for record in records.values()} == {"finished"}
    assert (metrics.parent / "starts.txt").read_text() == "xx", "the run whose worker was killed, and no other"


def a_full_cluster(folder: Path) -> None:
    """A run says that it waits for other work, begins when that ends, and gives up when it does not."""
    from twoaxis.study.running import ray_engine

    others = ray.remote(num_cpus=1, max_retries=0)(lambda: time.sleep(1000))
    task = Task("run", ("true",), folder / "run", folder / "full.log", {})
    asks = (
        "asks for 1 processor and 0 GPUs on one machine; the cluster has 2 machines with 1 processor and 0 GPUs, of which "
        "0 processors and 0 GPUs are free in all; end other work on the cluster, or add machines with `ray start`"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_engine, "CHECK_SECONDS", 0.1)
        patch.setattr(ray_engine, "PLACE_SECONDS", 1.0)
        work = fill(others)
        with pytest.raises(StudyError, match=f"run: has waited 1 s for a place; {asks}"):
            ray_engine.RayEngine().run([task], Told())
        patch.undo()
        patch.setattr(ray_engine, "NOTE_SECONDS", 0.5)

        class Frees(Told):
            def note(self, text: str) -> None:
                super().note(text)
                if "has waited" in text:
                    for one in work:
                        ray.cancel(one, force=True)

        told = Frees()
        ray_engine.RayEngine().run([task], told)
    assert told.ends == {"run": 0} and told.notes[1].endswith(asks)


def fill(others: Any) -> list[Any]:
    """Takes every processor of the cluster."""
    work = [others.remote() for _ in range(2)]
    while ray.available_resources().get("CPU", 0):
        time.sleep(0.05)
    return work


def a_machine_that_leaves(folder: Path, cluster: Any) -> None:
    """Its run starts again on a smaller one, which is said."""
    from twoaxis.study.running.ray_engine import RayEngine, worker_file

    large = cluster.add_node(num_cpus=2)
    command = f"echo x >> {folder}/began; test $OMP_NUM_THREADS = 1 || sleep 60"
    task = Task("run", ("sh", "-c", command), folder, folder / "log", {})

    class Leaves(Told):
        def watch(self) -> None:
            if large in cluster.worker_nodes and (folder / "began").exists():
                cluster.remove_node(large, allow_graceful=True)

    told = Leaves()
    RayEngine().run([task], told)
    assert told.ends == {"run": 0} and (folder / "began").read_text() == "x\nx\n" and not worker_file(task).exists()
    assert told.notes[0].endswith("1 runs at once, each with 2 processors and 0 GPUs")
    # A busy machine takes so long to start it that it says so; the run may be lost before the cluster says that the machine is.
    notes = [note for note in told.notes[1:] if "has waited" not in note]
    less = "run: no machine is left with 2 processors and 0 GPUs; asks for 1 processor and 0 GPUs"
    assert notes[0].endswith("starts again, 1 of 3 times") and notes[1:] in ([], [less])


def parent_of_the_lock_holder(run: Path) -> int:
    """The worker that has started the process of a run."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(run.resolve()).encode() in (process / "cmdline").read_bytes().split(b"\0"):
                return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    raise AssertionError(f"nobody trains in {run}")
