"""Claim 10: what only training can tell; undecided until a study says otherwise."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from twoaxis.claims.claim import Claim, EvidenceTable, Finding, Verdict

STUDIES = Path("studies")
"""Where designs are, NAME.toml, and reports, results/NAME/report.json: in the folder that the command is run in."""


class Comparison(NamedTuple):
    """One empirical claim and the study that would decide it.

    Attributes:
        statement: what has to come out.
        study: the name of the study.
        arms: arms that have to be better than the study's control; empty where its control is not the rival.
        against_companions: whether the companions of the arms have to be better than the arms.
    """

    statement: str
    study: str
    arms: tuple[str, ...] = ()
    against_companions: bool = False

    @property
    def design(self) -> Path:
        """The file that says how it is decided."""
        return STUDIES / f"{self.study}.toml"

    @property
    def report(self) -> Path:
        """Where its outcome is kept."""
        return STUDIES / "results" / self.study / "report.json"


COMPARISONS = (
    Comparison(
        "learned aggregation over depth has a lower loss than uniform accumulation",
        "depth_retrieval",
        ("attention_residuals", "denseformer"),
    ),
    Comparison("Deep Delta Learning has a lower loss than the residual stream", "shortcut", ("deep_delta",)),
    Comparison("ShortSWA has a lower loss than ShortConv and Canon", "local_mixing"),
    Comparison(
        "at equal cost, ShortSWA along positions has a lower loss than mixing along depth", "fork", against_companions=True
    ),
)


def compute() -> Finding:
    """Reads what reports there are."""
    rows = [(comparison, *outcome(comparison)) for comparison in COMPARISONS]
    verdict: Verdict = "holds within" if all(said == "better" for _, said, _ in rows) else "undecided"
    return Finding(
        verdict,
        "the 95 % intervals of the studies" if verdict == "holds within" else "",
        (
            "A study decides by the rule that it fixed before its first run; a small one speaks for its own scale only. One in "
            "which a method is better shows that it can be; one in which it is worse does not show that it cannot.",
            "To decide one: `twoaxis study studies/NAME.toml`, then keep its report.json as studies/results/NAME/report.json.",
        ),
        EvidenceTable(
            ("claim", "study that decides it", "verdict", "what its report says"),
            tuple((one.statement, one.design.as_posix(), verdict, said) for one, verdict, said in rows),
        ),
        tuple(dict.fromkeys(one.design.as_posix() for one in COMPARISONS)),
    )


def outcome(comparison: Comparison) -> tuple[str, str]:
    """The verdict on one comparison, and what the report of its study says."""
    if not comparison.report.exists():
        return "undecided", "no report yet"
    try:
        report = json.loads(comparison.report.read_text(encoding="utf-8"))
        if comparison.against_companions:
            return _of_companions(report["contrasts"])
        arms = report["arms"]
        rivals = {name: arm for name, arm in arms.items() if not arm["control"]}
        said = [arm["sentence"] for name, arm in rivals.items() if not comparison.arms or name in comparison.arms]
        verdicts = {_verdict(rivals[name]) for name in comparison.arms}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return "undecided", f"{comparison.report.as_posix()} cannot be read ({type(error).__name__}); write it anew"
    for verdict in ("worse", "undecided"):
        if verdict in verdicts:
            return verdict, " ".join(said)
    return "better" if verdicts else "undecided", " ".join(said)


def _of_companions(contrasts: list[dict[str, Any]]) -> tuple[str, str]:
    """The verdict on the companions; that of a contrast is on the arm, so it is turned round."""
    found = [one["comparison"]["verdict"] if one["comparison"] else "undecided" for one in contrasts]
    counts = {
        word: found.count(turned) for word, turned in (("better", "worse"), ("worse", "better"), ("undecided", "undecided"))
    }
    said = ", ".join(f"{word} in {n}" for word, n in counts.items())
    said = f"of {len(found)} comparisons of an arm with its companion, the companion is {said}"
    if counts["better"] and counts["worse"]:
        return "undecided", f"{said}: it depends on the arm"
    return next((word for word in ("worse", "undecided") if counts[word]), "better" if found else "undecided"), said


def _verdict(arm: dict[str, Any]) -> str:
    """An arm without a verdict, because runs are missing, is undecided."""
    return arm["verdict"] or "undecided"


CLAIM = Claim(
    number=10,
    title="What only training can tell",
    statement="Learned aggregation over depth can beat uniform accumulation; Deep Delta Learning can beat the residual stream; "
    "ShortSWA can beat ShortConv and Canon; and at equal cost, mixing along positions can beat mixing along depth.",
    source="arXiv:2603.16039, abstract and section 3",
    tested="By the study that is named for each, if its report is there: paired replicates, an interval, and a rule fixed "
    "before the first run.",
    compute=compute,
)
