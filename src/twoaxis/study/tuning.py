"""The learning rate of every arm, chosen from its trials."""

from collections.abc import Iterable

from twoaxis.core.errors import StudyError
from twoaxis.study.folder import RunRecord
from twoaxis.study.plan import StudyPlan


def choose_learning_rates(plan: StudyPlan, trials: Iterable[RunRecord]) -> dict[str, float]:
    """For every arm the learning rate with the lowest validation loss of its trials; of equal ones the smallest.

    A trial that diverged is out of the choice; an arm none of whose trials trained is left out.

    Raises:
        StudyError: a trial has neither finished nor diverged.
    """
    losses: dict[str, list[tuple[float, float]]] = {}
    for record in trials:
        if record.status not in ("finished", "diverged"):
            raise StudyError(
                f"{record.place}: {record.message}: every trial must have run before learning rates are chosen; run the study "
                "again"
            )
        arm = plan.arm(record.place.arm)
        if record.loss is not None:
            losses.setdefault(arm.tuned_as, []).append((record.loss, arm.train_config(record.place.seed).optimizer.lr))
    return {arm: min(found)[1] for arm, found in losses.items()}
