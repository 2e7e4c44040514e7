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

from twoaxis.study import StudyConfig
from twoaxis.study.report import read_study_folder
from twoaxis.study.running.study_folder import RunKey

from .scripted import FakeTrainer

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
    trainer.actions["local/1"] = ["kill"]
    records = trainer.run(engine=RayEngine(jobs=2))
    assert records[RunKey("local", 1)].status == "failed" and "SIGKILL" in records[RunKey("local", 1)].message
    assert {record.status for record in trainer.run(engine=RayEngine(jobs=2)).values()} == {"finished"}
    here = FakeTrainer(trainer.study, trainer.folder.parent / "here" / "study", trainer.script, {}, trainer.losses)
    here.run()
    there, local = (read_study_folder(one.folder).replace(made="", command="") for one in (trainer, here))
    assert there.arms == local.arms and there.pairing == local.pairing
    one_at_a_time(trainer.study, trainer.folder.parent / "again" / "study", trainer.script, trainer.losses)


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


def parent_of_the_lock_holder(run: Path) -> int:
    """The worker that has started the process of a run."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(run.resolve()).encode() in (process / "cmdline").read_bytes().split(b"\0"):
                return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    raise AssertionError(f"nobody trains in {run}")
