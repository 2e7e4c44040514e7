"""DenseFormer: parameters and inference speed of its table 1."""

from dataclasses import replace
from typing import Any, NamedTuple

from planner.published.row import Published, Row
from planner.published.runs import PLAIN, Data, numbers, one, params, prefill_seconds, preset, repeated
from twoaxis.planner.formulas.roofline import memory_seconds

DEVICE = "a100"
BATCH, TOKENS = 64, 256
VARIANTS: dict[str, dict[str, Any]] = {
    "1x1": {"kind": "denseformer"},
    "4x1": {"kind": "denseformer", "dilation": 4},
    "4x5": {"kind": "denseformer", "dilation": 4, "period": 5},
}


class Reported(NamedTuple):
    """Blocks, variant, millions of parameters, batches per second."""

    blocks: int
    variant: str
    params: float
    speed: float


TABLE = (
    Reported(48, "plain", 378.45, 5.94),
    Reported(48, "1x1", 378.45, 4.65),
    Reported(48, "4x1", 378.45, 5.31),
    Reported(48, "4x5", 378.45, 5.72),
    Reported(64, "plain", 491.72, 4.57),
    Reported(72, "plain", 548.35, 4.08),
    Reported(72, "1x1", 548.36, 2.93),
    Reported(72, "4x1", 548.36, 3.60),
    Reported(72, "4x5", 548.36, 3.90),
    Reported(84, "plain", 633.31, 3.54),
    Reported(90, "plain", 675.78, 3.32),
)


def denseformer() -> Published:
    """The predictions and what explains their differences."""
    speed = 1 / prefill_seconds(one(DEVICE, BATCH, TOKENS), _plain(48))
    return Published(
        method="DenseFormer",
        source="arXiv:2402.02622v2, table 1",
        setting=f"denseformer-48, and the same with other numbers of blocks; sequences of {TOKENS}. Device, batch and number "
        f"format "
        f"are not in our notes on the paper. Assumed: one {DEVICE.upper()}, {BATCH} sequences, bfloat16, one kernel for each "
        f"read and "
        f"write. Plain model of 48 blocks: predicted {speed:.2f} batches per second, published 5.94.",
        rows=(*_params(), *_seconds()),
        remarks=(_copies(), _rounded()),
    )


def _plain(blocks: int) -> Data:
    return repeated(numbers(preset("denseformer-48", 2), PLAIN), blocks)


def _params() -> list[Row]:
    rows = []
    for told in TABLE:
        plain = told.variant == "plain"
        model = _plain(told.blocks) if plain else numbers(preset("denseformer-48", told.blocks), VARIANTS[told.variant])
        found = params(model) / 1e6
        row = Row(f"{told.blocks} blocks, {told.variant}: millions of parameters", told.params, found, "count", digits=2)
        rows.append(row if row.holds else replace(row, why="Q"))
    return rows


def _relative(blocks: int, variant: str) -> float:
    setting, model = one(DEVICE, BATCH, TOKENS), preset("denseformer-48", blocks)
    return prefill_seconds(setting, numbers(model, VARIANTS[variant])) / prefill_seconds(setting, _plain(model.n_layers))


def _seconds() -> list[Row]:
    plain = {told.blocks: told.speed for told in TABLE if told.variant == "plain"}
    deeper = {blocks: prefill_seconds(one(DEVICE, BATCH, TOKENS), _plain(blocks)) for blocks in plain}
    rows = [
        Row(f"plain, {blocks} blocks against 48: time", plain[48] / plain[blocks], deeper[blocks] / deeper[48])
        for blocks in plain
        if blocks != 48
    ]
    for told in TABLE:
        if told.variant != "plain":
            predicted = _relative(told.blocks, told.variant)
            rows.append(
                Row(
                    f"{told.blocks} blocks, {told.variant}: inference time", plain[told.blocks] / told.speed, predicted, why="H"
                )
            )
    return rows


def _copies() -> str:
    """The package keeps block outputs in one buffer, so that each is copied once."""
    setting, told = one(DEVICE, BATCH, TOKENS), []
    for row in TABLE:
        if row.variant in ("1x1", "4x1", "4x5"):
            model = preset("denseformer-48", row.blocks)
            plain = prefill_seconds(setting, _plain(model.n_layers))
            moved = 2 * row.blocks * BATCH * TOKENS * model.d_model * 2
            copied = memory_seconds(moved, setting.rates)
            told.append(f"{row.blocks} {row.variant} {100 * (_relative(row.blocks, row.variant) - 1 + copied / plain):.1f} %")
    return (
        "**H.** The authors' package copies every block output into a buffer, then contracts the buffer. With the bytes of "
        "those "
        f"copies, predicted overheads are {', '.join(told)}. What remains is unexplained."
    )


def _rounded() -> str:
    model = preset("denseformer-48", 72)
    found = ", ".join(f"{name} {params(numbers(model, VARIANTS[name])):,}" for name in ("1x1", "4x1", "4x5"))
    return f"**Q.** With 72 blocks: {found}. The table has one number for all variants, that of 1x1."
