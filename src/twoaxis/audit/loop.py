"""The contract loop, open at every step: a pass that can be watched, changed, and begun at any sublayer.

Letters: B batch, T position, D width.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._pytree import tree_map

from twoaxis.core.errors import ConfigError
from twoaxis.core.layout import TokenLayout
from twoaxis.core.views import Views
from twoaxis.data import Batch
from twoaxis.model import Decoder
from twoaxis.model.trace import sublayer_list
from twoaxis.ops.cross_entropy import linear_cross_entropy


class Written(NamedTuple):
    """What one sublayer has done.

    Attributes:
        before: the state that it read from.
        state: the same, with what its attention has added to it, which it wrote to.
        update: what it wrote.
        context: what the update was made from.
        carry: what its read handed to its write.
        following: the state that it left.
    """

    before: Any
    state: Any
    update: Tensor
    context: Views
    carry: Any
    following: Any


class Probe:
    """What watches or changes a pass; this base does neither.

    Attributes:
        first: the first sublayer that it may change something at.
    """

    first = 0

    def state(self, index: int, state: Any) -> Any:
        """Before a sublayer, or before the final read: returns the state to go on with."""
        return state

    def read(self, index: int, state: Any, views: Views, carry: Any) -> tuple[Views, Any]:
        """Behind a read: returns what the sublayer sees, and the carry."""
        return views, carry

    def update(self, index: int, update: Tensor) -> Tensor:
        """Behind a mixer: returns the update to write."""
        return update

    def written(self, index: int, written: Written) -> Any:
        """Behind a write: returns the state to go on with."""
        return written.following

    def left(self, state: Any, left: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Behind the final read: returns what the final norm sees."""
        return left


class Sample(NamedTuple):
    """A batch with the layout that its passes share."""

    batch: Batch
    layout: TokenLayout

    @staticmethod
    def of(batch: Batch) -> "Sample":
        """Lays out the documents of a batch."""
        if batch.documents is None:
            return Sample(batch, TokenLayout.contiguous(batch.tokens.shape[1]))
        return Sample(batch, TokenLayout.packed(batch.documents))


def run_pass(model: Decoder, sample: Sample, probe: Probe, states: list[Any] | None = None) -> Float[Tensor, "B T D"]:
    """Runs a model by its contract and returns what its head sees.

    Args:
        model: any decoder.
        sample: what to read.
        probe: watches or changes the pass.
        states: before each sublayer, from an earlier pass; the pass then begins at `probe.first`.
    """
    layout = sample.layout
    begin, state, ends = 0, None, None
    if states is None:
        state, ends = model.ends.enter(model.embed(sample.batch.tokens), layout)
    else:
        begin, state = probe.first, states[probe.first]
    sublayers = sublayer_list(model)
    for index in range(begin, len(sublayers)):
        sublayer = sublayers[index]
        state = probe.state(index, state)
        views, carry, _ = sublayer.depth.read(state, layout)
        views, carry = probe.read(index, state, views, carry)
        context = sublayer.normalise(views)
        update, mixed, _ = sublayer.mix(context, state, layout)
        update = probe.update(index, update)
        following = sublayer.depth.write(mixed, update, context, carry)
        state = probe.written(index, Written(state, mixed, update, context, carry, following))
    state = probe.state(len(sublayers), state)
    left, _ = model.ends.leave(state, layout, ends)
    return model.norm(probe.left(state, left))


@torch.no_grad()
def sequence_losses(model: Decoder, hidden: Float[Tensor, "B T D"], batch: Batch) -> Float[Tensor, " B"]:
    """The summed loss of each sequence, in nats and float64."""
    rows = zip(hidden, batch.targets, strict=True)
    return torch.stack([linear_cross_entropy(row, model.head_weight, targets) for row, targets in rows]).double()


@torch.no_grad()
def check_loop(model: Decoder, sample: Sample) -> None:
    """Verifies that an untouched pass is the model itself, bit for bit.

    Raises:
        ConfigError: a model that does not follow the contract, so that no ablation of it would mean anything.
    """
    tokens, targets, documents = sample.batch
    own, _ = model.loss(tokens, targets, None if documents is None else TokenLayout.packed(documents))
    hidden = run_pass(model, sample, Probe())
    here = linear_cross_entropy(hidden.flatten(0, 1), model.head_weight, targets.flatten())
    if not torch.isfinite(own):
        raise ConfigError(f"the model's loss is {own.item()}: must be finite to be audited; audit an earlier run")
    if not torch.equal(own, here):
        raise ConfigError(
            f"depth mixer {model.config.depth.kind!r}: its reads and writes give a loss of {here.item()!r}, the model "
            f"{own.item()!r}: must be equal; report it to the author of the mixer"
        )


def replace_tensor(tree: Any, old: Tensor, make: Callable[[], Tensor]) -> tuple[Any, bool]:
    """Puts a tensor in the place of this very one wherever a nested value holds it, and says whether it does."""
    new: list[Tensor] = []

    def swap(leaf: Any) -> Any:
        if leaf is not old:
            return leaf
        if not new:
            new.append(make())
        return new[0]

    return tree_map(swap, tree), bool(new)
