"""Deep Delta Learning: throughput and memory of its tables 4 and 5, and its parameters."""

from typing import Any, NamedTuple

from planner.published.row import Published, Row
from planner.published.runs import (
    PLAIN,
    numbers,
    one,
    params,
    prefill_seconds,
    preset,
    repeated,
    step_bytes,
    step_seconds,
)

BATCH, TOKENS = 16, 1024
ONE = {"kind": "deep_delta", "value_target": "code"}
"""Parameters are counted from the released code, whose targets have a bias each; with which target the tables were timed is not
known."""
CHANNELS = {**ONE, "value_channels": 4}
VARIANTS: dict[str, dict[str, Any]] = {
    "one channel": ONE,
    "TC": {**CHANNELS, "compressor": "time"},
    "CC": {**CHANNELS, "compressor": "channel"},
    "TC+EC": {**CHANNELS, "compressor": "time", "expansion": "embedding_conv"},
    "CC+EC": {**CHANNELS, "compressor": "channel", "expansion": "embedding_conv"},
}
PARAMS = {"one channel": 36_912, "TC+EC": 264_364, "CC+EC": 144_556}
FUSED_BY_AUTHORS = "CC+EC"
"""The variant that their repository ships a Triton engine for."""


class Reported(NamedTuple):
    """Thousands of tokens per second in training and inference, and peak memory over that of the plain model."""

    train: float
    infer: float
    memory: float | None = None


TABLES = {
    "small": {
        "plain": Reported(1509.6, 1826.1),
        "one channel": Reported(1330.8, 1605.8, 1.00),
        "TC": Reported(673.2, 688.8, 1.31),
        "CC": Reported(1019.8, 1043.0, 1.18),
        "TC+EC": Reported(783.5, 865.1, 1.15),
        "CC+EC": Reported(1158.0, 1220.7, 1.05),
    },
    "medium": {
        "plain": Reported(537.1, 531.5),
        "TC": Reported(239.7, 234.6, 1.09),
        "CC": Reported(358.5, 337.7, 1.06),
        "TC+EC": Reported(282.9, 291.1, 1.05),
        "CC+EC": Reported(422.3, 400.5, 1.02),
    },
}
GIGABYTES = {"small": 2.94, "medium": 7.06}


def deep_delta() -> Published:
    """The predictions and what explains their differences."""
    setting = one("h100", BATCH, TOKENS)
    plain = numbers(preset("ddl-small"), PLAIN)
    tokens = BATCH * TOKENS / 1e3
    train, infer = tokens / step_seconds(setting, plain), tokens / prefill_seconds(setting, plain)
    lone = {size: step_bytes(one("h100", 1, TOKENS), numbers(preset(f"ddl-{size}"), PLAIN)) / 1e9 for size in TABLES}
    return Published(
        method="Deep Delta Learning",
        source="arXiv:2601.00417, tables 3 to 5; parameters counted from the authors' code at d = 768, 12 layers",
        setting=f"ddl-small and ddl-medium. Device, batch and engine are not published. Assumed: one H100, {BATCH} sequences "
        f"of "
        f"{TOKENS}, one kernel for each depth read and write; memory with one sequence. Plain small model: predicted "
        f"{train:.0f} "
        f"and {infer:.0f} thousand tokens/s in training and inference on one H100, published 1509.6 and 1826.1 on a number of "
        f"devices that is not; "
        f"memory {lone['small']:.2f} and {lone['medium']:.2f} GB, published {GIGABYTES['small']} and {GIGABYTES['medium']} GB.",
        rows=(*_seconds(), *_memory(), *_params()),
        remarks=(_bracket(), _bandwidth(), _memory_remark()),
    )


def _seconds() -> list[Row]:
    rows = []
    setting = one("h100", BATCH, TOKENS)
    for size, table in TABLES.items():
        model = preset(f"ddl-{size}")
        plain = numbers(model, PLAIN)
        for name in table:
            if name == "plain":
                continue
            changed = numbers(model, VARIANTS[name])
            why = "B" if name == FUSED_BY_AUTHORS else "A"
            trained = step_seconds(setting, changed) / step_seconds(setting, plain)
            inferred = prefill_seconds(setting, changed) / prefill_seconds(setting, plain)
            rows += [
                Row(f"{size}, {name}: training time", table["plain"].train / table[name].train, trained, why=why),
                Row(f"{size}, {name}: inference time", table["plain"].infer / table[name].infer, inferred, why=why),
            ]
    return rows


