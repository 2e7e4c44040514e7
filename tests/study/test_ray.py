"""Runs on a Ray cluster write the same files as runs on this machine."""

from collections.abc import Iterator
from typing import Any

import pytest
import ray

from twoaxis.study.folder import Place
from twoaxis.study.report import read_study_folder

from .scripted import FakeTrainer


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A local cluster of two workers, which tells nobody that it exists."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield ray
    ray.shutdown()


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_cluster_of_two_workers_comes_to_the_same(trainer: FakeTrainer, cluster: Any) -> None:
    from twoaxis.study.ray_engine import RayEngine

    trainer.spread(delta=-0.1)
    trainer.actions["local/1"] = ["kill"]
    records = trainer.run(engine=RayEngine(jobs=2))
    assert records[Place("local", 1)].status == "failed" and "SIGKILL" in records[Place("local", 1)].message
    assert {record.status for record in trainer.run(engine=RayEngine(jobs=2)).values()} == {"finished"}
    here = FakeTrainer(trainer.study, trainer.folder.parent / "here" / "study", trainer.script, {}, trainer.losses)
    here.run()
    there, local = (read_study_folder(one.folder).replace(made="", command="") for one in (trainer, here))
    assert there.arms == local.arms and there.pairing == local.pairing
