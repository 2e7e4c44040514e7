"""The forms of manifold-constrained Hyper-Connections that are published: paper, models and packages."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from twoaxis.core.parameters import Constant, Normal
from twoaxis.ops.sinkhorn import Order, Sinkhorn, Start

Preset = Literal["paper", "deepseek_v4", "glm5", "lucidrains_v1", "lucidrains_v2", "hy_v4"]
Scores = Literal["joint", "per_stream"]
Residual = Literal["sinkhorn", "identity"]
ReadOut = Literal["sum", "mean", "learned"]
Init = Literal["preserving", "deepseek_v4", "lucidrains", "hy_v4"]

READ_OF_ONE = 0.7
"""The weight with which a sublayer reads its own stream under the `preserving` init; the others share the rest."""
DIAGONAL = 3.0
"""The logit of keeping a stream under the `preserving` init: with 4 streams each keeps 0.87 of itself."""

INITIALIZER_RANGE = 0.02
"""The standard deviation at which transformers starts the maps of checkpoints."""

OF_SINKHORN = ("rounds", "order", "start", "start_eps", "sum_eps")
"""Options of Sinkhorn, which an identity does not have."""


@dataclass(frozen=True)
class Form:
    """Every choice in which published implementations differ."""

    scores: Scores = "joint"
    norm_eps: float = 1e-20
    residual: Residual = "sinkhorn"
    rounds: int = 20
    order: Order = "destinations_first"
    start: Start = "exp"
    start_eps: float = 0.0
    sum_eps: float = 0.0
    read_eps: float = 0.0
    write_eps: float = 0.0
    read_out: ReadOut = "sum"

    @property
    def sinkhorn(self) -> Sinkhorn:
        """How the residual logits become a matrix."""
        return Sinkhorn(self.rounds, self.order, self.start, self.start_eps, self.sum_eps)


_DEEPSEEK = Form(norm_eps=1e-6, start="softmax", start_eps=1e-6, sum_eps=1e-6, read_eps=1e-6, read_out="learned")
_LUCIDRAINS = Form(scores="per_stream", order="sources_first", start="exp_minus_max")

PRESETS: dict[Preset, Form] = {
    "paper": Form(),
    "deepseek_v4": _DEEPSEEK,
    "glm5": replace(_DEEPSEEK, read_out="mean"),
    "lucidrains_v1": _LUCIDRAINS,
    "lucidrains_v2": _LUCIDRAINS,
    "hy_v4": Form(norm_eps=1e-6, residual="identity", read_eps=1e-6, write_eps=1e-6, read_out="learned"),
}


def logit(probability: float) -> float:
    """Returns the number whose sigmoid this is."""
    return math.log(probability / (1 - probability))


def starting_logits(init: Init, index: int, n: int, destinations: int, write_magnitude: float) -> list[tuple[float, ...]]:
    """Returns the logits that sublayer `index` starts from: row j is stream j, with the read, the write, and each destination.

    Args:
        init: how they are chosen.
        index: of the sublayer, which favours stream `index` mod n.
        n: streams.
        destinations: n, or 0 where nothing is mixed.
        write_magnitude: the upper end of the write weights.
    """
    read, other, write, keep = 0.0, 0.0, 0.0, 0.0
    if init == "preserving":
        read, other = logit(READ_OF_ONE), logit((1 - READ_OF_ONE) / (n - 1))
        write, keep = logit(1 / write_magnitude), DIAGONAL
    elif init == "lucidrains":
        read, write, keep = 1.0, 1.0, 1.0
    elif init == "hy_v4":
        read = other = logit(1 / n)
    kept = [[keep * (i == j) for i in range(destinations)] for j in range(n)]
    return [(read if j == index % n else other, write, *kept[j]) for j in range(n)]


def map_start(init: Init) -> Constant | Normal:
    """Returns the start of the maps."""
    return Normal(INITIALIZER_RANGE) if init in ("deepseek_v4", "hy_v4") else Constant(0.0)


def scale_start(init: Init) -> Constant:
    """Returns the start of the scales."""
    return Constant(1.0 if init == "deepseek_v4" else 0.01)
