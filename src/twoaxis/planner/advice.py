"""The paper's recommendation for a goal: its cost in this plan, and the changes that move its rank."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from twoaxis.core.errors import ConfigError
from twoaxis.planner.comparison import Budget, Comparison, Counted, MethodCost, compare, count_methods
from twoaxis.planner.evidence import NATURE, StudyEvidence, evidence
from twoaxis.planner.methods import WINDOW, Goal, Method, methods, together
from twoaxis.planner.model.shape import ModelShape
from twoaxis.planner.search import Request, find_setting
from twoaxis.planner.setting import Setting

SHORTCUT = "DDL"
LOCAL = f"ShortSWA w={WINDOW}"

RECOMMENDED: dict[Goal, tuple[str, str]] = {
    "shortcut": (SHORTCUT, "the shortcut itself is the object, so change how it is written: Deep Delta Learning"),
    "local-mixing": (LOCAL, "local adaptive mixing is better placed along positions than along depth: ShortSWA"),
    "both": (f"{SHORTCUT} + {LOCAL}", "the two do not compete for one place: Deep Delta Learning and ShortSWA together"),
}
"""The method for each goal, and the paper's reason."""

SOURCE = "arXiv:2603.16039"

DEPTH_PARTNERS = (SHORTCUT, "AttnRes blocks", "mHC")
LOCAL_PARTNERS = (LOCAL, "ShortConv", "Canon AC")
"""Methods that are combined for the goal `both`."""

NEIGHBOURS = 1
"""Methods on either side of the recommended one whose eager kernels are counted, which takes seconds per method."""

Announce = Callable[[str], None]


@dataclass(frozen=True)
class WhatIf:
    """The rank of the recommended method after one change of the plan.

    Attributes:
        change: what changes.
        rank: among `of` methods of the goal, by the seconds of a training step; 1 is the cheapest.
        rank_before: among the same methods without the change.
        of: how many methods were compared.
        step_overhead: of the recommended method, over the control.
        over: limits that it exceeds.
        over_before: limits that it exceeds without the change.
        impossible: why the change cannot be made; then there are no numbers.
    """

    change: str
    rank: int = 0
    rank_before: int = 0
    of: int = 0
    step_overhead: float = 0.0
    over: tuple[str, ...] = ()
    over_before: tuple[str, ...] = ()
    impossible: str = ""

    @property
    def matters(self) -> bool:
        """Whether the rank or the exceeded limits change."""
        return self.rank != self.rank_before or self.over != self.over_before

    def to_data(self) -> dict[str, Any]:
        """Plain JSON-ready data."""
        return asdict(self) | {"over": list(self.over), "over_before": list(self.over_before), "matters": self.matters}


@dataclass(frozen=True)
class OwnArrangement:
    """The arrangement in which the recommended method trains fastest, if it does not fit that of the control.

    Attributes:
        setting: the arrangement.
        step_seconds: of the method in it.
        step_overhead: over the control in the arrangement of the control.
        memory_bytes: of the fullest GPU.
    """

    setting: Setting
    step_seconds: float
    step_overhead: float
    memory_bytes: float

    def to_data(self) -> dict[str, Any]:
        """Plain JSON-ready data."""
        setting = self.setting
        found = {"step_seconds": self.step_seconds, "step_overhead": self.step_overhead, "memory_bytes": self.memory_bytes}
        return found | {"layout": setting.layout.to_data(), "recompute": setting.recompute, "sharding": setting.sharding}


@dataclass(frozen=True)
class Recommendation:
    """The paper's recommendation for a goal, on one plan.

    Attributes:
        goal: of the reader.
        method: the name of the recommended method.
        reason: of the paper.
        cost: in this plan; None where the method does not fit.
        refusal: why it does not.
        rank: among `of` methods of the goal, by the seconds of a training step.
        cheaper: the methods of the goal that cost less, from the most expensive to the cheapest.
        dearer: those that cost more, from the cheapest to the most expensive.
        instead: the cheapest method of the goal within all limits, where the recommended one is not.
        own: its own arrangement, where that of the control does not hold it; None also where nothing does.
        what_ifs: the changes that were tried.
        studies: kept studies for it and against it.
    """

    goal: Goal
    method: str
    reason: str
    cost: MethodCost | None
    refusal: str
    rank: int
    of: int
    cheaper: tuple[MethodCost, ...]
    dearer: tuple[MethodCost, ...]
    instead: MethodCost | None
    own: OwnArrangement | None
    what_ifs: tuple[WhatIf, ...]
    studies: tuple[StudyEvidence, ...]

    def to_data(self) -> dict[str, Any]:
        """Plain JSON-ready data."""

        def brief(cost: MethodCost) -> dict[str, Any]:
            return {"name": cost.name, "step_overhead": cost.step_overhead, "over": list(cost.over)}

        return {
            "goal": self.goal,
            "method": self.method,
            "source": SOURCE,
            "reason": self.reason,
            "cost": None if self.cost is None else self.cost.to_data(),
            "refusal": self.refusal or None,
            "rank": self.rank,
            "of": self.of,
            "cheaper": [brief(cost) for cost in self.cheaper],
            "dearer": [brief(cost) for cost in self.dearer],
            "instead": None if self.instead is None else brief(self.instead),
            "own_arrangement": None if self.own is None else self.own.to_data(),
            "what_ifs": [what_if.to_data() for what_if in self.what_ifs],
            "nature_of_evidence": NATURE,
            "studies": [study.to_data() for study in self.studies],
        }


def methods_for(goal: Goal | None) -> tuple[Method, ...]:
    """All methods, and for the goal `both` also the combinations of a depth mixer with a local one."""
    known = methods()
    if goal != "both":
        return known
    by_name = {method.name: method for method in known}
    return known + tuple(together(by_name[depth], by_name[local]) for depth in DEPTH_PARTNERS for local in LOCAL_PARTNERS)


