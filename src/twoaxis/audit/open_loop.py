"""The read/write loop of the depth contract with callbacks: a pass that can be observed, changed, and started at any sublayer.

Letters: B batch, T position, D width.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._pytree import tree_map

from twoaxis.core.errors import ConfigError
from twoaxis.core.layout import TokenLayout
from twoaxis.core.views import Views
from twoaxis.data import Batch
from twoaxis.depth.base import Mix
from twoaxis.model import Decoder
from twoaxis.model.trace import sublayer_list
from twoaxis.ops.cross_entropy import linear_cross_entropy


class Written(NamedTuple):
    """The values of one sublayer after its write.

    Attributes:
        before: the state that it read.
        state: the state that it wrote to, which includes changes by head mixing.
        update: of its mixer.
        context: input of its mixer.
        carry: from its read to its write.
        next_state: result of its write.
    """

    before: Any
    state: Any
    update: Tensor
    context: Views
    carry: Any
    next_state: Any


class Probe:
    """Callbacks that observe or change a pass; the base class does neither.

    Attributes:
        first: the first sublayer at which it may change something.
    """

    first = 0

    def state(self, index: int, state: Any) -> Any:
        """Called before a sublayer and before the final read; returns the state to continue with."""
        return state

    def read(self, index: int, state: Any, views: Views, carry: Any) -> tuple[Views, Any]:
        """Called after a read; returns views and carry to continue with."""
        return views, carry

    def mixed(self, index: int, mix: Mix) -> Mix:
        """Called where heads are mixed; returns the heads and the state to continue with."""
        return mix

    def update(self, index: int, update: Tensor) -> Tensor:
        """Called after a mixer; returns the update to write."""
        return update

    def written(self, index: int, written: Written) -> Any:
        """Called after a write; returns the state to continue with."""
        return written.next_state

    def left(self, state: Any, left: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Called after the final read; returns the input of the final norm."""
        return left


class Sample(NamedTuple):
    """A batch with its token layout."""

    batch: Batch
    layout: TokenLayout

    @staticmethod
    def of(batch: Batch) -> "Sample":
        """Makes the layout from the documents of a batch."""
        if batch.documents is None:
            return Sample(batch, TokenLayout.contiguous(batch.tokens.shape[1]))
        return Sample(batch, TokenLayout.packed(batch.documents))


def run_pass(model: Decoder, sample: Sample, probe: Probe, states: list[Any] | None = None) -> Float[Tensor, "B T D"]:
    """Runs a model by the depth contract, and returns the input of its head.

    Args:
        model: any decoder.
        sample: the input.
        probe: observes or changes the pass.
        states: before each sublayer, from an earlier pass; the pass then starts at `probe.first`.
    """
    layout = sample.layout.of(sample.batch.tokens)
    begin, state, ends = 0, None, None
    if states is None:
        embeddings, _ = model.mix_embeddings(model.embed(sample.batch.tokens), layout)
        state, ends = model.ends.enter(embeddings, layout)
    else:
        begin, state = probe.first, states[probe.first]
    sublayers = sublayer_list(model)
    for index in range(begin, len(sublayers)):
        sublayer = sublayers[index]
        state = probe.state(index, state)
        views, carry, _ = sublayer.depth.read(state, layout)
        views, carry = probe.read(index, state, views, carry)
        context = sublayer.normalise(views)
        update, mixed, _ = sublayer.mix(context, state, layout, seen=partial(probe.mixed, index))
        update = probe.update(index, update)
        next_state = sublayer.depth.write(mixed, update, context, carry)
        state = probe.written(index, Written(state, mixed, update, context, carry, next_state))
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
    """Verifies that an unchanged pass equals the model bit for bit.

    Raises:
        ConfigError: the model does not follow the contract, so that ablations would be meaningless.
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
    """Replaces a tensor, by identity, in a nested value; returns also whether it was found."""
    new: list[Tensor] = []

    def swap(leaf: Any) -> Any:
        if leaf is not old:
            return leaf
        if not new:
            new.append(make())
        return new[0]

    return tree_map(swap, tree), bool(new)
