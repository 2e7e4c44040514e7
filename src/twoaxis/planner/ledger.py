"""The ledger of a model: everything that it costs before any device is named, stage boundaries included.

Recomputing the history at the receiver is no further way to send less: a source is the output of sublayers whose weights lie
on another rank. What shrinks it is another cut, the cache of a rank, or larger source blocks.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from twoaxis.core.cost import Shape
from twoaxis.core.errors import ConfigError, nearest, problem
from twoaxis.ledger.lines import depth_lines, saved_by_training
from twoaxis.ledger.stack import TooManyKernels
from twoaxis.planner.coefficients import Engine, coefficients
from twoaxis.planner.formulas.collectives import even_cuts, hop_bytes, waiting_bytes
from twoaxis.planner.formulas.counts import (
    boundary_of_block,
    cache_bytes_of,
    forward_counts,
    parameter_counts,
    state_bytes,
)
from twoaxis.planner.model.shape import ModelShape
from twoaxis.planner.quantities import Precision

Forwarding = Literal["naive", "cached", "cached_own"]
"""What a boundary sends: see `crossing.hop_bytes`."""

FORWARDINGS: tuple[Forwarding, ...] = get_args(Forwarding)


@dataclass(frozen=True)
class Payload:
    """What crosses the boundaries of one pipeline.

    Attributes:
        ranks: P.
        hops: bytes per token over the boundary after each chunk but the last, in one direction; the other has as many.
        waiting: bytes per token of gradients that begin, and that end, to wait on a rank for an earlier chunk, by chunk.
    """

    ranks: int
    hops: tuple[int, ...]
    waiting: tuple[tuple[int, ...], tuple[int, ...]]

    @property
    def total(self) -> int:
        """Bytes per token over all boundaries, in one direction."""
        return sum(self.hops)

    @property
    def peak(self) -> int:
        """Bytes per token over the boundary that carries most."""
        return max(self.hops, default=0)

    @property
    def received(self) -> tuple[int, ...]:
        """Bytes per token that each rank receives for all its chunks, and so holds while a microbatch is in all of them."""
        return tuple(sum(hop for chunk, hop in enumerate(self.hops, 1) if chunk % self.ranks == r) for r in range(self.ranks))

    def of_microbatch(self, tokens: int) -> list[float]:
        """Bytes of a microbatch of so many tokens over each boundary, for `formulas.peak_memory`."""
        return [tokens * hop for hop in self.hops]

    def waiting_of_microbatch(self, tokens: int) -> list[list[float]]:
        """Bytes of gradients of a microbatch of so many tokens that wait, for `formulas.peak_memory`."""
        return [[tokens * each for each in part] for part in self.waiting]


def edges(model: ModelShape, chunks: int) -> tuple[int, ...]:
    """The sublayers at which the chunks of a model begin, and the end: whole blocks, as many in each as they divide.

    Raises:
        ConfigError: more chunks than blocks.
    """
    if not 1 <= chunks <= model.n_layers:
        allowed = f"between 1 and the {model.n_layers} layers of {model.name}"
        raise ConfigError(problem("pipeline * virtual", chunks, allowed, "use fewer stages"))
    lengths = [len(block) for block in model.blocks]
    return tuple(sum(lengths[:block]) for block in even_cuts(model.n_layers, chunks))


def payload(
    model: ModelShape, ranks: int, virtual: int = 1, forwarding: Forwarding = "naive", element_bytes: int = 2
) -> Payload:
    """What crosses the boundaries when a model is cut into `ranks * virtual` chunks of whole blocks.

    The tensors of the state are those that its depth mixer makes; a tensor that a state holds twice is sent once.

    Raises:
        ConfigError: more chunks than blocks, or an unknown forwarding.
    """
    if forwarding not in FORWARDINGS:
        raise ConfigError(problem("forwarding", forwarding, "known", nearest(forwarding, FORWARDINGS)))
    leaves = depth_lines(model, element_bytes, element_bytes)["leaves"]
    cut = leaves, list(edges(model, ranks * virtual)), ranks, forwarding
    begun, ended = waiting_bytes(*cut)
    return Payload(ranks, tuple(hop_bytes(*cut)), (tuple(begun), tuple(ended)))


def with_block_sizes(model: ModelShape, sizes: Iterable[int]) -> dict[str, ModelShape]:
    """A model with larger and larger source blocks, by name; 1 is the full history.

    Raises:
        ConfigError: a depth mixer without source blocks of a free size.
    """
    if "block_size" not in type(model.depth).model_fields:
        remedy = "plan one that sums sublayers into sources, such as 'attention_residuals'"
        raise ConfigError(problem("depth", model.depth.kind, "a mixer with a block_size", remedy))
    return {
        "full" if size == 1 else f"blocks of {size}": model.with_depth(model.depth.replace(block_size=size)) for size in sizes
    }


def compare(
    models: Mapping[str, ModelShape], ranks: int, virtual: int = 1, element_bytes: int = 2
) -> dict[tuple[str, Forwarding], Payload]:
    """The payload of every model with every forwarding."""
    return {
        (name, forwarding): payload(model, ranks, virtual, forwarding, element_bytes)
        for name, model in models.items()
        for forwarding in FORWARDINGS
    }


BACKWARD = 2
"""Forward passes that a backward pass computes: one product for the input's gradient, one for the weights'."""


@dataclass(frozen=True)
class DepthTraffic:
    """What the depth operation moves per token, over the whole stack.

    Attributes:
        fused_bytes: with one kernel for each read and write, the mean over sublayers.
        largest_fused_bytes: of the sublayer that moves most.
        eager_bytes: with one kernel for each operation, the mean over sublayers.
        eager_kernels: of one forward pass, all sublayers together; None, as the bytes, where they are not counted.
        eager_refused: why they are not although the engine is `eager`.
    """

    fused_bytes: float
    largest_fused_bytes: float
    eager_bytes: float | None
    eager_kernels: int | None
    eager_refused: str | None = None


@dataclass(frozen=True)
class Ledger:
    """Every count of one model at one batch and length.

    Attributes:
        model: its name.
        batch: sequences.
        tokens: in each.
        params: all parameters, by `all`, `used` by one token, of the `depth` operation, `embedding_and_head`.
        forward_flops: per token, by `matmul`, `pairs` (attention's quadratic term), `elementwise`, `depth`, `all`.
        training_flops_per_token: forward and backward.
        recomputed_training_flops_per_token: with every block computed once more in the backward pass.
        depth: what the depth operation moves.
        saved_bytes: what autograd keeps for the backward pass of the whole batch.
        recomputed_saved_bytes: kept when only the states between blocks are, with what recomputing one block adds.
        parameter_bytes: weights.
        gradient_bytes: gradients.
        optimizer_bytes: what the optimizer keeps.
        cache_bytes_per_token: what one more token adds to a long sequence in generation.
        cache_bytes: of one sequence of `tokens` tokens.
        state_bytes: per token, of the depth state before the first block, between blocks, and after the last.
    """

    model: str
    batch: int
    tokens: int
    params: dict[str, int]
    forward_flops: dict[str, float]
    training_flops_per_token: float
    recomputed_training_flops_per_token: float
    depth: DepthTraffic
    saved_bytes: int
    recomputed_saved_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    cache_bytes_per_token: float
    cache_bytes: int
    state_bytes: tuple[int, ...]

    def to_data(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        return asdict(self)


def ledger(
    model: ModelShape,
    batch: int = 1,
    tokens: int | None = None,
    precision: Precision | None = None,
    engine: Engine = "eager",
) -> Ledger:
    """Counts everything about a model; nothing is built and nothing is timed.

    Args:
        model: the model.
        batch: sequences.
        tokens: in each; None takes the length that the model was made for.
        precision: bytes of one number of each sort.
        engine: `fused` leaves out the traffic of the eager depth operation, whose count takes a while in deep models; `eager`
            says in `depth.eager_refused` why it is not counted.

    Example:
        >>> from twoaxis import DecoderConfig
        >>> config = DecoderConfig(vocab_size=256, d_model=64, n_layers=2, depth="attention_residuals")
        >>> counts = ledger(ModelShape.of_decoder(config), tokens=128)
        >>> counts.params["all"], counts.state_bytes
        (117568, (132, 396, 660))
    """
    tokens = tokens or model.max_seq_len
    refused = None
    try:
        numbers = coefficients(model, precision, engine)
    except TooManyKernels as error:
        numbers, refused = coefficients(model, precision), str(error)
    total = batch * tokens
    params = parameter_counts(numbers)
    flops = {name: value / total for name, value in forward_counts(numbers, batch, tokens).items()}
    saved = saved_by_training(model, Shape(batch, tokens, (precision or Precision()).activations))
    return Ledger(
        model=model.name,
        batch=batch,
        tokens=tokens,
        params=params,
        forward_flops=flops,
        training_flops_per_token=(1 + BACKWARD) * flops["all"],
        recomputed_training_flops_per_token=(2 + BACKWARD) * flops["all"],
        depth=_traffic(numbers, refused),
        saved_bytes=saved["saved"],
        recomputed_saved_bytes=saved["recomputed"],
        parameter_bytes=params["all"] * numbers["weights_bytes"],
        gradient_bytes=params["all"] * numbers["gradients_bytes"],
        optimizer_bytes=params["all"] * numbers["optimizer_bytes"],
        cache_bytes_per_token=cache_bytes_of(numbers, tokens + 1) - cache_bytes_of(numbers, tokens),
        cache_bytes=round(cache_bytes_of(numbers, tokens)),
        state_bytes=tuple(int(state_bytes(numbers, boundary_of_block(numbers, block))) for block in range(model.n_layers + 1)),
    )


def _traffic(numbers: dict[str, Any], refused: str | None) -> DepthTraffic:
    operations = [sublayer["depth"] for sublayer in numbers["sublayers"]]
    fused = [operation["read"] + operation["written"] for operation in operations]
    eager = [operation["eager"] for operation in (*operations, numbers["ends"]) if "eager" in operation]
    return DepthTraffic(
        fused_bytes=sum(fused) / len(fused),
        largest_fused_bytes=max(fused),
        eager_bytes=sum(each for _, each, _ in eager) / len(operations) if eager else None,
        eager_kernels=sum(count for count, _, _ in eager) if eager else None,
        eager_refused=refused,
    )
