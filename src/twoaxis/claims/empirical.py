"""Claims 13 to 18 of the paper and its companion texts, which only training can decide."""

from functools import partial

from twoaxis.claims.arm_difference import Arm
from twoaxis.claims.claim import PAPER, Claim
from twoaxis.claims.studies import EVERY, FIXED, RULE, SOME, Question, Rival, decide

AGGREGATION = frozenset(
    {
        "attention_residuals",
        "deep_cross_attention",
        "delta_attention_residuals",
        "denseformer",
        "depth_attention",
        "depth_value_mixing",
        "elc_bert",
        "lime",
        "mixture_of_depths_attention",
        "muddformer",
        "vertical_attention",
    }
)
"""Depth mixers that read earlier states, outputs, keys or values by learned weights."""

COMPLETED = " Three more methods became arms on 2026-12-01, before a study had them."

EQUAL = 0.02
"""Largest relative difference of equal costs."""


def _aggregates(arm: Arm) -> bool:
    return arm.depth.get("kind") in AGGREGATION and not arm.has("short_swa")


def _erases(arm: Arm) -> bool:
    # The write-only form has the same kind.
    return arm.depth.get("kind") == "deep_delta" and arm.depth.get("update_rule", "delta") == "delta"


def _of_kind(kind: str, arm: Arm, other: Arm) -> bool:
    """Whether the other has this depth mixer and the same sublayers."""
    return other.depth.get("kind") == kind and other.mixers == arm.mixers


def _writes_only(arm: Arm, other: Arm) -> bool:
    return other.mixers == arm.mixers and other.depth == {**arm.depth, "update_rule": "write_only"}


def _swa_along_positions(arm: Arm) -> bool:
    return arm.has("short_swa") and arm.depth.get("kind") == "residual" and not _convolves(arm)


def _convolves(arm: Arm) -> bool:
    return arm.has("short_conv") or _has_canon(arm)


def _has_canon(arm: Arm) -> bool:
    return any(mixer.endswith("+canon") for mixer in arm.mixers)


def _has_table(arm: Arm) -> bool:
    """Whether the arm has an n-gram table: `engram`, `bigram` or `ngram`."""
    return any("gram" in mixer for mixer in arm.mixers)


def unequal(costs: tuple[str, ...], arm: Arm, other: Arm) -> str:
    """Returns the cost that differs by more than 2 % or is unknown, or ""."""
    for cost in costs:
        one, two = arm.data.get(cost), other.data.get(cost)
        name = cost.replace("training_flops_per_token", "FLOPs")
        if not one or not two:
            return f"{name} not known"
        if abs(one / two - 1) > EQUAL:
            return f"not at equal {name}: {one / two:.2f} x"
    return ""


def _not_smaller(arm: Arm, other: Arm) -> str:
    one, two = arm.data.get("parameters"), other.data.get("parameters")
    return "" if one and two and one < two else "the arm has not fewer parameters"


PLAIN = Rival("the plain residual stream", partial(_of_kind, "residual"))
SCALARS = Rival("two scalars", partial(_of_kind, "residual_scalars"))

AGGREGATES = Question(_aggregates, (PLAIN,), reported=(SCALARS,))
DELTA = Question(_erases, (PLAIN, Rival("writing only", _writes_only), SCALARS))
LOCAL = Question(
    _swa_along_positions,
    (
        Rival("ShortConv", lambda arm, other: other.has("short_conv") and not other.has("short_swa")),
        Rival("Canon", lambda arm, other: _has_canon(other) and not other.has("short_swa")),
    ),
    reported=(Rival("KV shift", lambda arm, other: other.has("kv_shift") and not other.has("short_swa")),),
    unfair=partial(unequal, ("parameters", "training_flops_per_token")),
)
PLACED = Question(
    _swa_along_positions,
    (Rival("a read over depth", lambda arm, other: _aggregates(other)),),
    unfair=partial(unequal, ("training_flops_per_token",)),
    every=True,
)
BRANCHES = Question(
    lambda arm: arm.has("gated_delta_net+local_swa"),
    (
        Rival(
            "the short convolution",
            lambda arm, other: other.has("gated_delta_net+canon") and not other.has("gated_delta_net+local_swa"),
        ),
    ),
    unfair=partial(unequal, ("training_flops_per_token",)),
)
TABLES = Question(
    lambda arm: _swa_along_positions(arm) and not _has_table(arm),
    (Rival("an n-gram table", lambda arm, other: _has_table(other) and not other.has("short_swa")),),
    unfair=_not_smaller,
    wanted="as good",
)

