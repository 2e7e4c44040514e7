"""Hyper-Connections and mHC: parameters, FLOPs, memory, training time and traffic."""

from dataclasses import replace
from typing import Any

from planner.published.row import Published, Row
from planner.published.runs import PLAIN, flops, numbers, params, preset, step_bytes, step_seconds
from twoaxis.planner.hardware import read_device
from twoaxis.planner.setting import ParallelLayout, Setting

STREAMS = 4
HC: dict[str, Any] = {"kind": "hyper_connections"}
MHC: dict[str, Any] = {"kind": "mhc"}
BATCH, TOKENS = 16, 2048
FLOPS = {"olmo-1b": (0.2, 1), "olmo-7b": (0.147, 3)}
MEMORY = {"olmo-1b": 1.261, "olmo-7b": 1.283}


def hyper_connections() -> Published:
    """The predictions and what explains their differences."""
    model = preset("olmo-1b")
    plain, changed = numbers(model, PLAIN), numbers(model, HC)
    added = params(changed, "depth")
    rows = [
        Row("olmo-1b: parameters added", 394_048, added, "count", digits=0),
        Row("olmo-1b: parameters added", 0.033, 100 * added / params(plain), "percent", digits=3),
    ]
    for name, (published, digits) in FLOPS.items():
        rows.append(Row(f"{name}: FLOPs added", published, _more_flops(name), "percent", digits=digits, why="K"))
    for name, published in MEMORY.items():
        found = step_bytes(_training(), numbers(preset(name), HC)) / step_bytes(_training(), numbers(preset(name), PLAIN))
        rows.append(Row(f"{name}: training memory", published, found, why="L"))
    return Published(
        method="Hyper-Connections",
        source="arXiv:2409.19606v3, overheads of OLMo-1B and OLMo-7B with four streams",
        setting=f"olmo-1b and olmo-7b. Devices and batches are not in our notes on the paper. Assumed: 8 A100, all of the "
        f"model's numbers "
        f"spread over them, {BATCH // 8} sequences of {TOKENS} on each, one kernel for each depth read and write; FLOPs of "
        f"{TOKENS} tokens.",
        rows=tuple(rows),
        remarks=(_flops(), _memory()),
        contradicted=(
            "Hyper-Connections are said to add 0.2 % and 0.147 % of the FLOPs of OLMo-1B and OLMo-7B. Counted with reads, "
            "writes and "
            f"norms they are {_more_flops('olmo-1b'):.2f} % and {_more_flops('olmo-7b'):.2f} %.",
        ),
    )


def mhc() -> Published:
    """The predictions and what explains their differences."""
    model, d = preset("mhc-27b"), preset("mhc-27b").d_model
    widths = [(s["depth"]["read"] + s["depth"]["written"]) / 2 / d for s in numbers(model, MHC)["sublayers"]]
    setting = _pipeline()
    seconds = step_seconds(setting, numbers(model, MHC)) / step_seconds(setting, numbers(model, PLAIN))
    coefficients = 2 * (STREAMS**2 + 2 * STREAMS) / d
    return Published(
        method="mHC",
        source="arXiv:2512.24880, training overhead at four streams, table 2 and the section on fused kernels",
        setting="mhc-27b. Devices and layout are not published. Assumed: 64 H100, pipeline of 4, 16 microbatches of one "
        "sequence of 4096, "
        "one kernel for each depth read and write.",
        rows=(
            Row("training time", 1.067, seconds, why="M"),
            Row("fused kernels: read and write, (3n + 2) d", 3 * STREAMS + 2, widths[1], "widths", why="N"),
        ),
        remarks=(
            _recomputed(),
            f"**N.** The coefficients of one token, n^2 + 2n written and read, are {coefficients:.3f} d more. Table 2 has 8n + "
            f"2 = "
            f"{8 * STREAMS + 2} d for the unfused form; our unfused form, with its statistics in float32, moves "
            f"{_unfused():.0f} d.",
        ),
    )


def _training(batch: int = BATCH) -> Setting:
    return Setting(read_device("a100"), ParallelLayout(gpus=8, data=8), batch, TOKENS, sharding="weights")


def _pipeline() -> Setting:
    layout = ParallelLayout(gpus=64, pipeline=4, data=16, microbatches=16)
    return Setting(read_device("h100"), layout, 256, 4096)


def _more_flops(name: str) -> float:
    model = preset(name)
    return 100 * (flops(numbers(model, HC), TOKENS) / flops(numbers(model, PLAIN), TOKENS) - 1)


def _flops() -> str:
    told = []
    n = STREAMS
    for name in FLOPS:
        model = preset(name)
        each = 2 * n * (n + 2) + 2 * n * n
        share = each * model.d_model * len(model.parts) * TOKENS / flops(numbers(model, PLAIN), TOKENS)
        told.append(f"{name} {100 * share:.3f} %")
    return (
        "**K.** The planner counts, per token and sublayer, the coefficients 48 d, reading 8 d, mixing 32 d, writing 8 d, and "
        "norms. The "
        f"coefficients and the mixing alone, 80 d, give {', '.join(told)}, which is what is published."
    )


def _memory() -> str:
    told = []
    for batch in (8, 16, 32):
        setting = _training(batch)
        found = (
            step_bytes(setting, numbers(preset(name), HC)) / step_bytes(setting, numbers(preset(name), PLAIN))
            for name in MEMORY
        )
        told.append(f"{batch // 8}: " + " and ".join(f"{100 * (each - 1):.1f} %" for each in found))
    return (
        "**L.** The share depends on what else is in memory. Predicted by sequences on each device, 1B and 7B: "
        + "; ".join(told)
        + "."
    )


def _recomputed() -> str:
    """With the depth operation recomputed in the backward pass."""
    model, setting = preset("mhc-27b"), _pipeline()
    found = {}
    for name, depth in (("plain", PLAIN), ("mhc", MHC)):
        whole = step_seconds(setting.replace(recompute="block"), numbers(model, depth))
        found[name] = (step_seconds(setting, numbers(model, depth)), whole)
    # What recomputing blocks adds beyond recomputing those of the plain model is the depth operation.
    once_more = (found["mhc"][1] - found["mhc"][0]) - (found["plain"][1] - found["plain"][0])
    overhead = (found["mhc"][0] + once_more) / found["plain"][0] - 1
    return (
        f"**M.** With the depth operation recomputed in the backward pass, as the paper does, {100 * overhead:.1f} % are "
        f"predicted. The "
        "rest is unexplained: its layout, its messages and how long its plain step takes are not published."
    )


def _unfused() -> float:
    """Numbers moved per token and sublayer over d when each operation is a kernel."""
    model = replace(preset("mhc-27b"), blocks=preset("mhc-27b").blocks[:1])
    found = numbers(model, MHC, "eager")["sublayers"][0]["depth"]["eager"]
    return found[1] / 2 / model.d_model
