"""The report of a study folder: `report.json` with every number, `report.html` for readers, and the figures as pictures."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from twoaxis.data.atomic import replacing
from twoaxis.study.analysis import Analysis, ArmSummary, analyse
from twoaxis.study.folder import RunRecord, StudyFolder, places, write_json
from twoaxis.study.verdicts import decision_rule, limits, overturn, pairing_sentence, verdict_sentence


class Report(NamedTuple):
    """A report that has been written.

    Attributes:
        analysis: what it says.
        data: all numbers, as in `report.json`.
        html: the page.
        json: the numbers.
        pictures: the figures.
    """

    analysis: Analysis
    data: dict[str, Any]
    html: Path
    json: Path
    pictures: tuple[Path, ...]


def read_analysis(folder: Path | str) -> Analysis:
    """Analyses what a study folder holds, complete or not.

    Raises:
        StudyError: the folder holds no study, or a damaged one.
    """
    place_in = StudyFolder(folder)
    study = place_in.study
    return analyse(study, {place: place_in.record(place) for place in places(study)})


def write_report(folder: Path | str) -> Report:
    """Writes the report of a study folder into it, each file whole or not at all.

    Raises:
        StudyError: the folder holds no study, or a damaged one.
        DataError: the folder cannot be written.
    """
    from twoaxis.study.figures import study_figures
    from twoaxis.study.page import page

    path, analysis = Path(folder), read_analysis(folder)
    data = report_data(analysis)
    figures = study_figures(analysis)
    design = json.dumps(data["design"], indent=1, ensure_ascii=False)
    pictures = []
    for figure in figures:
        pictures.append(path / f"report-{figure.name}.png")
        _write(pictures[-1], figure.png())
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    _write(path / "report.html", page(analysis, figures, design, made).encode())
    write_json(path / "report.json", {**data, "made": made})
    return Report(analysis, data, path / "report.html", path / "report.json", tuple(pictures))


def report_data(analysis: Analysis) -> dict[str, Any]:
    """Everything a report says, as plain JSON-ready data; what is not known is null."""
    return {
        "question": analysis.study.question,
        "design": analysis.study.to_data(),
        "complete": analysis.complete,
        "decision_rule": decision_rule(analysis),
        "arms": {arm.name: _arm_data(analysis, arm) for arm in analysis.arms},
        "pairing": {
            "verified": bool(analysis.pairs) and not any(pair.problems for pair in analysis.pairs),
            "sentence": pairing_sentence(analysis),
            "pairs": [
                {
                    "arm": pair.place.arm,
                    "seed": pair.place.seed,
                    "shared_parameter_tensors": pair.shared,
                    "equal_parameter_tensors": pair.equal,
                    "problems": list(pair.problems),
                }
                for pair in analysis.pairs
            ],
        },
        "limits": limits(analysis),
        "overturn": overturn(analysis),
        "runs": [_run_data(run) for run in analysis.runs],
        "units": {
            "loss, difference, interval, sd, smallest_effect": "nats per token",
            "training_flops_per_token": "floating-point operations of a forward and backward pass, a count",
            "curve": "pairs of tokens read and validation loss",
        },
    }


def _arm_data(analysis: Analysis, arm: ArmSummary) -> dict[str, Any]:
    data: dict[str, Any] = {
        "control": arm.name == analysis.study.control,
        "replicates": len(arm.losses),
        "replicates_planned": arm.planned,
        "losses": {str(seed): loss for seed, loss in arm.losses.items()},
        "mean_loss": arm.mean_loss,
        "accuracies": {str(seed): accuracy for seed, accuracy in arm.accuracies.items()},
        "parameters": arm.parameters,
        "training_flops_per_token": arm.training_flops_per_token,
        "tokens_per_second": arm.tokens_per_second,
        "tokens_per_second_ratio": arm.tokens_per_second_ratio,
        "peak_memory_bytes": arm.peak_memory_bytes,
        "peak_memory_ratio": arm.peak_memory_ratio,
    }
    if data["control"]:
        return data
    comparison = arm.comparison
    data |= {"verdict": None, "no_verdict": arm.no_verdict or None, "sentence": verdict_sentence(analysis, arm)}
    if comparison is not None:
        test = comparison.test
        data |= {
            "verdict": comparison.verdict,
            "paired_differences": list(test.differences),
            "mean_difference": test.mean,
            "sd_difference": test.sd,
            "ci95": [test.low, test.high] if test.varies else None,
            "p": test.p,
            "p_holm": comparison.p_holm,
            "power": comparison.power,
            "replicates_needed": comparison.replicates_needed,
        }
    return data


def _run_data(run: RunRecord) -> dict[str, Any]:
    return {
        "arm": run.place.arm,
        "seed": run.place.seed,
        "status": run.status,
        "message": run.message,
        "result": run.result.to_data() if run.result is not None else None,
        "curve": [list(point) for point in run.curve],
        "recipe": run.recipe,
        "data": run.data,
        "environment": run.environment,
    }


def _write(path: Path, content: bytes) -> None:
    with replacing(path) as file:
        file.write(content)