@dataclass(frozen=True)
class Case:
    """A plan before its recommendation.

    Attributes:
        model: of the control.
        request: what was asked.
        setting: where the control trains fastest.
        counted: the methods.
        comparison: what they cost.
        prompts: sequences that generate at once.
        budget: limits.
    """

    model: ModelShape
    request: Request
    setting: Setting
    counted: Mapping[str, Counted]
    comparison: Comparison
    prompts: int
    budget: Budget


def recommend(goal: Goal, case: Case, announce: Announce = lambda name: None) -> Recommendation:
    """Returns the recommendation for a goal, with its rank after each change.

    Args:
        goal: of the reader.
        case: the plan.
        announce: called with the name of each count, which may take seconds.
    """
    name, reason = RECOMMENDED[goal]
    costs = case.comparison.of_goal(goal)
    own = case.comparison.named(name)
    if own is None:
        refusal = next((each.reason for each in case.comparison.refused if each.method.name == name), "")
        return Recommendation(
            goal, name, reason, None, refusal, 0, len(costs), (), (), _within(costs), None, (), evidence(goal)
        )
    at = costs.index(own)
    return Recommendation(
        goal=goal,
        method=name,
        reason=reason,
        cost=own,
        refusal="",
        rank=at + 1,
        of=len(costs),
        cheaper=costs[:at][::-1],
        dearer=costs[at + 1 :],
        instead=_within(costs) if own.over else None,
        own=_own_arrangement(case, name) if "device" in own.over else None,
        what_ifs=_what_ifs(goal, case, own, announce),
        studies=evidence(goal),
    )


def _within(costs: tuple[MethodCost, ...]) -> MethodCost | None:
    return next((cost for cost in costs if not cost.over), None)


def _own_arrangement(case: Case, name: str) -> OwnArrangement | None:
    one = case.counted[name]
    try:
        setting = find_setting(one.model, one.numbers, case.request)
    except ConfigError:
        return None
    step = setting.training_step(one.numbers)
    overhead = step["step_seconds"] / case.comparison.control.step_seconds - 1
    return OwnArrangement(setting, step["step_seconds"], overhead, max(step["memory_bytes"]))


def _what_ifs(goal: Goal, case: Case, own: MethodCost, announce: Announce) -> tuple[WhatIf, ...]:
    layout = case.setting.layout
    asked = case.request
    longer = asked.replace(tokens=2 * asked.tokens, batch=_half(asked.batch))
    found = [_elsewhere("twice the context", goal, case, own, longer)]
    if layout.gpus % (2 * layout.pipeline) == 0:
        found.append(
            _elsewhere(f"{2 * layout.pipeline} pipeline ranks", goal, case, own, _pipelined(case, 2 * layout.pipeline))
        )
    if layout.pipeline > 1:
        request = Request.fixed(case.setting).replace(virtual=2 * layout.virtual, microbatches=None, schedule="1f1b")
        found.append(_elsewhere(f"{2 * layout.virtual} stages on each rank", goal, case, own, request))
    if case.setting.engine == "fused":
        found.append(_eager(goal, case, own, announce))
    return tuple(found)


def _half(batch: int | None) -> int | None:
    return None if batch is None else max(1, batch // 2)


def _pipelined(case: Case, pipeline: int) -> Request:
    """The request with more pipeline ranks in place of replicas, or of tensor ranks if there are no replicas."""
    layout = case.setting.layout
    tensor = layout.tensor if layout.gpus % (layout.tensor * pipeline) == 0 else None
    return case.request.replace(pipeline=pipeline, tensor=tensor, data=None, microbatches=None)


def _elsewhere(change: str, goal: Goal, case: Case, own: MethodCost, request: Request) -> WhatIf:
    """Ranks the recommended method among those of its goal on the setting of another request."""
    try:
        setting = find_setting(case.model, case.counted[case.comparison.control.name].numbers, request)
    except ConfigError as error:
        return WhatIf(change, impossible=str(error))
    counted = {name: one for name, one in case.counted.items() if one.method.goal in ("control", goal)}
    return _compared(change, goal, case, own, compare(counted, setting, case.prompts, case.budget))


def _eager(goal: Goal, case: Case, own: MethodCost, announce: Announce) -> WhatIf:
    """Ranks the recommended method among its neighbours when each depth operation of PyTorch is a kernel."""
    costs = case.comparison.of_goal(goal)
    at = costs.index(own)
    near = costs[max(0, at - NEIGHBOURS) : at + NEIGHBOURS + 1]
    names = [case.comparison.control.name, *(cost.name for cost in near)]
    known = [case.counted[name].method for name in names]
    counted, _ = count_methods(case.model, known, case.setting.precision, "eager", announce)
    change = f"eager depth operations (among {', '.join(cost.name for cost in near)})"
    if own.name not in counted:
        return WhatIf(change, impossible="too many operations to count")
    after = compare(counted, case.setting.replace(engine="eager"), case.prompts, case.budget)
    return _compared(change, goal, case, own, after)


def _compared(change: str, goal: Goal, case: Case, own: MethodCost, after: Comparison) -> WhatIf:
    new = after.named(own.name)
    if new is None:
        refusal = next((each.reason for each in after.refused if each.method.name == own.name), "")
        return WhatIf(change, impossible=refusal)
    names = [cost.name for cost in after.of_goal(goal)]
    before = [cost.name for cost in case.comparison.of_goal(goal) if cost.name in names]
    return WhatIf(
        change=change,
        rank=names.index(own.name) + 1,
        rank_before=before.index(own.name) + 1,
        of=len(names),
        step_overhead=new.step_overhead,
        over=new.over,
        over_before=own.over,
    )
