"""One rank of a sharded run: its shards of every parameter, its rows of every batch, its part of every checkpoint."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from twoaxis.data import Batch
from twoaxis.model import Decoder, DecoderConfig
from twoaxis.train.optim import Change, ParameterGroup
from twoaxis.train.parallel.placement import Placement
from twoaxis.train.parallel.ranks import Ranks
from twoaxis.train.parallel.sharded_checkpoint import newest_intact, read_into, read_scalars, save_shards, stored_tensors
from twoaxis.train.parallel.sharding import Held, Shards, shard, through_owners
from twoaxis.train.recipe import TrainConfig
from twoaxis.train.step import BatchLoss, accumulate_gradients, gradient_norm
from twoaxis.train.training_state import compare, compare_names


class Sharded(Placement):
    """A rank of several, each with its shards of every parameter and its rows of every batch."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(ranks)
        assert ranks.mesh is not None
        self.mesh = ranks.mesh
        replicate, self._shard_ranks = self.mesh.size(1), self.mesh.size(2)
        self._data_ranks = replicate * self._shard_ranks
        place = self.mesh.get_coordinate()
        assert place is not None
        self._writers = ranks.apart()
        self._data_rank = place[1] * self._shard_ranks + place[2]

    @property
    def data_mesh(self) -> DeviceMesh:
        """The ranks that divide the rows of a batch."""
        return self.mesh["shard"] if self.mesh.size(1) == 1 else self.mesh["replicate", "shard"]

    def build(self, config: TrainConfig, decoder: DecoderConfig, device: torch.device) -> Decoder:
        """Builds the shards of this rank."""
        del device
        model, self.initial_sha256 = shard(decoder, self.data_mesh, config.seed)
        return model

    def local(self, groups: Iterable[ParameterGroup], model: Decoder) -> list[ParameterGroup]:
        """The groups with the shards of this rank as plain parameters."""
        groups, here = list(groups), dict(model.named_parameters())
        for group in groups:
            for name in here.keys() & group.parameters.keys():
                here[name].requires_grad_(here[name].requires_grad and group.lr_scale > 0)
        self._shards = self._own(here)
        own = self._shards.parameters
        return [replace(group, parameters={name: own[name] for name in group.parameters if name in own}) for group in groups]

    def _own(self, parameters: Mapping[str, nn.Parameter]) -> Shards:
        return Shards(parameters)

    def rows(self, batch: Batch) -> Batch:
        """An equal part of the rows; what is missing of it is filled with rows without a target."""
        return batch.part(self._data_rank, self._data_ranks)

    def accumulate(self, token_loss: BatchLoss, batch: Batch, rows: int) -> tuple[Tensor, int]:
        """Accumulates the gradients of the shards, which are sums over all ranks."""
        found = accumulate_gradients(token_loss, self.rows(batch), rows, batch.n_targets)
        self._shards.take_gradients()
        return found

    def norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """The root of the summed squares over the ranks that divide a parameter."""
        norm = gradient_norm(parameters)
        # A rank whose shards are all empty has its norm on the CPU.
        squares = norm.to(self.mesh.device_type, torch.float64).square()
        dist.all_reduce(squares, group=self.mesh["shard"].get_group())
        return squares.sqrt().to(norm.dtype)

    def of_wholes(self, held: Mapping[str, Tensor], change: Change) -> Iterable[tuple[str, Tensor]]:
        """Has the ranks that divide a parameter change whole tensors in turns."""
        parts = {name: self._row_parts(shape) for name, shape in self._shards.shapes.items() if name in held}
        group = self.mesh["shard"].get_group()
        return through_owners(held, parts, group, lambda wholes: self._of_gathered(wholes, change))

    def _row_parts(self, shape: Sequence[int]) -> tuple[Sequence[int], list[Held]]:
        return shape, [Held.rows(shape, rank, self._shard_ranks) for rank in range(self._shard_ranks)]

    def _of_gathered(self, held: Mapping[str, Tensor], change: Change) -> Iterable[tuple[str, Tensor]]:
        """The changed tensors of a rank that holds all rows."""
        return super().of_wholes(held, change)

    def checkpoint(
        self,
        folder: Path,
        step: int,
        model: Decoder,
        optimizer: torch.optim.Optimizer,
        state: Any,
        keep: int,
        copied: bool = False,
    ) -> Callable[[], None]:
        """Returns what writes the parts of all ranks as one checkpoint."""
        del model
        kept = (lambda tensor: tensor.clone()) if copied else (lambda tensor: tensor)
        own = self._shards.parameters.items()
        tensors = {name: self._shards.place(name, kept(parameter.detach())) for name, parameter in own}
        steps: dict[str, float] = {}
        for name, parameter in own:
            for kind, value in optimizer.state.get(parameter, {}).items():
                if value.ndim:
                    tensors[f"{kind}/{name}"] = self._shards.place(name, kept(value))
                else:
                    steps[name] = float(value)
        every = {name: taken for found in self.ranks.gather(steps) for name, taken in found.items()}
        return lambda: save_shards(folder, step, tensors, {**state, "optimizer_steps": every}, keep, self._writers)

    def restore(
        self, folder: Path, model: Decoder, optimizer: torch.optim.Optimizer, say: Callable[[str], None]
    ) -> tuple[int, dict[str, Any]] | None:
        """Reads the parts of this rank, whatever the layout that wrote the checkpoint."""
        found = newest_intact(folder, self.ranks, say)
        if found is None:
            return None
        path, state = found
        stored = stored_tensors(path)
        own = self._shards.parameters
        tensors = {name: self._shards.place(name, one.detach()) for name, one in own.items()}
        everywhere = {name: None for names in self.ranks.gather(list(tensors)) for name in names}
        compare_names(everywhere, {name: one for name, one in stored.items() if "/" not in name})
        optimizer.state.clear()
        for key, whole in stored.items() if "sampler" in state else ():
            kind, is_state, name = key.partition("/")
            if is_state and len(whole.size) and name in own:
                fresh = torch.empty_like(own[name], dtype=whole.properties.dtype, requires_grad=False)
                optimizer.state[own[name]][kind], tensors[key] = fresh, self._shards.place(name, fresh)
        for name, tensor in tensors.items():
            there = torch.empty(stored[name].size, dtype=stored[name].properties.dtype, device="meta")
            compare("optimizer state" if "/" in name else "parameter", name, there, tensor)
        read_into(path, tensors)
        for key, taken in state.get("optimizer_steps", read_scalars(path)).items():
            name = key.removeprefix("step/")
            if name in own:
                device = own[name].device if optimizer.defaults["fused"] else "cpu"
                optimizer.state[own[name]]["step"] = torch.tensor(float(taken), device=device)
        return state["step"], state