def _memory() -> list[Row]:
    rows, setting = [], one("h100", 1, TOKENS)
    for size, table in TABLES.items():
        model = preset(f"ddl-{size}")
        plain = step_bytes(setting, numbers(model, PLAIN))
        for name, told in table.items():
            if told.memory is not None and told.memory > 1:
                predicted = step_bytes(setting, numbers(model, VARIANTS[name])) / plain
                rows.append(Row(f"{size}, {name}: peak memory", told.memory, predicted, digits=0, why="C"))
    return rows


def _params() -> list[Row]:
    model = preset("ddl-small")
    return [
        Row(f"small, {name}: parameters added", count, params(numbers(model, VARIANTS[name]), "depth"), "count", digits=0)
        for name, count in PARAMS.items()
    ]


def _bracket() -> str:
    """The unfused engine of this library, for the variants that the authors have no fused one for."""
    model, told = preset("ddl-small"), []
    eager = one("h100", BATCH, TOKENS, "eager")

    def unfused(depth: dict[str, Any]) -> float:
        return step_seconds(eager, repeated(numbers(preset("ddl-small", 2), depth, "eager"), model.n_layers))

    for name in ("one channel", "TC", "CC"):
        slow = unfused(VARIANTS[name]) / unfused(PLAIN)
        fast = step_seconds(one("h100", BATCH, TOKENS), numbers(model, VARIANTS[name]))
        fast /= step_seconds(one("h100", BATCH, TOKENS), numbers(model, PLAIN))
        reported = TABLES["small"]["plain"].train / TABLES["small"][name].train
        told.append(f"{name} {fast:.2f} < {reported:.2f} < {slow:.2f}")
    return (
        "**A.** The fused engine in the authors' repository is for CC+EC. Multiples of the plain model's training time, small, "
        "with one kernel "
        f"for each read and write < published < one kernel for each operation: {'; '.join(told)}. The published engine lies "
        "between the two; how far it was compiled is not published."
    )


def _bandwidth() -> str:
    """What the published differences say of bytes."""
    setting, told = one("h100", BATCH, TOKENS), []
    for size, table in TABLES.items():
        model = preset(f"ddl-{size}")
        plain, changed = numbers(model, PLAIN), numbers(model, VARIANTS["CC+EC"])
        more = prefill_seconds(setting, changed) - prefill_seconds(setting, plain)
        published = (1 / table["CC+EC"].infer - 1 / table["plain"].infer) * 1e6
        predicted = more / (BATCH * TOKENS) * 1e9
        told.append(
            f"{size} {published:.0f} ns published, {predicted:.0f} ns predicted, {published / predicted:.2f} times that"
        )
    return (
        "**B.** CC+EC is the fused engine of the authors. What it adds to the inference of one token on one H100: "
        f"{'; '.join(told)}, if theirs ran on one too. Why the small model loses more is unexplained."
    )


def _memory_remark() -> str:
    model = preset("ddl-small")
    setting = one("h100", 1, TOKENS)
    added = step_bytes(setting, numbers(model, VARIANTS["CC+EC"])) - step_bytes(setting, numbers(model, PLAIN))
    published = {
        name: (TABLES["small"][name].memory or 1) * GIGABYTES["small"] - GIGABYTES["small"] for name in ("TC", "CC+EC")
    }
    channels = 2 * model.n_layers * TOKENS * 4 * model.d_model * 2
    return (
        f"**C.** One copy of the four channels before every sublayer is {channels / 1e9:.2f} GB for one sequence in bfloat16. "
        f"Published: CC+EC adds {published['CC+EC']:.2f} GB, {published['CC+EC'] / channels * 1e9:.1f} copies, and TC "
        f"{published['TC']:.2f} GB, {published['TC'] / channels * 1e9:.1f} copies. Predicted: {added / 1e9:.2f} GB, "
        f"{added / channels:.1f} copies, for each. The number of sequences is not published, nor what the unfused form keeps."
    )
