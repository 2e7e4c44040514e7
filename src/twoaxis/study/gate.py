"""The validity gate: no verdict without a control that was trained, nor on an arm that fell behind the control it began as."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from twoaxis.display import numbers as words
from twoaxis.local import LocalConfig
from twoaxis.model import DecoderConfig
from twoaxis.sequence import SequenceConfig
from twoaxis.study.baselines import Baselines, SeedBaselines
from twoaxis.study.report_data import GateData
from twoaxis.train.recipe import TrainConfig

UNTRAINED_CONTROL = "the control was not trained"
"""Why no arm has a verdict."""

UNKNOWN_GATE = "whether the control was trained is not known"

NOT_TRAINED = "not trained"
"""Why a single arm has none."""


def judge(
    baselines: Baselines,
    losses: Mapping[int, float],
    accuracies: Mapping[int, float],
    planned: int,
    fallen: Mapping[str, Sequence[float]],
    recipe: TrainConfig,
) -> GateData:
    """Compares the control with the baselines in every replicate.

    Args:
        baselines: by seed.
        losses: of the control's finished runs by seed.
        accuracies: of the same runs on the answers, for a synthetic task.
        planned: replicates.
        fallen: paired differences to the control of the arms that equal it at step 0 and end worse in every replicate.
        recipe: of the control, for what to change.
    """
    found = {seed: baselines.by_seed[seed] for seed in losses if seed in baselines.by_seed}
    arms = tuple(_fallen(name, differences) for name, differences in fallen.items())
    data = GateData(passed=None, sentence="", reasons=arms, not_trained=tuple(fallen))
    if not found:
        why = baselines.missing or ("no run of the control has finished" if not losses else "no baselines were measured")
        return data.replace(sentence=f"Gate not decided: {why}.", change=_change(recipe) if arms else "")
    means = {
        key: statistics.fmean(values)
        for key in SeedBaselines.model_fields
        if (values := [v for one in found.values() if (v := getattr(one, key)) is not None]) and len(values) == len(found)
    }
    counted, control = round(means.pop("counted")), statistics.fmean(losses[seed] for seed in found)
    data = data.replace(**means, counted=counted, control=control)
    if accuracies and set(found) <= set(accuracies):
        data = data.replace(control_accuracy=statistics.fmean(accuracies[seed] for seed in found))
    failed = [seed for seed, one in found.items() if not _beats(one, losses[seed], accuracies.get(seed))]
    reasons = (_untrained(data, failed, len(found)),) if failed else ()
    return data.replace(
        passed=not failed,
        sentence=_sentence(data, failed, len(found), planned),
        reasons=(*reasons, *arms),
        change=_change(recipe) if failed or arms else "",
    )


def _beats(one: SeedBaselines, loss: float, accuracy: float | None) -> bool:
    if one.bigram is not None:
        return loss < one.bigram
    assert one.chance is not None and one.majority is not None
    return loss < one.chance and (accuracy is None or accuracy > one.majority)


def _sentence(data: GateData, failed: Sequence[int], n: int, planned: int) -> str:
    assert data.control is not None
    so_far = "" if n == planned else f" So far {n} of {planned} replicates."
    if data.bigram is None:
        rest = f" and {_side(data.control, data.in_context, 'a guess among what the sample shows')}" if data.in_context else ""
        right = "" if data.control_accuracy is None else f"; accuracy {words.percentage(data.control_accuracy)}"
        right += "" if data.majority is None or not right else f" against {words.percentage(data.majority)} for the majority"
        said = f"Control {data.control:.2f} nats, {_side(data.control, data.chance, 'chance')}{rest}{right}"
    else:
        bigram, trigram = _side(data.control, data.bigram, "the bigram"), _side(data.control, data.trigram, "the trigram")
        said = f"Control {data.control:.2f} nats, {bigram} and {trigram}"
    some = "" if not failed or len(failed) == n else f", but not in every replicate (seeds {', '.join(map(str, failed))} fail)"
    return f"{said}{some}{': not trained' if failed else ''}.{so_far}"


def _side(loss: float, baseline: float | None, name: str) -> str:
    assert baseline is not None
    digits = 2 if round(loss, 2) != round(baseline, 2) else 4
    return f"{'below' if loss < baseline else 'above'} {name} {baseline:.{digits}f}"


def _untrained(data: GateData, failed: Sequence[int], n: int) -> str:
    what = "the bigram counted in its own training tokens" if data.bigram is not None else "a guess by chance or majority"
    return f"the control does not beat {what} in {len(failed)} of {words.replicates(n)}"


def _fallen(name: str, differences: Sequence[float]) -> str:
    n = len(differences)
    return (
        f"{name} equals the control at step 0 and ends worse in all {words.replicates(n)}, by "
        f"{statistics.fmean(differences):.4f} nats on average: not trained"
    )


def _change(recipe: TrainConfig) -> str:
    """Settings that leave the plateau sooner, with their present values."""
    warmup = recipe.schedule.warmup(recipe.steps)
    tokens = words.count(recipe.steps * recipe.batch_size * recipe.data.seq_len)
    return (
        f"Change the learning rate (now {recipe.optimizer.lr:g}; `tuning.lr` tries several for every arm), the budget (now "
        f"{tokens} tokens), the scale of the embedding, or the warm-up (now {warmup} steps)."
    )


def obstacle(gate: GateData, arm: str) -> str:
    """Why an arm gets no verdict although its runs are there; "" where it does."""
    if gate.passed is None:
        return UNKNOWN_GATE
    if not gate.passed:
        return UNTRAINED_CONTROL
    return NOT_TRAINED if arm in gate.not_trained else ""


def fallen_arms(
    losses: Mapping[str, Mapping[int, float]], control: str, seeds: Sequence[int], equal: Sequence[str]
) -> dict[str, list[float]]:
    """Paired differences of the arms that equal the control at step 0 and end worse than it in every replicate.

    Args:
        losses: of finished runs, by arm and seed.
        control: the arm that all are compared with.
        seeds: the replicates.
        equal: arms that equal the control at step 0.

    Example:
        >>> fallen_arms({"c": {0: 1.0, 1: 1.0}, "a": {0: 1.5, 1: 1.25}, "b": {0: 0.5, 1: 2.0}}, "c", (0, 1), ("a", "b"))
        {'a': [0.5, 0.25]}
    """
    found = {}
    for name in equal:
        own, other = losses.get(name, {}), losses.get(control, {})
        if all(seed in own and seed in other for seed in seeds):
            differences = [own[seed] - other[seed] for seed in seeds]
            if min(differences) > 0:
                found[name] = differences
    return found


def equals_at_start(arm: DecoderConfig, control: DecoderConfig) -> bool:
    """Whether both compute the same at step 0: declared exact along depth, and equal but for sublayers that add nothing yet.

    Example:
        >>> blocks = [[{"kind": "attention", "n_heads": 1}, "swiglu"]]
        >>> control = DecoderConfig(vocab_size=8, d_model=8, n_layers=2, blocks=blocks)
        >>> local = {"kind": "short_swa", "n_heads": 1, "output_init": "zero"}
        >>> equals_at_start(control.replace(blocks=[[local, *control.blocks[0]]]), control)
        True
        >>> equals_at_start(control.replace(depth="deep_delta"), control)
        False
    """
    exact = all(config.depth.init_equivalence.relation == "exact" for config in (arm, control))
    return exact and _at_start(arm) == _at_start(control)


def _at_start(config: DecoderConfig) -> dict[str, Any]:
    """The data of a decoder without its depth mixer and without what adds nothing at step 0, every block written out."""
    layers = [[_sublayer(part) for part in block if not _adds_nothing(part)] for block in config.layers]
    return {**config.to_data(), "depth": None, "blocks": layers}


def _adds_nothing(sublayer: Any) -> bool:
    return isinstance(sublayer, SequenceConfig) and sublayer.init_equivalence.relation == "exact"


def _sublayer(config: Any) -> dict[str, Any]:
    """The data of a sublayer without the local mixers that begin as the identity."""
    identities = [
        name
        for name in type(config).model_fields
        if isinstance(local := getattr(config, name), LocalConfig) and local.init_equivalence.relation == "exact"
    ]
    return {**config.to_data(), **dict.fromkeys(identities)}