RULE_OF_TABLES = (
    "As in claim 13, but the arm is as good as a rival if its own 95 % interval excludes a loss higher by the smallest effect "
    f"that matters, which is enough here; it is no better if the study says worse. {FIXED}"
)

STUDIED = "By the kept studies that have an arm of the claim and one of its rivals, superseded designs included."

CLAIMS = (
    Claim(
        number=13,
        title="Learned aggregation over depth can beat uniform accumulation",
        statement="Learned aggregation over depth can have a lower loss than the residual stream, which adds uniformly.",
        source=f"{PAPER}, section 1",
        tested=f"{STUDIED} Arms: {', '.join(sorted(AGGREGATION))}. Rival: the plain residual stream with the same sublayers. "
        "Two learned scalars are reported too and decide nothing.",
        compute=partial(decide, AGGREGATES),
        rule=RULE + SOME + FIXED + COMPLETED,
    ),
    Claim(
        number=14,
        title="Deep Delta Learning can improve the shortcut",
        statement="As a shortcut, Deep Delta Learning can have a lower loss than the residual stream, and by its erasure: also "
        "lower than its write-only form and than two learned scalars.",
        source=f"{PAPER}, sections 1 and 2.5; the write-only control: authors' PDF of arXiv:2601.00417, 2026-07-27",
        tested=f"{STUDIED} Arms: deep_delta. Rivals, all with the same sublayers: the plain residual stream, the same "
        "configuration with update_rule = write_only, residual_scalars.",
        compute=partial(decide, DELTA),
        rule=RULE + SOME + FIXED,
    ),
    Claim(
        number=15,
        title="ShortSWA can succeed ShortConv and Canon",
        statement="As a local mixer, ShortSWA can have a lower loss than ShortConv and Canon at equal parameters and FLOPs.",
        source=f"{PAPER}, sections 1 and 2.4",
        tested=f"{STUDIED} Arms: short_swa as a sublayer. Rivals: short_conv, and canon at any place. Costs within 2 %. "
        "KV shift is reported too and decides nothing.",
        compute=partial(decide, LOCAL),
        rule=RULE + SOME + FIXED,
    ),
    Claim(
        number=16,
        title="Local mixing belongs on the sequence axis",
        statement="At equal cost, ShortSWA along positions has a lower loss than a read over depth.",
        source=f"{PAPER}, section 2.5",
        tested=f"{STUDIED} Arms: short_swa as a sublayer on the plain residual stream. Rivals: every depth mixer of claim 13 "
        "at FLOPs within 2 %. Deep Delta Learning is no rival: the paper recommends it for another purpose.",
        compute=partial(decide, PLACED),
        rule=RULE + EVERY + FIXED + COMPLETED,
    ),
    Claim(
        number=17,
        title="ShortSWA can replace the short convolution of linear attention",
        statement="On the query, key and value branches of linear attention, ShortSWA can have a lower loss than the short "
        "convolution at equal FLOPs.",
        source="Rethinking SWA, yifanzhang-pro/Rethinking-SWA (December 2025), a companion text of arXiv:2603.16039; it "
        "names a window of 128 at d = 2048, the paper names none",
        tested=f"{STUDIED} Arms: gated_delta_net with projected_local = local_swa. Rival: the same with canon, its published "
        "short convolution. FLOPs within 2 %.",
        compute=partial(decide, BRANCHES),
        rule=RULE + SOME + FIXED,
    ),
    Claim(
        number=18,
        title="ShortSWA can stand in for n-gram tables",
        statement="ShortSWA can give the gain of an n-gram table, to within the smallest effect that matters, with fewer "
        "parameters.",
        source="ShortSWA is the next-generation n-gram embedding, yifanzhang-pro/ShortSWA-Ngram-Embedding (January 2026), a "
        "companion text of arXiv:2603.16039",
        tested=f"{STUDIED} Arms: short_swa as a sublayer, without a table. Rivals: arms with an n-gram table and more "
        "parameters, the table counted.",
        compute=partial(decide, TABLES),
        rule=RULE_OF_TABLES,
    ),
)
