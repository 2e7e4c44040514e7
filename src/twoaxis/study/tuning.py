"""The learning rate of every arm, chosen from its trials, which reach beyond the grid where the best lies at its end."""

from collections.abc import Iterable, Mapping

from twoaxis.core.errors import StudyError
from twoaxis.study.folder import RunRecord
from twoaxis.study.plan import PlannedArm, StudyPlan
from twoaxis.study.rules import TuningConfig


def choose_learning_rates(plan: StudyPlan, trials: Iterable[RunRecord]) -> dict[str, float]:
    """For every arm the learning rate with the lowest validation loss of its trials; of equal ones the smallest.

    A trial that diverged is out of the choice; an arm none of whose trials trained is left out.

    Raises:
        StudyError: a trial has neither finished nor diverged.
    """
    found = trial_losses(plan, trials)
    return {arm: best for arm, losses in found.items() if (best := best_rate(losses)) is not None}


def wider_trials(plan: StudyPlan, tuning: TuningConfig, trials: Iterable[RunRecord]) -> list[PlannedArm]:
    """One further trial of each arm whose best learning rate is the first or the last that was tried.

    An arm gets none where all its trials diverged, or when it has had `tuning.widen` of them.

    Raises:
        StudyError: a trial has neither finished nor diverged.
    """
    found = []
    for name, losses in trial_losses(plan, trials).items():
        beyond = rate_beyond(losses)
        if beyond is not None and len(losses) < len(tuning.lr) + tuning.widen:
            found.append(plan.arm(name).as_trial(beyond, tuning.seed, tuning.tokens))
    return found


def best_rate(losses: Mapping[float, float | None]) -> float | None:
    """The learning rate with the lowest loss, of equal ones the smallest; None where all diverged.

    Example:
        >>> best_rate({0.001: 3.2, 0.003: 3.1, 0.01: None})
        0.003
    """
    trained = [(loss, lr) for lr, loss in losses.items() if loss is not None]
    return min(trained)[1] if trained else None


def rate_beyond(losses: Mapping[float, float | None]) -> float | None:
    """The next learning rate beyond the end of a grid at which the best one lies; None when it lies inside.

    A rate that diverged counts as worse than any that trained.

    Example:
        >>> rate_beyond({0.001: 3.2, 0.002: 3.1, 0.004: 3.0}), rate_beyond({0.001: 3.2, 0.002: 3.1, 0.004: None})
        (0.008, None)
    """
    rates, best = sorted(losses), best_rate(losses)
    if best is None or len(rates) < 2 or best not in (rates[0], rates[-1]):
        return None
    step = rates[-1] / rates[-2] if best == rates[-1] else rates[0] / rates[1]
    return float(f"{best * step:.3g}")


def trial_losses(plan: StudyPlan, trials: Iterable[RunRecord]) -> dict[str, dict[float, float | None]]:
    """The validation losses of the trials by arm and learning rate; None for one that diverged.

    Raises:
        StudyError: a trial has neither finished nor diverged.
    """
    losses: dict[str, dict[float, float | None]] = {}
    for record in trials:
        if record.status not in ("finished", "diverged"):
            raise StudyError(
                f"{record.place}: {record.message}: every trial must have run before learning rates are chosen; run the study "
                "again"
            )
        arm = plan.arm(record.place.arm)
        losses.setdefault(arm.tuned_as, {})[arm.train_config(record.place.seed).optimizer.lr] = record.loss
    return losses
