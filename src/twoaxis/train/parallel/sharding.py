"""A decoder whose parameters, gradients and optimizer state are divided among ranks: FSDP2, one unit per block."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard

from twoaxis.core.parameters import initial_values
from twoaxis.model import Decoder, DecoderConfig
from twoaxis.train.parallel.tensor_split import Chunk
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
        shapes: of all rows, by name.
    """

    def __init__(self, model: Mapping[str, nn.Parameter]) -> None:
        self._placed = {name: one for name, one in model.items() if isinstance(one, DTensor)}
        local = {
            name: nn.Parameter(_distributed(one.detach()).to_local(), one.requires_grad) for name, one in self._placed.items()
        }
        self.parameters = {**model, **local}
        self.shapes = {name: one.shape for name, one in model.items()}

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


class Held(NamedTuple):
    """What one rank holds of a whole tensor: a tensor of this shape, made of these boxes."""

    shape: tuple[int, ...]
    chunks: Sequence[Chunk]

    @staticmethod
    def rows(shape: Sequence[int], rank: int, ranks: int) -> "Held":
        """The rows of a rank, as FSDP2 divides them."""
        each = -(-shape[0] // ranks)
        start, stop = (min(place * each, shape[0]) for place in (rank, rank + 1))
        own, zeros = (stop - start, *shape[1:]), (0,) * (len(shape) - 1)
        return Held(own, [Chunk((0, *zeros), (start, *zeros), own, 1)] if stop > start else [])


def through_owners(
    held: Mapping[str, Tensor],
    everywhere: Mapping[str, tuple[Sequence[int], Sequence[Held]]],
    group: dist.ProcessGroup,
    change: Callable[[Mapping[str, Tensor]], Iterable[tuple[str, Tensor]]],
) -> Iterator[tuple[str, Tensor]]:
    """Yields, by name, what this rank holds of whole tensors that have been changed, each by one rank that gathers it.

    The ranks own the tensors in turns, so each computes its share of the changes, and has memory for its share of the wholes.

    Cost: each number of a tensor is sent to its owner and back

    Args:
        held: by this rank, in the same order on all.
        everywhere: by name the shape of the whole, and what each rank of the group holds.
        group: the ranks that hold the parts.
        change: from the wholes that this rank owns to changed ones of the same shape.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if ranks == 1:
        yield from change(held)
        return
    owners = {name: number % ranks for number, name in enumerate(held)}
    wholes: dict[str, Tensor] = {}
    for name, part in held.items():
        shape, parts = everywhere[name]
        own = part.new_zeros(max(torch.Size(one.shape).numel() for one in parts))
        own[: part.numel()] = part.flatten()
        received = [torch.empty_like(own) for _ in parts] if owners[name] == rank else None
        dist.gather(own, received, group=group, group_dst=owners[name])
        if received is not None:
            wholes[name] = part.new_empty(torch.Size(shape))
            for one, flat in zip(parts, received, strict=True):
                for chunk in one.chunks:
                    chunk.of_whole(wholes[name]).copy_(chunk.of(_as_held(flat, one)))
    changed = dict(change(wholes))
    for name, part in held.items():
        parts = everywhere[name][1]
        own = part.new_empty(max(torch.Size(one.shape).numel() for one in parts))
        sent = [torch.zeros_like(own) for _ in parts] if owners[name] == rank else None
        for one, flat in zip(parts, sent, strict=True) if sent is not None else ():
            for chunk in one.chunks:
                chunk.of(_as_held(flat, one)).copy_(chunk.of_whole(changed[name]))
        dist.scatter(own, sent, group=group, group_src=owners[name])
        yield name, own[: part.numel()].view_as(part)


def _as_held(flat: Tensor, held: Held) -> Tensor:
    return flat[: torch.Size(held.shape).numel()].view(held.shape)


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
