"""Plans a study: matches sizes and steps, generates companions, and times all arms together."""

from collections.abc import Iterator, Mapping

from twoaxis.study.design import ContrastConfig, StudyConfig
from twoaxis.study.design.rules import STEPS, TOLERANCE, CompanionKind, CompanionMatch
from twoaxis.study.planning.companions import Companion, Sizes, applies, matched_companion, sizes_of, unmatched_companions
from twoaxis.study.planning.equal_cost import (
    THE_CONTROL,
    affordable_steps,
    cost_per_step,
    flops_per_step,
    flops_per_token,
    match_cost,
    parameters,
    with_steps,
)
from twoaxis.study.planning.study_plan import PlannedArm, PlannedContrast, StudyPlan
from twoaxis.study.report_data import UNITS, ChangeData, Role
from twoaxis.study.timing import Timer
from twoaxis.train.recipe import TrainConfig

MATCHED_KINDS: tuple[CompanionKind, ...] = ("wider_stream", "short_swa", "wider_feed_forward")


def plan_study(study: StudyConfig, timer: Timer | None = None) -> StudyPlan:
    """Plans the runs of a study; a byte-pair vocabulary is taken to have its configured size.

    Args:
        study: the design.
        timer: measures seconds of steps; None leaves out everything that needs seconds.

    Raises:
        ConfigError: arms that cannot be matched, or a budget in seconds without a timer.

    Example:
        >>> study = StudyConfig(
        ...     question="?", control="a", arms={"a": {}, "b": {"model": {"depth": "deep_delta"}}}, replicates=2,
        ...     base={"model": {"d_model": 64, "n_layers": 2}}, budget={"steps": 10}, decision={"smallest_effect": 0.02},
        ... )
        >>> [arm.parameters for arm in plan_study(study).arms]
        [117056, 117572]
    """
    recipes = {name: study.recipe(name, study.replicates[0]) for name in study.arms}
    by_size = _match(study, recipes, timer, by_steps=False)
    by_budget = _spend_budget(study, recipes, timer)
    by_steps = _match(study, recipes, timer, by_steps=True)
    changes = {name: (*by_size.get(name, ()), *by_steps.get(name, by_budget.get(name, ()))) for name in study.arms}
    companions = CompanionPlanner(study, recipes, timer)
    recipes |= companions.recipes
    for name, recipe in recipes.items():
        study.check_comparable(name, recipe.to_data())
    timing = None if timer is None else timer(recipes)
    why = {name: study.why(name) for name in study.arms} | companions.why
    arms = [
        _planned(study, name, recipe, why[name], {**changes, **companions.changes}.get(name, ()))
        for name, recipe in recipes.items()
    ]
    arms += _control_at_budget_multiples(study, next(arm for arm in arms if arm.role == "control"))
    arms += _trials(study, arms)
    plan = StudyPlan(arms=tuple(arms), contrasts=tuple(companions.contrasts), timing=timing)
    return plan.replace(notes=(*companions.notes, *_without_verdict(study, plan)))


Changes = dict[str, tuple[ChangeData, ...]]


def _match(study: StudyConfig, recipes: dict[str, TrainConfig], timer: Timer | None, by_steps: bool) -> Changes:
    """Replaces the recipes that are matched by steps, or those matched by a size."""
    changes: Changes = {}
    for name in study.arms:
        match = study.match_of(name)
        if match is not None and (STEPS in match.by) is by_steps:
            to = recipes[match.to or study.control]
            recipes[name], changes[name] = match_cost(name, recipes[name], match, to, timer)
    return changes


def _spend_budget(study: StudyConfig, recipes: dict[str, TrainConfig], timer: Timer | None) -> Changes:
    """Sets the steps of every arm from a budget in FLOPs or seconds; returns the changes that match the control."""
    budget = study.budget
    if budget.flops is None and budget.seconds is None:
        return {}
    unit = "flops" if budget.flops is not None else "seconds"
    cost = cost_per_step(unit, timer, [recipes[study.control], *recipes.values()])
    for name, recipe in recipes.items():
        recipes[name] = with_steps(recipe, affordable_steps(budget.flops or budget.seconds or 0.0, cost(recipe)))
    spent = {name: recipe.steps * cost(recipe) for name, recipe in recipes.items()}
    wanted = spent.pop(study.control)
    return {
        name: (ChangeData(path=STEPS, before=None, after=recipes[name].steps, of=unit, to=THE_CONTROL, wanted=wanted, got=got),)
        for name, got in spent.items()
        if abs(got / wanted - 1) <= TOLERANCE
    }


def _without_verdict(study: StudyConfig, plan: StudyPlan) -> Iterator[str]:
    """The comparisons that the design leaves without a verdict, one line each."""
    charge, control, ladder = study.decision.charge, plan.control, (1.0, *study.budget.ladder)
    if charge == "tokens" or (charge == "seconds" and plan.timing is None):
        return
    for arm in plan.of_role("treatment"):
        ratio = plan.cost_ratio(arm, charge)
        if ratio is None or plan.is_matched(arm, charge):
            continue
        if len(ladder) == 1:
            why, remedy = "one budget only", "give budget.ladder"
        elif not min(ladder) <= ratio <= max(ladder):
            why, remedy = f"{min(ladder):g} to {max(ladder):g} times its budget only", "lengthen budget.ladder"
        else:
            continue
        yield (
            f"{arm.name}: no verdict at equal {UNITS[charge]}: it takes {ratio:.3f} times those of {control.name}, whose "
            f"loss is measured at {why}; match it to the control, or {remedy}"
        )
    for one in plan.contrasts:
        if why := plan.unequal(one, charge):
            yield f"{one.arm} against {one.against}: no verdict at equal {UNITS[charge]}: {one.arm} {why}; match them"


