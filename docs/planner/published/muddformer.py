"""MUDDFormer: parameters and FLOPs of its table 1, throughput of its table 4."""

from typing import Any, NamedTuple

from planner.published.row import Published, Row
from planner.published.runs import PLAIN, flops, numbers, one, params, preset, step_seconds

DEVICE = "a100"
BATCH, TOKENS = 8, 2048
PROMPT = 4096
AS_WRITTEN: dict[str, Any] = {"kind": "muddformer"}
AS_RELEASED: dict[str, Any] = {**AS_WRITTEN, "hidden": "round64", "expand_last": 4}


class Reported(NamedTuple):
    """Of one size: overheads of table 1 in percent; throughput of table 4, plain and with MUDD, in training and generation."""

    params: float
    flops: float
    train: tuple[float, float]
    generate: tuple[float, float]


TABLES = {
    "1.3b": Reported(0.22, 0.38, (1147, 1030), (325, 286)),
    "2.8b": Reported(0.23, 0.40, (684, 575), (181, 163)),
    "6.9b": Reported(0.14, 0.26, (332, 318), (95.5, 89.7)),
}


def muddformer() -> Published:
    """The predictions and what explains their differences."""
    return Published(
        method="MUDDFormer",
        source="arXiv:2502.12170v2, tables 1 and 4; the authors' released 2.8B",
        setting=f"muddformer-1.3b, 2.8b and 6.9b. Devices and batches are not in our notes on the paper. Assumed: one "
        f"{DEVICE.upper()}, "
        f"training with {BATCH} sequences of {TOKENS}, generation of one sequence behind {PROMPT} tokens, one kernel for each "
        f"depth "
        f"read and write; FLOPs of sequences of {PROMPT}. Hidden width K = C (i + 1) in table 1, as released in table 4.",
        rows=(*_params(), *_seconds()),
        remarks=(_by_formula(), _not_monotone(), _launches(), _unit()),
        contradicted=_contradicted(),
    )


def _params() -> list[Row]:
    rows = []
    for size, told in TABLES.items():
        model = preset(f"muddformer-{size}")
        plain, changed = numbers(model, PLAIN), numbers(model, AS_WRITTEN)
        share = 100 * params(changed, "depth") / params(plain)
        more = 100 * (flops(changed, PROMPT) / flops(plain, PROMPT) - 1)
        rows += [
            Row(f"{size}: parameters added", told.params, share, "percent", digits=2, why="D"),
            Row(f"{size}: FLOPs added", told.flops, more, "percent", digits=2, why="D"),
        ]
    return rows


def _seconds() -> list[Row]:
    rows, setting = [], one(DEVICE, BATCH, TOKENS)
    for size, told in TABLES.items():
        model = preset(f"muddformer-{size}")
        plain, changed = numbers(model, PLAIN), numbers(model, AS_RELEASED)
        trained = step_seconds(setting, changed) / step_seconds(setting, plain)
        generated = _token_seconds(changed) / _token_seconds(plain)
        rows += [
            Row(f"{size}: training time", told.train[0] / told.train[1], trained, why="E"),
            Row(f"{size}: generation time", told.generate[0] / told.generate[1], generated, why="F, G"),
        ]
    return rows


def _token_seconds(model: dict[str, Any]) -> float:
    return one(DEVICE, 1, PROMPT).generation_step(model, 1, PROMPT)["seconds"]


def _by_formula() -> str:
    told = []
    for size in TABLES:
        model = preset(f"muddformer-{size}")
        eta, rho = (model.n_layers + 3) / model.d_model, PROMPT / model.d_model
        told.append(f"{size} {100 * eta / 6:.2f} % and {100 * eta / (3 + rho / 4):.2f} %")
    return (
        "**D.** Table 1 is the paper's approximation, not a count: parameters eta / 6 and FLOPs eta / (3 + rho / 4) with "
        f"eta = (L + 3) / D and rho = {PROMPT} / D give {'; '.join(told)}. Its parameters are relative to 12 L D^2, without "
        f"the "
        "embedding and the head; ours to all. Its FLOPs leave out the sums themselves, and the plain model's head."
    )


def _not_monotone() -> str:
    told = ", ".join(f"{size} {100 * (t.train[0] / t.train[1] - 1):.1f} %" for size, t in TABLES.items())
    return (
        f"**E.** The published overheads in training, {told}, do not order with size, while everything that is counted does: "
        f"the "
        "traffic of the sums per FLOP of the model falls with width and rises with depth. That 2.8B is slowest is unexplained."
    )


def _launches() -> str:
    told, per_block = [], []
    for size, table in TABLES.items():
        model = preset(f"muddformer-{size}")
        seconds = 1 / table.generate[1] - 1 / table.generate[0]
        more = _token_seconds(numbers(model, AS_RELEASED)) - _token_seconds(numbers(model, PLAIN))
        per_block.append(1e6 * seconds / model.n_layers)
        told.append(f"{size} {per_block[-1]:.1f} us published, {1e6 * more / model.n_layers:.1f} us predicted")
    launch = one(DEVICE, 1, PROMPT).rates["launch_seconds"] * 1e6
    return (
        f"**F.** What MUDD adds to one token, per block: {'; '.join(told)}. It hardly grows with width, so it is launches, "
        f"{per_block[0] / launch:.0f} to {per_block[-1] / launch:.0f} of {launch:.0f} us. The planner counts four: two more "
        f"norms, and two "
        "for a product apart from the sums. A second product with what follows it makes six."
    )


def _unit() -> str:
    model = numbers(preset("muddformer-6.9b"), PLAIN)
    setting = one(DEVICE, 1, PROMPT)
    bytes_read = params(model) * setting.precision.weights
    most = setting.device.memory_bandwidth_bytes_per_second.value / bytes_read
    return (
        f"**G.** One A100 can read the weights of 6.9B {most:.0f} times per second at its peak bandwidth; 95.5 tokens per "
        f"second of one "
        f"sequence are {100 * 95.5 / most:.0f} % of that. Predicted: {1 / _token_seconds(model):.1f}. As thousands of tokens "
        f"per second, "
        f"they would be {95.5e3 * flops(model, 1) / 1e15:.1f} PFLOP/s, beyond one device."
    )


def _contradicted() -> tuple[str, ...]:
    model = preset("muddformer-2.8b")
    released, plain = numbers(model, AS_RELEASED), numbers(model, PLAIN)
    written = numbers(model, AS_WRITTEN)
    added = params(released, "depth")
    return (
        f"MUDDFormer table 1 gives 2.8B 0.23 % more parameters. With K = C (i + 1) they are {params(written, 'depth'):,}, "
        f"{100 * params(written, 'depth') / params(plain):.3f} %; in the released model, which rounds K up to multiples of 64 "
        f"and "
        f"widens the last, they are {added:,}, {100 * added / params(released):.3f} % of its {params(released):,}.",
    )
