"""A pipeline on two and three processes does what one process does, and sends exactly what the planner says."""

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ..made_once import made_once
from . import pipeline_worker
from .pipeline_cases import Case, cases, planned_bytes, undivided
from .processes import run_processes

CASES = cases()
RANKS = 3
TOLERANCE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-11}

Outcome = tuple[dict[str, dict[str, Any]], dict[str, torch.Tensor]]


def _run(folder: Path) -> None:
    (folder / "cases.json").write_text(json.dumps([case.data() for case in CASES.values()]))
    run_processes(Path(pipeline_worker.__file__), folder, RANKS, timeout_seconds=pipeline_worker.PATIENCE_SECONDS)


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    """What every rank reports, and its gradients."""
    folder = made_once(tmp_path_factory, "pipelines", _run)
    return [
        (json.loads((folder / f"report{rank}.json").read_text()), load_file(folder / f"gradients{rank}.safetensors"))
        for rank in range(RANKS)
    ]


def reports(name: str, outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """What the ranks of one pipeline report."""
    return [outcome[0][name] for outcome in outcomes[: CASES[name].pipeline.ranks]]


@cache
def expected(*what: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The undivided decoder, once for all pipelines of it."""
    return undivided(next(case for case in CASES.values() if key(case) == what))


def key(case: Case) -> tuple[str, tuple[int, int], bool, int]:
    """What the undivided decoder depends on."""
    return json.dumps(case.decoder.to_data()), case.shape, case.documents, case.steps


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_one_process(name: str, outcomes: list[Outcome]) -> None:
    case = CASES[name]
    losses, gradients = expected(*key(case))
    for report in reports(name, outcomes):
        torch.testing.assert_close(report["losses"], losses, **TOLERANCE)
        torch.testing.assert_close(report["evaluated"], losses if case.evaluate else [], **TOLERANCE)
    seen = set()
    for _, found in outcomes:
        for parameter in (n.removeprefix(f"{name}/") for n in found if n.startswith(f"{name}/")):
            got = found[f"{name}/{parameter}"]
            torch.testing.assert_close(got, gradients[parameter], **TOLERANCE, msg=lambda m, p=parameter: f"{p}: {m}")
            seen.add(parameter)
    assert seen == gradients.keys()


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("strange")])
def test_bytes_that_are_sent_are_those_of_the_planner(name: str, outcomes: list[Outcome]) -> None:
    planned = planned_bytes(CASES[name])
    both_ways = {f"{what} {boundary}": n for boundary, n in enumerate(planned) for what in ("activations", "gradients")}
    for step in range(CASES[name].steps):
        sent = Counter()
        for report in reports(name, outcomes):
            sent.update(report["sent"][step])
        del sent["other"]
        assert dict(sent) == both_ways


@pytest.mark.parametrize(
    ("name", "new_sources"),
    [(f"attention_residuals {forwarding} of 3", 1) for forwarding in ("naive", "cached", "cached_own")]
    + [(f"attention_residuals {order}", 2) for order in ("interleaved", "cached", "cached_own")],
)
def test_attention_residuals_send_what_the_paper_counts(name: str, new_sources: int, outcomes: list[Outcome]) -> None:
    """N_p new sources in each stage; beside them travel the embedding, which is a source, and one number for each source."""
    config, (rows, length) = CASES[name].pipeline, CASES[name].shape
    P, V, C, N_p = config.ranks, config.virtual, config.stages, new_sources
    blocks, embedding = {
        "naive": (C * (C - 1) // 2 * N_p, C - 1),
        "cached": (P * (P - 1) // 2 * N_p + (V - 1) * P**2 * N_p, P),
        "cached_own": (P * (P - 1) // 2 * N_p + (V - 1) * P * (P - 1) * N_p, P - 1),
    }[config.forwarding]
    d = CASES[name].decoder.d_model
    for report in reports(name, outcomes):
        assert report["sent"][0]
    sent = sum(n for report in reports(name, outcomes) for what, n in report["sent"][0].items() if "activations" in what)
    assert sent == rows * length * (blocks + embedding) * (d + 1) * torch.float64.itemsize


@pytest.mark.parametrize("name", ["strange state", "strange state cached"])
def test_a_tensor_travels_once_and_without_a_gradient_that_nobody_needs(name: str, outcomes: list[Outcome]) -> None:
    """Leaves: the embedding, the stream (twice the same tensor), a detached statistic and an integer."""
    rows, length = CASES[name].shape
    d = CASES[name].decoder.d_model
    sent = Counter()
    for report in reports(name, outcomes):
        sent.update(report["sent"][0])
    once = name.endswith("cached")
    # With a cache the embedding and the statistic reach the second rank once, and the first rank has made them.
    activations = [2 * d + 2, d + 1, d + 1] if once else [2 * d + 2] * 3
    gradients = [2 * d, d, d] if once else [2 * d] * 3
    for boundary, (there, back) in enumerate(zip(activations, gradients, strict=True)):
        assert sent[f"activations {boundary}"] == 8 * rows * length * there
        assert sent[f"gradients {boundary}"] == 8 * rows * length * back


@pytest.mark.parametrize("name", CASES)
def test_no_graph_is_alive_after_a_step(name: str, outcomes: list[Outcome]) -> None:
    for report in reports(name, outcomes):
        for seen, alive in report["alive"]:
            assert seen > 0
            assert alive == 0
