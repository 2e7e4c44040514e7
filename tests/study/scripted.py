"""A trainer that follows a script instead of training."""

import json
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from twoaxis.model import DecoderConfig
from twoaxis.study import StudyConfig
from twoaxis.study.planning import plan_study
from twoaxis.study.planning.equal_cost import flops_per_step
from twoaxis.study.planning.study_plan import StudyPlan
from twoaxis.study.report.analysis import analyse
from twoaxis.study.report.validity import initial_values
from twoaxis.study.report_data import ReportData
from twoaxis.study.running import run_study
from twoaxis.study.running.baselines import Baselines, SeedBaselines
from twoaxis.study.running.engine import Engine
from twoaxis.study.running.study_folder import RunKey, RunRecord, StudyFolder
from twoaxis.study.timing import Timing
from twoaxis.train.recipe import TrainConfig

FAKE = Path(__file__).with_name("fake_trainer.py")


OTHER_DATA: dict[str, Any] = {
    "corpus": {"name": "fake", "version": "1", "fingerprint": "c0" * 8},
    "tokenizer": {"vocab_size": 256, "fingerprint": "t" * 16},
    **{side: {"tokens": 4096, "documents": 1, "text_bytes": 4096, "fingerprint": "f"} for side in ("train", "validation")},
}


def fake_timer(recipes: Mapping[str, TrainConfig]) -> Timing:
    """A machine that computes exactly a billion operations in a second, and becomes slower from round to round."""
    return Timing(
        warmup_steps=0,
        steps_in_a_turn=1,
        seconds={name: tuple(drift * flops_per_step(one) / 1e9 for drift in (1.0, 1.5, 2.0)) for name, one in recipes.items()},
        state_bytes=dict.fromkeys(recipes, 1000),
        saved_bytes=dict.fromkeys(recipes, 100),
        environment={"threads": 1},
    )


@cache
def _plan(study: str) -> StudyPlan:
    """The plan of a design; the same design is planned once for all tests."""
    return plan_study(StudyConfig.from_data(json.loads(study)), fake_timer)


@cache
def _parameters(model: str) -> list[str]:
    """The names of the parameters of a model."""
    return sorted(initial_values(DecoderConfig.from_record({**json.loads(model), "vocab_size": 256})))


@dataclass
class FakeTrainer:
    """Runs the study with scripted runs.

    Attributes:
        folder: of the study.
        actions: by "arm/seed", what the run does each time it is started.
        losses: by "arm/seed", its last validation loss.
        step_seconds: how long a step takes.
        bigram: loss of the count model that the control has to beat.
        data: record of the data that the runs claim to have read; that of no text by default.
    """

    study: StudyConfig
    folder: Path
    script: Path
    actions: dict[str, list[str]] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    step_seconds: float = 0.0
    bigram: float = 8.0
    data: dict[str, Any] = field(default_factory=lambda: OTHER_DATA)

    @property
    def plan(self) -> StudyPlan:
        return _plan(json.dumps(self.study.to_data()))

    def command(self) -> Callable[[Path, Path], list[str]]:
        parameters = {arm.name: _parameters(json.dumps(arm.recipe["model"])) for arm in self.plan.arms}
        script = {
            "parameters": parameters,
            "data": self.data,
            "actions": self.actions,
            "losses": self.losses,
            "step_seconds": self.step_seconds,
        }
        self.script.write_text(json.dumps(script))
        return lambda recipe, run: [sys.executable, "-I", "-S", str(FAKE), str(self.script), str(recipe), str(run)]

    @property
    def baselines(self) -> Baselines:
        one = SeedBaselines(unigram=self.bigram + 1, bigram=self.bigram, trigram=self.bigram - 1, counted=384)
        return Baselines(by_seed=dict.fromkeys(self.study.replicates, one))

    def analyse(self, records: Mapping[RunKey, RunRecord] | None = None) -> ReportData:
        """What the runs come to, with a second timing that agrees with the first."""
        records = self.run() if records is None else records
        return analyse(self.study, self.plan, records, self.baselines, timing_after=self.plan.timing)

    def run(self, study: StudyConfig | None = None, engine: Engine | None = None) -> dict[RunKey, RunRecord]:
        records = run_study(study or self.study, self.folder, command=self.command(), timer=fake_timer, engine=engine)
        if StudyFolder(self.folder).baselines != self.baselines:
            StudyFolder(self.folder).keep_baselines(self.baselines)
        return records

    @property
    def order(self) -> list[str]:
        return (self.folder / "runs" / "order.txt").read_text().split()

    def spread(self, **effects: float) -> None:
        """Sets losses with a seed effect, a small noise, and an effect by arm."""
        for arm in self.plan.arms:
            for seed in arm.seeds:
                noise = 0.001 * random.Random(f"{arm.name}/{seed}").random()
                falls = (arm.steps / self.plan.control.steps) ** -0.3 - 1 if arm.role == "rung" else 0.0
                self.losses[f"{arm.name}/{seed}"] = 5.0 + 0.3 * seed + noise + effects.get(arm.name, 0.0) + falls
