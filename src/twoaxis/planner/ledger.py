"""The ledger of a model: all of its costs that depend on no device."""

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from twoaxis.core.cost import Shape
from twoaxis.core.errors import ConfigError, problem
from twoaxis.ledger.lines import saved_by_training
from twoaxis.ledger.stack import TooManyKernels
from twoaxis.planner.coefficients import Engine, coefficients
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
"""What a stage boundary sends; see `formulas.collectives.hop_bytes`."""

FORWARDINGS: tuple[Forwarding, ...] = get_args(Forwarding)


BACKWARD = 2
"""Forward passes that a backward pass computes: one product for the input's gradient, one for the weights'."""


@dataclass(frozen=True)
class DepthTraffic:
    """Bytes per token that the depth operations of the stack read and write.

    Attributes:
        fused_bytes: mean over sublayers, with one kernel for each read and write.
        largest_fused_bytes: of the sublayer with the most traffic.
        eager_bytes: mean over sublayers, with one kernel for each operation; None if not counted.
        eager_kernels: of one forward pass, over all sublayers; None if not counted.
        eager_refused: why the numbers of the engine `eager` are not counted; None if they are, or were not asked for.
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
        params: all parameters, by `all`, `used` by one token, of the `depth` operation, `embedding_and_head`, in `tables` of
            tokens, and `non_embedding`, the rest beside these two.
        forward_flops: per token, by `matmul`, `pairs` (attention's quadratic term), `elementwise`, `depth`, `all`.
        training_flops_per_token: forward and backward.
        recomputed_training_flops_per_token: with every block computed once more in the backward pass.
        depth: traffic of the depth operations.
        saved_bytes: saved for backward, of the whole batch.
        recomputed_saved_bytes: the same with blocks recomputed: states between blocks, and one block.
        parameter_bytes: weights.
        gradient_bytes: gradients.
        optimizer_bytes: state of the optimizer.
        cache_bytes_per_token: added by one more token in generation.
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
        """Plain JSON-ready data."""
        return asdict(self)


def ledger(
    model: ModelShape,
    batch: int = 1,
    tokens: int | None = None,
    precision: Precision | None = None,
    engine: Engine = "eager",
) -> Ledger:
    """Counts the costs of a model; nothing is built and nothing is timed.

    Args:
        model: the model.
        batch: sequences.
        tokens: in each; None takes max_seq_len.
        precision: bytes per number.
        engine: `fused` leaves out the traffic of the eager depth operation, which takes a while to count in deep models. If
            `eager` is not counted either, `depth.eager_refused` says why.

    Raises:
        ConfigError: a batch or a length below 1.

    Example:
        >>> from twoaxis import DecoderConfig
        >>> config = DecoderConfig(vocab_size=256, d_model=64, n_layers=2, depth="attention_residuals")
        >>> counts = ledger(ModelShape.of_decoder(config), tokens=128)
        >>> counts.params["all"], counts.state_bytes
        (117568, (132, 396, 660))
    """
    tokens = model.max_seq_len if tokens is None else tokens
    for name, value in (("batch", batch), ("tokens", tokens)):
        if value < 1:
            raise ConfigError(problem(name, value, "at least 1", "correct it"))
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
        optimizer_bytes=params["all"] * numbers["optimizer_bytes"] - _matrices(numbers) * numbers["moment_bytes"],
        cache_bytes_per_token=cache_bytes_of(numbers, tokens + 1, 1) - cache_bytes_of(numbers, tokens, 1),
        cache_bytes=round(cache_bytes_of(numbers, tokens, 1)),
        state_bytes=tuple(int(state_bytes(numbers, boundary_of_block(numbers, block))) for block in range(model.n_layers + 1)),
    )


def _matrices(numbers: dict[str, Any]) -> int:
    """Parameters that have no second moment."""
    each = (sublayer["matrices"] + sublayer["depth"]["matrices"] for sublayer in numbers["sublayers"])
    return sum(each) + numbers["ends"]["matrices"]


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
