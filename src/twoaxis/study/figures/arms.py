"""How every arm of a study is drawn, the same in all its figures."""

from typing import Literal

from twoaxis.display.theme import ARMS, COMPANION, CONTROL
from twoaxis.study.report_data import ReportData


def colors(data: ReportData) -> dict[str, str]:
    """The colour of every arm: the control dark grey, companions grey, treatments in turn."""
    found, number = {}, 0
    for name, arm in data.arms.items():
        if arm.control:
            found[name] = CONTROL
        elif arm.role == "companion":
            found[name] = COMPANION
        else:
            found[name] = ARMS[number % len(ARMS)]
            number += 1
    return found


Stroke = Literal["thin", "broken", "full"]
"""How the line of an arm is drawn: of companions, of treatments beyond the number of colours, and of all others."""


def stroke(data: ReportData, name: str) -> Stroke:
    """How the line of an arm is drawn."""
    if data.arms[name].role == "companion":
        return "thin"
    treatments = [arm for arm, of in data.arms.items() if of.role == "treatment"]
    return "broken" if name in treatments[len(ARMS) :] else "full"
