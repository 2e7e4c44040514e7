"""More steps for a run that has begun, or has finished: where those that it has taken are also the first of the longer run."""

from twoaxis.core.errors import CheckpointError
from twoaxis.train.checkpoint import newest_step
from twoaxis.train.progress import Progress
from twoaxis.train.recipe import TrainConfig
from twoaxis.train.run_folder import RunFolder


def is_longer(folder: RunFolder, config: TrainConfig) -> bool:
    """Whether a recipe asks for more steps than the run in the folder, and for nothing else.

    The longer run then ends with the weights of one that was planned as long from the first step on. What the learning rate
    does is the schedule's: `constant` stays where it is, `wsd` goes on at its full rate unless it has begun to fall, and
    `cosine`, whose every step depends on the length of the run, cannot go on. A warm-up of None is a part of the run's length.

    Raises:
        CheckpointError: a step behind the newest checkpoint has another learning rate in the longer run.
    """
    if not (folder.path / "config.json").exists():
        return False
    there, result = folder.config, folder.result
    if {**there.to_data(), "steps": config.steps} != config.to_data() or (result is not None and result.status == "diverged"):
        return False
    if config.steps > there.steps:
        taken, kind = newest_step(folder.checkpoints), config.schedule.to_data()["kind"]
        if (differing := _first_other_rate(there, config, taken)) is not None:
            raise CheckpointError(
                f"run folder {folder.path}: steps={there.steps} there, {config.steps} in this recipe: must be equal, since "
                f"step {differing} of {taken} taken has another learning rate in the longer {kind} schedule; train in "
                "a new folder, there from these weights if you like (`twoaxis train --help` shows how)"
            )
        return True
    # The recipe is the longer one already where a process was killed before it had removed the result.
    return config.steps == there.steps and result is not None and result.steps < config.steps


def lengthen(folder: RunFolder, config: TrainConfig, progress: Progress) -> None:
    """Takes the larger number of steps over into the folder, where `is_longer` allows it."""
    if not is_longer(folder, config):
        return
    before = folder.config.steps
    if before < config.steps:
        folder.write("config", config.to_data())
        taken = newest_step(folder.checkpoints)
        progress.note(f"{folder.path}: goes on after step {taken} to step {config.steps}, instead of {before}")
    # After the recipe, so that a full disk leaves the shorter run as it was, and so does a process killed in between.
    (folder.path / "result.json").unlink(missing_ok=True)


def _first_other_rate(there: TrainConfig, here: TrainConfig, taken: int) -> int | None:
    """The first of the steps taken, counted from 1, whose learning rate is another in the longer run."""
    old, new = there.schedule, here.schedule
    changed = (n for n in range(taken) if old.multiplier(n, there.steps) != new.multiplier(n, here.steps))
    return next((n + 1 for n in changed), None)
