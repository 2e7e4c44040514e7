"""A decoder whose parameters, gradients and optimizer state are divided among ranks: FSDP2, one unit per block."""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard

from twoaxis.core.parameters import initial_values
from twoaxis.model import Decoder, DecoderConfig
from twoaxis.train.training_state import tensor_sha256

FORWARD_METHODS = ("loss", "correct")
"""Methods of a decoder that gather its parameters, as calling it does."""


def shard(
    config: DecoderConfig, mesh: DeviceMesh, seed: int, dtype: torch.dtype = torch.float32
) -> tuple[Decoder, dict[str, str]]:
    """Builds a decoder that holds the shards of this rank only, with the initial values of the whole decoder for the seed.

    Gradients are summed over the ranks, not averaged: a loss is divided by the tokens of all of them.

    Cost: of whole parameters, a rank holds one at a time while it draws initial values, and those of a block in a step

    Returns:
        The decoder, and the SHA-256 of every whole parameter by name.
    """
    with torch.device("meta"):
        model = Decoder(config).to(dtype)
    shard_units(model, [(model, model.blocks)], mesh)
    for name in FORWARD_METHODS:
        register_fsdp_forward_method(model, name)
    return model, initialise_shards(model, seed)


def shard_units(
    model: Decoder, roots: Iterable[tuple[nn.Module, Iterable[nn.Module]]], mesh: DeviceMesh, gathers_once: bool = False
) -> None:
    """Shards a decoder, or a part of one, that is on the meta device; the shards have no values yet.

    Args:
        model: all of it.
        roots: modules that are called, each with the blocks in it that are gathered one at a time.
        mesh: `shard`, or `replicate` and `shard`.
        gathers_once: whether blocks stay whole from their first forward pass to the end of the step, as the micro-batches of a
            pipeline want them.
    """
    units = [unit for root, blocks in roots for unit in divide(root, blocks, mesh, gathers_once=gathers_once)]
    model.to_empty(device=_device(mesh))
    for unit in units:
        # Once, so that a shard stays in the memory that the optimizer is given.
        unit.unshard()
        unit.reshard()


def divide(
    root: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008, which is immutable
    gathers_once: bool = False,
) -> list[FSDPModule]:
    """Divides the parameters of a module among ranks, whose gradients are summed, not averaged.

    Args:
        root: the module that is called.
        blocks: the modules in it that are gathered one at a time.
        mesh: of the ranks.
        policy: the precision of computing and reducing; by default that of the parameters.
        gathers_once: as in `shard_units`.

    Returns:
        The blocks and the root.
    """
    # What a block returns is never changed in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": not gathers_once}
    units = [fully_shard(block, **options) for block in blocks]
    # Gathered again for the backward pass like the blocks, so that embedding and head are freed meanwhile.
    units.append(fully_shard(root, **options))
    for unit in units:
        unit.set_gradient_divide_factor(1.0)
        # gloo has no other reduction with a factor.
        unit.set_force_sum_reduction_for_comms(True)
    return units


def local_part(whole: Tensor, placed: DTensor) -> Tensor:
    """The part of a whole tensor that this rank holds of a sharded one."""
    for size, place, rank in zip(placed.device_mesh.shape, placed.placements, _coordinate(placed.device_mesh), strict=True):
        if isinstance(place, Shard):
            parts = whole.chunk(size, place.dim)
            whole = parts[rank] if rank < len(parts) else whole.narrow(place.dim, 0, 0)
    return whole


def local_rows(placed: Tensor) -> tuple[int, int]:
    """The first row that this rank holds of a tensor, sharded or not, and the one behind the last."""
    start, stop = 0, placed.shape[0]
    if isinstance(placed, DTensor):
        for size, place, rank in zip(placed.device_mesh.shape, placed.placements, _coordinate(placed.device_mesh), strict=True):
            if isinstance(place, Shard):
                each = -(-(stop - start) // size)
                start, stop = min(start + rank * each, stop), min(start + (rank + 1) * each, stop)
    return start, stop


class Shards:
    """The shards of this rank as plain parameters, for the optimizer: a step dispatches no distributed tensor.

    Args:
        model: parameters of a decoder by name; those that are not sharded stay as they are.

    Attributes:
        parameters: the local parameters by name; they share memory with those of the model.
    """

    def __init__(self, model: Mapping[str, nn.Parameter]) -> None:
        self._placed = {name: one for name, one in model.items() if isinstance(one, DTensor)}
        local = {
            name: nn.Parameter(_distributed(one.detach()).to_local(), one.requires_grad) for name, one in self._placed.items()
        }
        self.parameters = {**model, **local}

    def take_gradients(self) -> None:
        """Moves the gradients of the model to the local parameters."""
        for name, placed in self._placed.items():
            gradient = placed.grad
            self.parameters[name].grad = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            placed.grad = None

    def place(self, name: str, local: Tensor) -> Tensor:
        """A tensor like the local parameter of this name, such as optimizer state, as the shard of a whole one."""
        if name not in self._placed:
            return local
        placed = self._placed[name]
        return DTensor.from_local(
            local, placed.device_mesh, placed.placements, run_check=False, shape=placed.shape, stride=placed.stride()
        )


def initialise_shards(model: Decoder, seed: int) -> dict[str, str]:
    """Sets the shards of a decoder, or of a part of one, to their initial values for the seed.

    Returns:
        The SHA-256 of every whole parameter by name.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    digests = {}
    with torch.no_grad():
        for parameter, value in initial_values(model, seed):
            placed = _distributed(parameter)
            digests[names[id(parameter)]] = tensor_sha256(value)
            placed.to_local().copy_(local_part(value, placed))
    return digests


def _distributed(parameter: Tensor) -> DTensor:
    assert isinstance(parameter, DTensor), "a parameter of a sharded decoder is no shard"
    return parameter


def _coordinate(mesh: DeviceMesh) -> list[int]:
    found = mesh.get_coordinate()
    assert found is not None, "this rank is outside the mesh"
    return list(found)


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())
