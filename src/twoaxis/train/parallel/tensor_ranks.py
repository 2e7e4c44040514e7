"""What tensor ranks exchange inside of a forward and a backward pass.

Letters: n tensor ranks, B batch, T tokens of a row, t = T / n, E numbers of a token.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

from twoaxis.train.parallel.tensor_split import SequenceSharding


@dataclass(frozen=True, eq=False)
class TensorRanks:
    """The processes that divide every sublayer.

    Attributes:
        group: the processes; None means all.
        rank: of this process among them.
        count: n.
        sequence: whether streams are whole on every rank (`none`), or have the tokens of a rank only (`tensor`).
    """

    group: dist.ProcessGroup | None
    rank: int
    count: int
    sequence: SequenceSharding

    def own(self, rows: Tensor) -> Tensor:
        """The tokens [B t] of this rank from whole rows [B T]; whole rows with sequence `none`."""
        return rows if self.sequence == "none" else rows.chunk(self.count, dim=1)[self.rank]

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in memory of its own."""
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total

    def gather(self, x: Float[Tensor, "B t E"]) -> Float[Tensor, "B T E"]:
        """The tokens of all ranks."""
        x = x.contiguous()
        every = x.new_empty((self.count * len(x), *x.shape[1:]))
        dist.all_gather_single(every, x, group=self.group)
        return every.unflatten(0, (self.count, -1)).movedim(0, 1).flatten(1, 2)

    def sum_and_scatter(self, x: Float[Tensor, "B T E"]) -> Float[Tensor, "B t E"]:
        """The sum over the ranks, of the tokens of this one."""
        parts = x.unflatten(1, (self.count, -1)).movedim(1, 0).contiguous()
        own = torch.empty_like(parts[0])
        dist.reduce_scatter_single(own, parts.flatten(0, 1), group=self.group)
        return own

    def pass_on(self, x: Tensor, step: int) -> Tensor:
        """Sends a tensor to the rank `step` further, and returns what comes from the other side: zeros at the end."""
        found, exchanges = torch.zeros_like(x), []
        if 0 <= self.rank + step < self.count:
            exchanges.append(dist.P2POp(dist.isend, x, group=self.group, group_peer=self.rank + step))
        if 0 <= self.rank - step < self.count:
            exchanges.append(dist.P2POp(dist.irecv, found, group=self.group, group_peer=self.rank - step))
        for work in dist.batch_isend_irecv(exchanges) if exchanges else ():
            work.wait()
        return found


def copied(x: Tensor, ranks: TensorRanks) -> Tensor:
    """The same tensor for a part of a sublayer on each rank; its gradient is the sum over the ranks."""
    return _Exchange.apply(x, _same, ranks.sum)


def summed(x: Tensor, ranks: TensorRanks) -> Tensor:
    """The sum over the ranks, which all go on with."""
    return _Exchange.apply(x, ranks.sum, _same)


def gathered(x: Float[Tensor, "B t E"], ranks: TensorRanks) -> Float[Tensor, "B T E"]:
    """The tokens of all ranks for a part of a sublayer on each; the gradient is summed and scattered."""
    return _Exchange.apply(x, ranks.gather, ranks.sum_and_scatter)


def scattered_sum(x: Float[Tensor, "B T E"], ranks: TensorRanks) -> Float[Tensor, "B t E"]:
    """The sum over the ranks, of the tokens of each; the gradient is gathered."""
    return _Exchange.apply(x, ranks.sum_and_scatter, ranks.gather)


def from_previous(state: Any, tokens: int, ranks: TensorRanks) -> tuple[Any, Any]:
    """The same state, whose gradient includes that of the next rank, and the last tokens of the state of the rank before.

    The first rank gets zeros.
    """
    leaves, structure = tree_flatten(state)
    found = _FromPrevious.apply(tokens, ranks, *leaves)
    own, before = found[: len(leaves)], found[len(leaves) :]
    return tree_unflatten(own, structure), tree_unflatten(before, structure)


@contextmanager
def saving_parts(parts: Iterable[Tensor], wholes: Iterable[Tensor], ranks: TensorRanks) -> Iterator[None]:
    """Saves for the backward pass, in the place of gathered tokens, those of this rank, and gathers them again there."""
    known = {_address(whole): _Again(part.detach(), ranks) for part, whole in zip(parts, wholes, strict=True)}

    def pack(saved: Tensor) -> Any:
        again = known.get(_address(saved))
        return saved if again is None else (again, saved.shape, saved.stride(), saved.storage_offset())

    with saved_tensors_hooks(pack, _unpack):
        yield


class _Again:
    """Gathers the tokens of all ranks once more, when they are first asked for."""

    def __init__(self, part: Tensor, ranks: TensorRanks) -> None:
        self._part, self._ranks, self._whole = part, ranks, None

    def whole(self) -> Tensor:
        if self._whole is None:
            self._whole = self._ranks.gather(self._part)
        return self._whole


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    again, *place = packed
    return again.whole().as_strided(*place)


def _last(x: Tensor, tokens: int) -> Tensor:
    # Counted from the front: from the end, no tokens would be all of them.
    return x[:, x.shape[1] - tokens :]


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


class _Exchange(torch.autograd.Function):
    """One exchange in the forward pass, and its transpose in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.of_gradients = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.of_gradients(gradients[0]), None, None


class _FromPrevious(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: int, ranks: TensorRanks, *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.tokens, ctx.ranks = tokens, ranks
        before = ranks.pass_on(torch.stack([_last(leaf, tokens) for leaf in leaves]), 1)
        return *(leaf.view_as(leaf) for leaf in leaves), *before.unbind()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        half = len(gradients) // 2
        returned = ctx.ranks.pass_on(torch.stack(gradients[half:]), -1)
        own = [gradient.clone() for gradient in gradients[:half]]
        for gradient, more in zip(own, returned.unbind(), strict=True):
            _last(gradient, ctx.tokens).add_(more)
        return None, None, *own