class CompanionPlanner:
    """Plans the companions of all arms; an equal arm is not generated twice."""

    def __init__(self, study: StudyConfig, recipes: Mapping[str, TrainConfig], timer: Timer | None) -> None:
        self.known, self.timer, self.control = dict(recipes), timer, study.control
        self.recipes: dict[str, TrainConfig] = {}
        self.why: dict[str, str] = {}
        self.changes: Changes = {}
        self.contrasts = [_planned_contrast(one, recipes) for one in study.contrasts]
        self.notes: list[str] = []
        self._sizes: dict[CompanionKind, Sizes] = {}
        control = recipes[study.control]
        # A companion tests the depth axis, so only arms that differ there get one.
        arms = [name for name in study.treatments if recipes[name].model["depth"] != control.model["depth"]]
        for name in arms:
            for companion in unmatched_companions(study.controls, recipes[name], control):
                stem = "" if companion.kind == "residual_scalars" else name
                self._add(name, stem, companion, ())
        for kind in MATCHED_KINDS:
            if kind in study.controls:
                units: tuple[CompanionMatch, ...] = ("params",) if kind == "wider_feed_forward" else study.controls_match
                tested = [name for name in arms if applies(kind, recipes[name], control)]
                for unit in units if tested else ():
                    self._add_matched(kind, unit, tested, control)

    def _add_matched(self, kind: CompanionKind, unit: CompanionMatch, arms: list[str], control: TrainConfig) -> None:
        if unit == "seconds" and self.timer is None:
            self.notes += [f"{name}: {kind} at equal seconds is planned only once seconds are measured" for name in arms]
            return
        sizes = self._sizes.get(kind) or self._sizes.setdefault(kind, sizes_of(kind, control))
        recipes = [control, *(self.known[name] for name in arms)]
        timed = [size.recipe for size in sizes.all()] if unit == "seconds" else ()
        cost = cost_per_step(unit, self.timer, recipes, timed)
        for name in arms:
            found = matched_companion(kind, self.known[name], control, sizes, cost, unit)
            if isinstance(found, str):
                self.notes.append(f"{name}: {found}")
            else:
                self._add(name, name, found, found.changes(name, cost(self.known[name]), cost(found.recipe)))

    def _add(self, arm: str, stem: str, companion: Companion, changes: tuple[ChangeData, ...]) -> None:
        same = next((name for name, recipe in {**self.known, **self.recipes}.items() if recipe == companion.recipe), None)
        name = same or companion.name(stem)
        # These comparisons are made already, and would count twice in the family.
        if name in (arm, self.control) or any((name, arm) == (one.arm, one.against) for one in self.contrasts):
            return
        self.contrasts.append(PlannedContrast(arm=arm, against=name, matched=companion.matched, why=companion.why))
        if same is None:
            self.recipes[name], self.why[name], self.changes[name] = companion.recipe, companion.why, changes


def _planned_contrast(contrast: ContrastConfig, recipes: Mapping[str, TrainConfig]) -> PlannedContrast:
    """A contrast of the design; matched by FLOPs where both runs take as many within the tolerance."""
    spent = [recipes[name].steps * flops_per_step(recipes[name]) for name in (contrast.arm, contrast.against)]
    matched = "flops" if abs(spent[0] / spent[1] - 1) <= TOLERANCE else ""
    return PlannedContrast(arm=contrast.arm, against=contrast.against, matched=matched, why=contrast.why)


def _planned(study: StudyConfig, name: str, recipe: TrainConfig, why: str, changes: tuple[ChangeData, ...]) -> PlannedArm:
    role: Role = "control" if name == study.control else "treatment" if name in study.arms else "companion"
    return PlannedArm(
        name=name,
        role=role,
        why=why,
        recipe=recipe.to_data(),
        seeds=study.replicates,
        changes=changes,
        tuned_as="" if study.tuning is None else name,
        parameters=parameters(recipe),
        training_flops_per_token=flops_per_token(recipe),
    )


def _control_at_budget_multiples(study: StudyConfig, control: PlannedArm) -> list[PlannedArm]:
    """The control at its other budgets; files of a study call this role `rung`."""
    recipe = control.train_config(control.seeds[0])
    return [
        control.replace(
            name=f"{control.name}@{multiple:g}x",
            role="rung",
            why=f"the control at {multiple:g} times its budget",
            recipe=with_steps(recipe, affordable_steps(multiple * recipe.steps, 1.0)).to_data(),
        )
        for multiple in study.budget.ladder
    ]


def _trials(study: StudyConfig, arms: list[PlannedArm]) -> list[PlannedArm]:
    """One run per arm and learning rate of its grid."""
    tuning = study.tuning
    if tuning is None:
        return []
    return [arm.as_trial(lr, tuning.seed, tuning.tokens) for arm in arms if arm.role != "rung" for lr in tuning.grid(arm.name)]
