"""One tensor rank of a run: its part of every sublayer, whole or sharded among data ranks, and its part of checkpoints."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from twoaxis.core.parameters import materialize
from twoaxis.data import Batch
from twoaxis.model import Decoder, DecoderConfig
from twoaxis.train.optim import Change, of_wholes
from twoaxis.train.parallel.placement import Losses
from twoaxis.train.parallel.sharded_rank import Sharded
from twoaxis.train.parallel.sharding import FORWARD_METHODS, Held, Shards, local_part, local_rows, shard_units, through_owners
from twoaxis.train.parallel.tensor import TensorDecoder, initial_parts, sum_gradients, summed_chunks
from twoaxis.train.parallel.tensor_ranks import TensorRanks
from twoaxis.train.parallel.tensor_split import Chunk, Split, TensorSplit
from twoaxis.train.recipe import TrainConfig
from twoaxis.train.step import BatchLoss, accumulate_gradients
from twoaxis.train.token_loss import TokenLoss
from twoaxis.train.training_state import tensor_sha256


class TensorSharded(Sharded):
    """A rank that computes its part of every sublayer; the ranks with the same part may divide its parameters and the rows."""

    def build(self, config: TrainConfig, decoder: DecoderConfig, device: torch.device) -> Decoder:
        """Builds the part of this rank, and its shards of that."""
        mesh = self.mesh["tensor"]
        self._tensor = TensorRanks(mesh.get_group(), mesh.get_local_rank(), mesh.size(), config.parallel.sequence)
        tokens = config.data.seq_len
        if self._data_ranks == 1:
            model = materialize(lambda: TensorDecoder(decoder, self._tensor, tokens), device)
        else:
            with torch.device("meta"):
                model = TensorDecoder(decoder, self._tensor, tokens)
            shard_units(model, [(model, model.blocks)], self.data_mesh)
            for name in FORWARD_METHODS:
                register_fsdp_forward_method(model, name)
        self._splits, parameters = model.splits, dict(model.named_parameters())
        split = TensorSplit(decoder, mesh.size())
        self._every_split = [split.splits(rank) for rank in range(mesh.size())]
        with torch.no_grad():
            for name, whole, part in initial_parts(model, config.seed):
                self.initial_sha256[name] = tensor_sha256(whole)
                one = parameters[name]
                held = one.to_local() if isinstance(one, DTensor) else one
                held.copy_(local_part(part, one) if isinstance(one, DTensor) else part)
        return model

    def whole(self, model: Decoder) -> Decoder:
        """The decoder without memory."""
        with torch.device("meta"):
            return Decoder(model.config)

    def losses(self, model: Decoder, config: TrainConfig) -> Losses:
        """The losses that this rank adds to those of the others."""
        return TensorLosses(TokenLoss(model, config), self._counts)

    @property
    def _counts(self) -> bool:
        """Whether the losses of this rank are no copies of those of another."""
        return self._tensor.sequence == "tensor" or self._tensor.rank == 0

    def _own(self, parameters: Mapping[str, nn.Parameter]) -> Shards:
        shards = TensorShards(parameters, self._splits)
        self._summed = summed_chunks(self._splits, self._tensor.sequence, shards.rows)
        self._chunks = {id(one): shards.chunks[name] for name, one in shards.parameters.items()}
        return shards

    def accumulate(self, token_loss: BatchLoss, batch: Batch, rows: int) -> tuple[Tensor, int]:
        """Accumulates the gradients of the shards, which are sums over all ranks."""
        assert isinstance(token_loss, TensorLosses)
        loss, tokens = accumulate_gradients(token_loss.loss, self.rows(batch), rows, batch.n_targets)
        self._shards.take_gradients()
        parameters = self._shards.parameters.items()
        gradients = {name: parameter.grad for name, parameter in parameters if parameter.grad is not None}
        sum_gradients(gradients, self._summed, self._tensor)
        return loss if self._counts else torch.zeros_like(loss), tokens

    def _of_gathered(self, held: Mapping[str, Tensor], change: Change) -> Iterable[tuple[str, Tensor]]:
        splits = {name: [every[name] for every in self._every_split] for name in held}
        parts = {name: (each[0].shape, [Held(one.local_shape, one.chunks()) for one in each]) for name, each in splits.items()}
        group = self.mesh["tensor"].get_group()
        return through_owners(held, parts, group, lambda wholes: of_wholes(wholes, change))

    def norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """The root of the summed squares over the ranks that divide a parameter, with each entry once."""
        by_copies: dict[int, list[Tensor]] = {}
        for parameter in parameters:
            for chunk in self._chunks[id(parameter)] if parameter.grad is not None else ():
                by_copies.setdefault(chunk.copies, []).append(chunk.of(cast(Tensor, parameter.grad)))
        squares = parameters[0].new_zeros((), dtype=torch.float64)
        for copies, gradients in by_copies.items():
            squares = squares + nn.utils.get_total_norm(gradients).double().square() / copies
        dist.all_reduce(squares, group=self.mesh["shard"].get_group())
        dist.all_reduce(squares, group=self._tensor.group)
        return squares.sqrt().to(parameters[0].dtype)


class TensorLosses:
    """The losses of a tensor rank; 0 where another rank has the same, since those of all ranks are added."""

    def __init__(self, loss: TokenLoss, counts: bool) -> None:
        self.loss, self._counts, self.device, self.dtype = loss, counts, loss.device, loss.dtype

    def __call__(self, batch: Batch) -> Float[Tensor, ""]:
        """The sum of the token losses of the batch in nats, with its graph."""
        return self.loss(batch)

    def evaluate(self, batch: Batch) -> Float[Tensor, ""]:
        """The same sum without gradients."""
        return self._own(self.loss.evaluate(batch))

    def hits(self, batch: Batch) -> Int[Tensor, ""]:
        """The number of targets that are the most likely token."""
        return self._own(self.loss.hits(batch))

    def _own(self, value: Tensor) -> Tensor:
        return value if self._counts else torch.zeros_like(value)


class TensorShards(Shards):
    """The shards of this rank as plain parameters.

    Attributes:
        rows: the rows that they are of what the tensor rank holds, by name.
        chunks: where they are in whole parameters, by name.
    """

    def __init__(self, model: Mapping[str, nn.Parameter], splits: Mapping[str, Split]) -> None:
        super().__init__(model)
        self._splits = splits
        self.rows = {name: local_rows(one) for name, one in model.items()}
        self.chunks = {name: splits[name].chunks(*rows) for name, rows in self.rows.items()}

    def place(self, name: str, local: Tensor) -> Tensor:
        """A tensor like the local parameter of this name as parts of a whole one."""
        return Parts(local, self._splits[name].shape, self.chunks[name])


class Parts(Tensor):
    """Boxes of a whole tensor in the memory of one local tensor, as torch.distributed.checkpoint reads and writes them."""

    local: Tensor
    chunks: Sequence[Chunk]

    @staticmethod
    def __new__(cls, local: Tensor, shape: torch.Size, chunks: Sequence[Chunk]) -> "Parts":
        """A tensor with the whole shape and no memory of its own."""
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        made.local, made.chunks = local, chunks
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Nothing is computed with it."""
        raise NotImplementedError(f"{function} of parts of a tensor; use those of its shard")

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(chunk.there), torch.Size(chunk.sizes)) for chunk in self.chunks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(chunk.of(self.local) for chunk in self.chunks if torch.Size(chunk.there) == index.offset)
