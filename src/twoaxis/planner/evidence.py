"""Where evidence on quality stands: a plan states cost only."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from twoaxis.planner.methods import Goal

Verdict = Literal["better", "undecided", "worse"]


@dataclass(frozen=True)
class Study:
    """A study of this repository whose results are kept.

    Attributes:
        name: of its file in `studies`, of its page in `docs/studies` and of its folder in `studies/results`.
        question: what it asks.
        kinds: the mixers that its arms have, beside the control.
        verdicts: of the arms that stand for a recommendation, against the control at equal tokens; a test holds them to the
            kept report.
    """

    name: str
    question: str
    kinds: tuple[str, ...]
    verdicts: dict[str, Verdict]

    @property
    def page(self) -> str:
        """The path of its page."""
        return f"docs/studies/{self.name}.md"

    @property
    def results(self) -> str:
        """The folder of its report and figures."""
        return f"studies/results/{self.name}"

    def to_data(self) -> dict[str, Any]:
        """Plain JSON-ready data."""
        return asdict(self) | {"kinds": list(self.kinds), "page": self.page, "results": self.results}


STUDIES = (
    Study(
        "shortcut",
        "At 1 M parameters on real text, which residual shortcut lowers the loss, and does it pay for its FLOPs and seconds?",
        ("deep_delta", "attention_residuals", "muddformer", "mhc", "denseformer", "residual_scalars"),
        {"deep_delta": "undecided"},
    ),
    Study(
        "fork",
        "For the extra FLOPs, or the extra seconds, of each depth method: does ShortSWA along positions lower the loss more?",
        ("deep_delta", "attention_residuals", "muddformer", "mhc", "denseformer", "residual_scalars", "short_swa"),
        {"deep_delta": "undecided"},
    ),
    Study(
        "local_mixing",
        "On a switching n-gram, does ShortSWA, ShortConv or Canon lower the loss of a one-layer decoder, "
        "and does more attention?",
        ("short_swa", "short_conv", "canon"),
        {"short_swa": "better"},
    ),
    Study(
        "depth_retrieval",
        "In a narrow, deep stack crowded by local mixers, which depth mixer retrieves an early feature better "
        "than the residual?",
        ("residual_scalars", "attention_residuals", "deep_delta", "denseformer", "depth_attention"),
        {"deep_delta": "worse"},
    ),
)
"""All of them."""

OF_GOAL: dict[Goal, tuple[str, ...]] = {
    "shortcut": ("shortcut", "fork", "depth_retrieval"),
    "local-mixing": ("local_mixing", "fork"),
    "both": ("shortcut", "fork", "local_mixing", "depth_retrieval"),
}

NATURE = (
    "This plan states cost and no quality. The kept studies state quality, of models of at most about 1 M parameters, each at "
    "one recipe; none trains both recommendations together."
)


def evidence(goal: Goal) -> tuple[Study, ...]:
    """The studies that ask what a goal asks.

    Example:
        >>> [study.page for study in evidence("local-mixing")]
        ['docs/studies/local_mixing.md', 'docs/studies/fork.md']
    """
    return tuple(study for name in OF_GOAL.get(goal, ()) for study in STUDIES if study.name == name)
