"""Every mixer on the device in float32, against float64 on the CPU: outputs, gradients, packed documents, decoding, autocast.

How far float32 may be off is not guessed: the same model in float32 on the CPU shows it, and the device may be a few times
farther off, since it sums in another order.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.settings import Items, Row, Settings
from twoaxis import DEPTH, FEED_FORWARD, LOCAL, SEQUENCE, Decoder
from twoaxis.core.layout import TokenLayout
from twoaxis.core.measure import distance, gradients
from twoaxis.feed_forward import FeedForwardConfig
from twoaxis.testing.measured import LowPrecisionStatistics
from twoaxis.testing.toy import AxisConfig, toy_decoder, toy_tokens

AXES: dict[str, Any] = {"depth": DEPTH, "sequence": SEQUENCE, "local": LOCAL, "feed-forward": FEED_FORWARD}

TIMES_THE_CPU = 8.0
"""How many times farther from float64 the device may be than the CPU in float32."""

ALWAYS_ALLOWED = 2e-5
"""A relative error that is rounding whatever the CPU's is: some 300 steps of 6e-8."""

DOCUMENTS = ((0, 0, 0, 1, 1, 2, 2, 2, 2), (0, 1, 1, 1, 1, 1, 1, 2, 2))
"""Of the tokens of two packed rows."""


class Outputs(NamedTuple):
    """What one model computes: logits of whole and of packed rows, every gradient, and logits token by token."""

    logits: Tensor
    packed: Tensor
    gradients: Tensor
    decoded: Tensor


def items(settings: Settings) -> Items:
    """One item per mixer, over all its examples; small means the first examples of two mixers of each axis."""

    def item(row: Any) -> Any:
        examples = list(row.examples)
        return lambda: [checked({name: row.example(name) for name in settings.pick(examples, examples[:1])}, settings.device)]

    rows = [(axis, row) for axis, table in AXES.items() for row in list(table)[: settings.pick(None, 2)]]
    return {f"{axis} {row.kind}": item(row) for axis, row in rows}


def checked(examples: dict[str, AxisConfig], device: str) -> Row:
    """The largest errors of a mixer over its examples, and the first thing that does not hold."""
    errors = dict.fromkeys(Outputs._fields, 0.0)
    allowed = dict(errors)
    problems: list[str] = []
    for name, config in examples.items():
        exact = outputs(toy_decoder(config))
        host = outputs(toy_decoder(config, dtype=torch.float32))
        there = outputs(toy_decoder(config, dtype=torch.float32).to(device))
        for field, want, near, got in zip(Outputs._fields, exact, host, there, strict=True):
            error, bound = relative(got, want), max(ALWAYS_ALLOWED, TIMES_THE_CPU * relative(near, want))
            errors[field], allowed[field] = max(errors[field], error), max(allowed[field], bound)
            if not error <= bound:
                problems.append(f"{name}: {field} off by {error:.1e}, allowed {bound:.1e}")
        problems += [f"{name}: {problem}" for problem in autocast_problems(config, device)]
    kind = next(iter(examples.values())).to_data()["kind"]
    row: Row = {"mixer": kind, "examples": len(examples), **errors, "allowed": max(allowed.values()), "ok": not problems}
    return row | ({"first problem": problems[0]} if problems else {})


def outputs(model: Decoder) -> Outputs:
    """Runs a model forward, backward and token by token, wherever it is; the results are on the CPU."""
    device = model.embedding.weight.device
    tokens, targets = (toy_tokens(seed=seed).to(device) for seed in (0, 1))
    layout = TokenLayout.packed(torch.tensor(DOCUMENTS, device=device))
    logits, packed = model(tokens), model(tokens, layout)
    total = model.loss(tokens, targets)[0] + model.loss(tokens, targets, layout)[0]
    found = flat(gradients(model, total / targets.numel()).values())
    cache, decoded = model.new_cache(), []
    with torch.no_grad():
        for t in range(tokens.shape[1]):
            step, cache = model(tokens[:, t : t + 1], None, cache)
            decoded.append(step)
    parts: Sequence[Tensor] = (logits, packed, found, torch.cat(decoded, dim=1))
    return Outputs(*(part.detach().cpu() for part in parts))


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """Everything as one row."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def relative(got: Tensor, want: Tensor) -> float:
    """The largest difference over the largest wanted entry; NaN counts as infinite."""
    return distance(got, want) / max(float(want.abs().max()), torch.finfo(torch.float32).tiny)


def autocast_problems(config: AxisConfig, device: str) -> list[str]:
    """What is wrong with a step under bfloat16 autocast: not finite, or statistics in half precision."""
    model = toy_decoder(config, dtype=torch.float32).to(device)
    tokens, targets = (toy_tokens(seed=seed).to(device) for seed in (0, 1))
    with LowPrecisionStatistics() as seen, torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
        loss, _ = model.loss(tokens, targets)
    # A feed-forward has no statistics: a power there is its activation.
    narrow = [] if isinstance(config, FeedForwardConfig) else sorted(set(seen.found))
    found = [f"under autocast {', '.join(narrow)} in half precision"] if narrow else []
    if not bool(flat(gradients(model, loss).values()).isfinite().all()):
        found.append("under autocast a gradient is not finite")
    return found if bool(loss.isfinite()) else ["under autocast the loss is not finite", *found]
