"""The loss of a batch as a recipe computes it: its device, precision, checkpointing and compilation."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.layout import TokenLayout
from twoaxis.data import Batch
from twoaxis.model import Decoder
from twoaxis.model.block import Block
from twoaxis.ops.precision import ISOLATED
from twoaxis.train.recipe import TrainConfig


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
    everything = config.batch_size // config.parallel.data_ranks
    # A pipeline cuts its rows into micro-batches itself.
    rows = everything if config.parallel.pipeline > 1 else config.micro_batch_size or everything
    if config.compile != "off" and everything % rows:
        whole = config.parallel.data_ranks == 1
        windows = f"batch_size={everything}" if whole else f"the {everything} windows of a rank"
        allowed = f"a divisor of {windows} when compiled"
        raise ConfigError(problem("micro_batch_size", rows, allowed, "change one of them or set compile=off"))
    return rows
