"""More steps for a run that has begun or finished, if the steps taken equal the first ones of the longer run."""

from twoaxis.core.errors import CheckpointError
from twoaxis.train.checkpoint import newest_step
from twoaxis.train.progress import Progress
from twoaxis.train.recipe import TrainConfig
from twoaxis.train.run_folder import RunFolder


def is_longer(folder: RunFolder, config: TrainConfig) -> bool:
    """Whether the recipe differs from that of the folder by more steps only.

    The longer run ends with the same weights as one that had this many steps from the beginning. With the schedule `constant`
    every run can be lengthened, with `wsd` until its decay begins, with `cosine` none; a warm-up of None is a fraction of the
    run.

    Raises:
        CheckpointError: a step before the newest checkpoint has another learning rate in the longer run.
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
    # A process that was killed before it removed the result has already written the longer recipe.
    return config.steps == there.steps and result is not None and result.steps < config.steps


def lengthen(folder: RunFolder, config: TrainConfig, progress: Progress) -> None:
    """Writes the larger number of steps into the folder, if `is_longer`."""
    if not is_longer(folder, config):
        return
    before = folder.config.steps
    if before < config.steps:
        folder.write("config", config.to_data())
        taken = newest_step(folder.checkpoints)
        progress.note(f"{folder.path}: goes on after step {taken} to step {config.steps}, instead of {before}")
    # After the recipe, so that a full disk leaves the shorter run unchanged.
    (folder.path / "result.json").unlink(missing_ok=True)


def _first_other_rate(there: TrainConfig, here: TrainConfig, taken: int) -> int | None:
    """The first step taken, counted from 1, with another learning rate in the longer run."""
    old, new = there.schedule, here.schedule
    changed = (n for n in range(taken) if old.multiplier(n, there.steps) != new.multiplier(n, here.steps))
    return next((n + 1 for n in changed), None)
