"""The forms of manifold-constrained Hyper-Connections that are published, and what they start from."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from twoaxis.core.design import InitEquivalence
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.parameters import Constant, Normal
from twoaxis.ops.sinkhorn import Order, Sinkhorn, Start
from twoaxis.ops.stream_matrices import BY_ENTRY, Residual, StreamMatrix

Preset = Literal["paper", "deepseek_v4", "deepseek_v41", "glm5", "lucidrains_v1", "lucidrains_v2", "hy_v4", "depthbench"]
Scores = Literal["joint", "per_stream"]
Coefficients = Literal["linear", "tanh"]
ReadTime = Literal["current", "delayed"]
ReadOut = Literal["sum", "mean", "learned", "last_site"]
Init = Literal["preserving", "deepseek_v4", "lucidrains", "hy_v4", "mhc_lite", "depthbench"]

READ_OF_ONE = 0.7
"""The weight with which a sublayer reads its own stream under the `preserving` init; the others share the rest."""
DIAGONAL = 3.0
"""The logit of keeping a stream under the `preserving` init: with 4 streams each keeps 0.87 of itself."""

INITIALIZER_RANGE = 0.02
"""The standard deviation at which transformers starts the maps of checkpoints."""

SATURATED = 8.0
"""The logits of mHC-lite, KromHC and DepthBench start this far from those that they prefer."""
SINGULAR = 4.0
"""The logit of every singular value of sHC, whose hyperbolic tangent is 0.9993."""

OF_SINKHORN = ("rounds", "order", "start", "start_eps", "sum_eps")
"""Options of Sinkhorn, which other residuals do not have."""


@dataclass(frozen=True)
class Form:
    """Every choice in which published implementations differ."""

    scores: Scores = "joint"
    norm_eps: float = 1e-20
    coefficients: Coefficients = "linear"
    read: ReadTime = "current"
    residual: Residual = "sinkhorn"
    rounds: int = 20
    order: Order = "destinations_first"
    start: Start = "exp"
    start_eps: float = 0.0
    sum_eps: float = 0.0
    read_eps: float = 0.0
    write_eps: float = 0.0
    read_out: ReadOut = "sum"
    init: Init = "preserving"

    def matrix(self, n: int) -> StreamMatrix:
        """How the residual logits become a matrix of n streams.

        Raises:
            ConfigError: options of Sinkhorn that exclude each other, or a residual that other numbers of streams have.
        """
        rounds = Sinkhorn(self.rounds, self.order, self.start, self.start_eps, self.sum_eps)
        return StreamMatrix(self.residual, n, rounds)

    def check(self, write_magnitude: float) -> None:
        """Refuses choices that do not fit together.

        Raises:
            ConfigError: scores per stream of a residual that has none, writes below the one they start at, or a read-out by
                weights that the last sublayer has used itself.
        """
        if self.scores == "per_stream" and self.residual not in (*BY_ENTRY, "identity"):
            allowed = f"'joint' with residual={self.residual!r}, whose scores belong to no stream"
            raise ConfigError(problem("scores", self.scores, allowed, "leave it out, or use residual='sinkhorn'"))
        if self.init in WRITES_ONE and write_magnitude <= 1:
            allowed = f"above 1 with init={self.init!r}, which writes with weight 1"
            raise ConfigError(problem("write_magnitude", write_magnitude, allowed, "use 2.0, or another init"))
        if self.read_out == "last_site" and self.read == "current":
            allowed = "'sum', 'mean' or 'learned' with a current read"
            raise ConfigError(problem("read_out", self.read_out, allowed, "use read='delayed', or another read-out"))

    @property
    def init_equivalence(self) -> InitEquivalence:
        """Up to the scale of the read and of the read-out; none with another init, or an eps on residual or write weights."""
        if self.init not in WRITES_ONE:
            return InitEquivalence("none", f"the init {self.init!r} writes with weights other than 1")
        if self.write_eps or (self.residual == "sinkhorn" and (self.start_eps or self.sum_eps)):
            return InitEquivalence(
                "none", "each write is off by its eps, about 1e-6; without eps this init keeps the plain stream"
            )
        return InitEquivalence(
            "up_to_norm", "all streams are copies of the plain stream, read and left with any sum of weights"
        )


_DEEPSEEK = Form(norm_eps=1e-6, start="softmax", start_eps=1e-6, sum_eps=1e-6, read_eps=1e-6, read_out="learned")
_LUCIDRAINS = Form(scores="per_stream", order="sources_first", start="exp_minus_max")

PRESETS: dict[Preset, Form] = {
    "paper": Form(),
    "deepseek_v4": _DEEPSEEK,
    "deepseek_v41": replace(_DEEPSEEK, norm_eps=1e-20, read="delayed", read_out="last_site"),
    "glm5": replace(_DEEPSEEK, read_out="mean"),
    "lucidrains_v1": _LUCIDRAINS,
    "lucidrains_v2": _LUCIDRAINS,
    "hy_v4": Form(norm_eps=1e-6, residual="identity", read_eps=1e-6, write_eps=1e-6, read_out="learned"),
    "depthbench": Form(norm_eps=1e-8, coefficients="tanh", start="log", init="depthbench"),
}


def logit(probability: float) -> float:
    """Returns the number whose sigmoid this is."""
    return math.log(probability / (1 - probability))


WRITES_ONE = ("preserving", "depthbench")
"""Inits under which every stream gets the update once, as the plain stream does."""


def starting_logits(form: Form, index: int, n: int, write_magnitude: float) -> list[float]:
    """Returns the logits that sublayer `index` starts from: of all reads, all writes and the matrix; by stream, of one each.

    Args:
        form: with the init and the residual.
        index: of the sublayer, which favours stream `index` mod n.
        n: streams.
        write_magnitude: the upper end of the write weights.
    """
    own, other, own_write, other_write = 0.0, 0.0, 0.0, 0.0
    if form.init == "preserving":
        own, other = logit(READ_OF_ONE), logit((1 - READ_OF_ONE) / (n - 1))
    elif form.init == "depthbench":
        own, other = SATURATED, -SATURATED
    elif form.init == "lucidrains":
        own, own_write, other_write = 1.0, 1.0, 1.0
    elif form.init == "mhc_lite":
        own, other, own_write, other_write = 1.0, -1.0, 1.0, -1.0
    elif form.init == "hy_v4":
        own = other = logit(1 / n)
    if form.init in WRITES_ONE:
        own_write = other_write = logit(1 / write_magnitude)
    reads = [own if j == index % n else other for j in range(n)]
    writes = [own_write if j == index % n else other_write for j in range(n)]
    matrix = _starting_matrix(form.init, form.matrix(n))
    if form.scores == "joint":
        return [*reads, *writes, *matrix]
    each = len(matrix) // n
    return [x for j in range(n) for x in (reads[j], writes[j], *matrix[j * each : (j + 1) * each])]


def _starting_matrix(init: Init, matrix: StreamMatrix) -> list[float]:
    """Nearly the identity, or zeros with a placeholder."""
    n, rows = matrix.n, sum(matrix.groups)
    if init in ("deepseek_v4", "hy_v4") or matrix.kind in ("identity", "orthogonal"):
        return [0.0] * rows
    if matrix.kind in BY_ENTRY:
        keep, leave = {"lucidrains": (1.0, 0.0), "depthbench": (SATURATED, -SATURATED)}.get(init, (DIAGONAL, 0.0))
        return [keep if i == j else leave for j in range(n) for i in range(n)]
    if matrix.kind == "spectral":
        return [0.0] * (rows - n + 1) + [SINGULAR] * (n - 1)
    # The first of all permutations, and of the two of every factor, is the identity.
    factors = rows // 2 if matrix.kind == "kronecker" else 1
    return [0.0, *[-SATURATED] * (rows // factors - 1)] * factors


def map_start(init: Init) -> Constant | Normal:
    """Returns the start of the maps."""
    return Normal(INITIALIZER_RANGE) if init in ("deepseek_v4", "hy_v4") else Constant(0.0)


def scale_start(init: Init) -> Constant:
    """Returns the start of the scales."""
    return Constant(1.0 if init == "deepseek_v4" else 0.01)
