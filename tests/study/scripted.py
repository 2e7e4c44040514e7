"""A trainer that follows a script instead of training."""

import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from twoaxis.study import StudyConfig
from twoaxis.study.folder import Place, RunRecord
from twoaxis.study.pairing import initial_values
from twoaxis.study.runner import run_study

FAKE = Path(__file__).with_name("fake_trainer.py")


@dataclass
class FakeTrainer:
    """Runs the study with scripted runs.

    Attributes:
        folder: of the study.
        actions: by "arm/seed", what the run does each time it is started.
        losses: by "arm/seed", its last validation loss.
        step_seconds: how long a step takes.
    """

    study: StudyConfig
    folder: Path
    script: Path
    actions: dict[str, list[str]] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    step_seconds: float = 0.0

    def command(self) -> Callable[[Path, Path], list[str]]:
        parameters = {arm: sorted(initial_values(self.study.recipe(arm, 0).decoder(256))) for arm in self.study.arms}
        script = {
            "parameters": parameters,
            "actions": self.actions,
            "losses": self.losses,
            "step_seconds": self.step_seconds,
        }
        self.script.write_text(json.dumps(script))
        return lambda recipe, run: [sys.executable, "-I", "-S", str(FAKE), str(self.script), str(recipe), str(run)]

    def run(self, study: StudyConfig | None = None) -> dict[Place, RunRecord]:
        return run_study(study or self.study, self.folder, command=self.command())

    @property
    def order(self) -> list[str]:
        return (self.folder / "runs" / "order.txt").read_text().split()

    def spread(self, **effects: float) -> None:
        """Sets losses with a seed effect, a small noise, and an effect by arm."""
        for arm in self.study.arms:
            for seed in self.study.replicates:
                noise = 0.001 * random.Random(f"{arm}/{seed}").random()
                self.losses[f"{arm}/{seed}"] = 5.0 + 0.3 * seed + noise + effects.get(arm, 0.0)
