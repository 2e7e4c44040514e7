"""Colours and strokes of arms, the same in all figures of a study."""

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
"""The stroke of companions, of treatments whose colour is used a second time, and of all others."""


def stroke(data: ReportData, name: str) -> Stroke:
    """The stroke of an arm."""
    if data.arms[name].role == "companion":
        return "thin"
    treatments = [arm for arm, of in data.arms.items() if of.role == "treatment"]
    return "broken" if name in treatments[len(ARMS) :] else "full"
