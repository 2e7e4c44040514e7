"""How a plan prints what studies say for and against the recommended method."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from twoaxis.display.tables import print_item

if TYPE_CHECKING:
    from twoaxis.planner.evidence import Side, StudyEvidence

TITLES: "dict[Side, str]" = {
    "for": "For it",
    "against": "Against it",
    "mixed": "For it in some comparisons, against it in others",
    "undecided": "Undecided",
    "withdrawn": "Withdrawn, so neither for nor against it",
}

SHOWN_PAIRS = 4


def print_evidence(studies: "Sequence[StudyEvidence]") -> None:
    """Prints the studies of a recommendation under the side that they are on."""
    from twoaxis.planner.evidence import NATURE, NO_VALID_STUDY

    print_item(f"Evidence. {NATURE}", "")
    if all(study.withdrawn for study in studies):
        print_item(NO_VALID_STUDY, "")
    for side, title in TITLES.items():
        chosen = [study for study in studies if study.side == side]
        if chosen:
            print(f"{title}:")
        for study in chosen:
            _print_study(study)


def _print_study(study: "StudyEvidence") -> None:
    if study.withdrawn:
        print_item(f"{study.name}: {study.withdrawn}. {study.question}")
        return
    print_item(f"{study.name}: {study.question}")
    # The comparison with the control comes first, then what decides something.
    pairs = sorted(study.pairs, key=lambda pair: (not pair.with_control, pair.verdict not in ("better", "worse")))
    for pair in pairs[:SHOWN_PAIRS]:
        print_item(f"{pair.sentence}.", "  - ")
    if rest := pairs[SHOWN_PAIRS:]:
        counts = {word: sum(pair.verdict == word for pair in rest) for word in ("better", "worse", "undecided", None)}
        said = ", ".join(f"{count} {word or 'without a verdict'}" for word, count in counts.items() if count)
        print_item(f"and {len(rest)} more comparisons: {said}.", "  - ")
    if study.forms:
        print_item(f"Not the form of this plan: {'; '.join(study.forms)}.", "  ")
    print_item(f"Gate passed: {study.gate}. Scale: {study.scale}. All numbers: {study.report}", "  ")
