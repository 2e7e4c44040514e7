"""One rank of a pipeline: its blocks of the decoder, whole or sharded, and the losses that its group computes together."""

from functools import cached_property

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn

from twoaxis.data import Batch
from twoaxis.model import Decoder, DecoderConfig
from twoaxis.train.parallel.pipeline import Pipeline
from twoaxis.train.parallel.placement import Losses
from twoaxis.train.parallel.sharded_rank import Sharded
from twoaxis.train.parallel.stage import parameters_of_all_ranks, parameters_of_two_ranks
from twoaxis.train.recipe import TrainConfig
from twoaxis.train.step import BatchLoss, gradient_norm
from twoaxis.train.token_loss import choose_dtype


class Pipelined(Sharded):
    """A rank that holds some blocks; the ranks of the same blocks may share out their parameters and the rows of a batch."""

    def build(self, config: TrainConfig, decoder: DecoderConfig, device: torch.device) -> Decoder:
        """Builds the blocks of this rank, and what else it needs of the decoder."""
        self._rows, self._dtype = config.batch_size // self._data_ranks, choose_dtype(config.precision, device)
        self._pipeline = Pipeline(
            decoder,
            config.parallel.stages(config.batch_size, config.micro_batch_size, config.recompute),
            self._rows,
            config.data.seq_len,
            seed=config.seed,
            device=device,
            group=self.mesh["pipeline"].get_group(),
            autocast=self._dtype == torch.bfloat16,
            mesh=self.data_mesh if self._data_ranks > 1 else None,
        )
        parts = self.ranks.gather(self._pipeline.initial_sha256)
        self.initial_sha256 = {name: digest for part in parts for name, digest in part.items()}
        return self._pipeline.model

    def whole(self, model: Decoder) -> Decoder:
        """The decoder without memory."""
        with torch.device("meta"):
            return Decoder(model.config)

    def losses(self, model: Decoder, config: TrainConfig) -> Losses:
        """The losses of the whole pipeline."""
        del model, config
        return PipelineLosses(self._pipeline, self._dtype)

    def rows(self, batch: Batch) -> Batch:
        """The rows of this pipeline, always as many."""
        return batch.part(self._data_rank, self._data_ranks, self._rows)

    def accumulate(self, token_loss: BatchLoss, batch: Batch, rows: int) -> tuple[Tensor, int]:
        """Accumulates the gradients of the blocks of this rank; the last rank has the loss."""
        del token_loss, rows
        tokens = batch.n_targets
        loss = self._pipeline.step(*self.rows(batch), divide_by=max(tokens, 1))
        self._shards.take_gradients()
        own = loss.total / max(tokens, 1)
        return own if self._pipeline.holds_last else torch.zeros_like(own), tokens

    def norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """The root of the summed squares over all ranks, with each parameter once."""
        elsewhere = self._counted_elsewhere
        norm = gradient_norm([parameter for parameter in parameters if id(parameter) not in elsewhere])
        squares = norm.to(self.mesh.device_type, torch.float64).square()
        dist.all_reduce(squares, group=self.mesh["shard"].get_group())
        dist.all_reduce(squares, group=self.mesh["pipeline"].get_group())
        return squares.sqrt().to(norm.dtype)

    def end_validation(self, model: Decoder) -> None:
        """Frees the gathered parameters of sharded stages, which else keep their values until the next step has ended."""
        del model
        self._pipeline.reshard()

    @cached_property
    def _counted_elsewhere(self) -> set[int]:
        """Parameters that the first rank of the pipeline holds too."""
        if self._pipeline.holds_first:
            return set()
        model = self._pipeline.model
        shared = {id(parameter) for parameter in (*parameters_of_two_ranks(model), *parameters_of_all_ranks(model))}
        return {id(self._shards.parameters[name]) for name, parameter in model.named_parameters() if id(parameter) in shared}


class PipelineLosses:
    """The losses of a pipeline, of which its last rank returns the value and the others 0."""

    def __init__(self, pipeline: Pipeline, dtype: torch.dtype) -> None:
        self._pipeline, self.device, self.dtype = pipeline, pipeline.device, dtype

    def __call__(self, batch: Batch) -> Float[Tensor, ""]:
        """Not there: a pipeline runs its backward passes between its forward passes."""
        raise NotImplementedError("a pipeline accumulates gradients by `Pipelined.accumulate`")

    def evaluate(self, batch: Batch) -> Float[Tensor, ""]:
        """The summed token loss of a batch."""
        return self._of_last(self._pipeline.evaluate(*batch).total)

    def hits(self, batch: Batch) -> Int[Tensor, ""]:
        """The number of targets that are the most likely token."""
        return self._of_last(self._pipeline.evaluate(*batch).correct)

    def _of_last(self, value: Tensor) -> Tensor:
        return value if self._pipeline.holds_last else torch.zeros_like(value)
