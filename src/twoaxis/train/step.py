"""One optimizer step: forward pass, gradients of the mean loss, clipping, update."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.layout import TokenLayout
from twoaxis.data import Batch
from twoaxis.model import Decoder
from twoaxis.model.block import Block
from twoaxis.train.optim import set_learning_rate
from twoaxis.train.parallel.placement import Placement
from twoaxis.train.recipe import TrainConfig

ISOLATED: dict[str, Any] = {"isolate_recompiles": True}
"""Gives each model its own recompile limit; not yet in the type stubs of torch."""


def choose_device(name: str) -> torch.device:
    """The device of a recipe; `auto` is the first GPU, else the CPU.

    Raises:
        ConfigError: a device that this machine or this build of torch does not have.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device={name!r}: cannot be used here ({reason}); use device=auto") from None
    return device


def choose_dtype(precision: str, device: torch.device) -> torch.dtype:
    """The precision of matrix products; `auto` is bfloat16 on GPUs and float32 on CPUs, where bfloat16 is slow."""
    if precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[precision]


class TokenLoss:
    """Computes the summed token loss of a batch with the precision, checkpointing and compilation of a recipe."""

    def __init__(self, model: Decoder, config: TrainConfig) -> None:
        self.model = model
        self.device = model.embedding.weight.device
        self.dtype = choose_dtype(config.precision, self.device)
        self._recompute = config.recompute == "block"
        self._loss: Callable[..., Tensor] = self._eager_loss
        if config.compile == "model":
            self._loss = torch.compile(self._eager_loss, dynamic=False, fullgraph=True, **ISOLATED)
        elif config.compile == "block":
            # Blocks share a graph unless their depth states differ, as in a growing history.
            limit = {"recompile_limit": len(model.blocks) + 1}
            run = torch.compile(_forward, dynamic=False, fullgraph=True, **limit, **ISOLATED)
            for block in model.blocks:
                block.forward = partial(run, cast(Block, block))

    def __call__(self, batch: Batch) -> Float[Tensor, ""]:
        """The sum of the token losses of the batch in nats, with its graph."""
        with self._precision():
            return self._loss(*batch.to(self.device))

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Float[Tensor, ""]:
        """The same sum without gradients; not compiled, since a smaller last batch would compile again."""
        with self._precision(), torch.compiler.set_stance("force_eager"):
            return self._eager_loss(*batch.to(self.device))

    @torch.no_grad()
    def hits(self, batch: Batch) -> Int[Tensor, ""]:
        """The number of targets that are the most likely token; not compiled."""
        tokens, targets, documents = batch.to(self.device)
        with self._precision(), torch.compiler.set_stance("force_eager"):
            return self.model.correct(tokens, targets, _layout(documents))

    def _eager_loss(
        self, tokens: Int[Tensor, "B T"], targets: Int[Tensor, "B T"], documents: Int[Tensor, "B T"] | None
    ) -> Float[Tensor, ""]:
        total, _ = self.model.loss(tokens, targets, _layout(documents), recompute=self._recompute)
        return total

    def _precision(self) -> AbstractContextManager[object]:
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)


def _forward(block: Block, *arguments: Any) -> Any:
    """The forward pass of any block: one function, so that blocks share compiled code."""
    return Block.forward(block, *arguments)


def _layout(documents: Int[Tensor, "B T"] | None) -> TokenLayout | None:
    return None if documents is None else TokenLayout.packed(documents)


def rows_at_once(config: TrainConfig) -> int:
    """Windows in a micro-batch of one process.

    Raises:
        ConfigError: a compiled recipe, whose shapes are static, with micro-batches that do not divide the batch.
    """
    rows = config.micro_batch_size or config.batch_size // config.parallel.data_ranks
    if config.compile != "off" and (config.batch_size // config.parallel.data_ranks) % rows:
        allowed = f"a divisor of the {config.batch_size // config.parallel.data_ranks} windows of a process when compiled"
        raise ConfigError(problem("micro_batch_size", rows, allowed, "change one of them or set compile=off"))
    return rows


class StepOutcome(NamedTuple):
    """The measurements of one step.

    Attributes:
        loss: mean over the valid tokens of the whole batch in nats, before the update; 0 when there is none.
        grad_norm: norm of the whole gradient, before clipping.
        tokens: valid tokens of the whole batch.
    """

    loss: float
    grad_norm: float
    tokens: int


def accumulate_gradients(
    token_loss: Callable[[Batch], Tensor], batch: Batch, rows: int, tokens: int | None = None
) -> tuple[Tensor, int]:
    """Accumulates the gradient of the mean token loss of the batch over micro-batches of `rows` windows.

    The summed `token_loss` of each micro-batch is divided by the valid tokens of the whole batch, so all tokens weigh the same.
    A batch without a valid token has loss 0 and gradients 0.

    Args:
        token_loss: the summed loss of a batch.
        batch: the rows of this process.
        rows: windows of a micro-batch.
        tokens: valid tokens of all processes; None counts those of `batch`.

    Returns:
        The loss of these rows over all valid tokens, and their number.
    """
    tokens = batch.n_targets if tokens is None else tokens
    losses = []
    for part in batch.micro_batches(rows):
        loss = token_loss(part) / max(tokens, 1)
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum(), tokens


def clip_gradients(
    parameters: Iterable[nn.Parameter], clip_norm: float | None, whole_norm: Callable[[Tensor], Tensor] = lambda norm: norm
) -> Tensor:
    """Clips the gradients to the norm, and returns their norm before clipping; `whole_norm` makes it that of all processes."""
    parameters = list(parameters)
    norm = whole_norm(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
    if clip_norm is not None:
        nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)
    return norm


def take_step(
    token_loss: Callable[[Batch], Tensor],
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    rows: int,
    multiplier: float,
    clip_norm: float | None,
    placement: Placement | None = None,
) -> StepOutcome:
    """Takes one optimizer step and waits for the device once; a loss or norm may be not finite.

    Args:
        token_loss: the summed loss of a batch.
        optimizer: of the parameters of this process.
        batch: of all processes.
        rows: windows of a micro-batch.
        multiplier: of the full learning rate.
        clip_norm: largest norm of the whole gradient; None does not clip.
        placement: of model and batch; None is one process.
    """
    placement = placement or Placement()
    set_learning_rate(optimizer, multiplier)
    loss, tokens = accumulate_gradients(token_loss, placement.rows(batch), rows, batch.n_targets)
    placement.take_gradients()
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    norm = clip_gradients(parameters, clip_norm, placement.whole_norm)
    measured = torch.stack([placement.ranks.sum(loss.double()), norm.double()])
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    mean_loss, grad_norm = measured.tolist()
    return StepOutcome(mean_loss, grad_norm, tokens)
