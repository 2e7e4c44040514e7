"""One rank of a sharded run: its shards of every parameter, its rows of every batch, its part of every checkpoint."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from twoaxis.data import Batch
from twoaxis.model import Decoder, DecoderConfig
from twoaxis.train.optim import ParameterGroup
from twoaxis.train.parallel.placement import Placement
from twoaxis.train.parallel.sharded_checkpoint import newest_intact, read_into, read_scalars, save_shards, stored_tensors
from twoaxis.train.parallel.sharding import Shards, shard
from twoaxis.train.training_state import compare, compare_names


class Sharded(Placement):
    """A rank of several, each with its shards of every parameter and its rows of every batch."""

    def build(self, config: DecoderConfig, seed: int, device: torch.device) -> Decoder:
        """Builds the shards of this rank."""
        del device
        assert self.ranks.mesh is not None
        model, self.initial_sha256 = shard(config, self.ranks.mesh, seed)
        return model

    def local(self, groups: Iterable[ParameterGroup]) -> list[ParameterGroup]:
        """The groups with the shards of this rank as plain parameters."""
        groups = list(groups)
        for group in groups:
            for parameter in group.parameters.values():
                parameter.requires_grad_(parameter.requires_grad and group.lr_scale > 0)
        self._shards = Shards({name: parameter for group in groups for name, parameter in group.parameters.items()})
        own = self._shards.parameters
        return [replace(group, parameters={name: own[name] for name in group.parameters}) for group in groups]

    def rows(self, batch: Batch) -> Batch:
        """An equal part of the rows; what is missing of it is filled with rows without a target."""
        return batch.part(self.ranks.rank, self.ranks.count)

    def take_gradients(self) -> None:
        """Moves the gradients of the shards to the local parameters."""
        self._shards.take_gradients()

    def end_validation(self, model: Decoder) -> None:
        """Frees the parameters of the root, which else stay as they are until a backward pass, whatever becomes of the shards."""
        assert isinstance(model, FSDPModule)
        model.reshard()

    def whole_norm(self, norm: Tensor) -> Tensor:
        """The root of the summed squares over the ranks that divide a parameter."""
        assert self.ranks.mesh is not None
        squares = norm.double().square()
        dist.all_reduce(squares, group=self.ranks.mesh["shard"].get_group())
        return squares.sqrt().to(norm.dtype)

    def save(self, folder: Path, step: int, model: Decoder, optimizer: torch.optim.Optimizer, state: Any, keep: int) -> None:
        """Writes the shards of all ranks as one checkpoint."""
        tensors: dict[str, Tensor] = {name: parameter.detach() for name, parameter in model.named_parameters()}
        steps: dict[str, float] = {}
        for name, parameter in self._shards.parameters.items():
            for kind, value in optimizer.state.get(parameter, {}).items():
                if value.ndim:
                    tensors[f"{kind}/{name}"] = self._shards.place(name, value)
                else:
                    steps[name] = float(value)
        save_shards(folder, step, tensors, {**state, "optimizer_steps": steps}, keep, self.ranks)

    def restore(
        self, folder: Path, model: Decoder, optimizer: torch.optim.Optimizer, say: Callable[[str], None]
    ) -> tuple[int, dict[str, Any]] | None:
        """Reads the shards of this rank, whatever the number of processes that wrote the checkpoint."""
        found = newest_intact(folder, self.ranks, say)
        if found is None:
            return None
        path, state = found
        stored = stored_tensors(path)
        tensors: dict[str, Tensor] = {name: parameter.detach() for name, parameter in model.named_parameters()}
        compare_names(tensors, {name: one for name, one in stored.items() if "/" not in name})
        optimizer.state.clear()
        for key, whole in stored.items() if "sampler" in state else ():
            kind, is_state, name = key.partition("/")
            if is_state and len(whole.size):
                parameter = self._shards.parameters[name]
                optimizer.state[parameter][kind] = fresh = torch.empty_like(parameter, dtype=whole.properties.dtype)
                tensors[key] = self._shards.place(name, fresh)
        for name, tensor in tensors.items():
            there = torch.empty(stored[name].size, dtype=stored[name].properties.dtype, device="meta")
            compare("optimizer state" if "/" in name else "parameter", name, there, tensor)
        read_into(path, tensors)
        for name, taken in state.get("optimizer_steps", read_scalars(path)).items():
            parameter = self._shards.parameters[name.removeprefix("step/")]
            device = parameter.device if optimizer.defaults["fused"] else "cpu"
            optimizer.state[parameter]["step"] = torch.tensor(float(taken), device=device)
        return state["step"], state
