"""Ablations: passes with one component removed, or as a control perturbed at random by the same norm.

Letters: B batch, T position, D width, E width of the changed value, C channels of a local mixer.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from twoaxis.audit.observe import Means, Observer, local_mixers, n_pieces
from twoaxis.audit.open_loop import Probe, Written, replace_tensor
from twoaxis.audit.result import Choice, Replacement, Routing, What
from twoaxis.core.errors import ConfigError
from twoaxis.core.measure import noise
from twoaxis.core.views import Views, WeightedSum
from twoaxis.depth.base import Mix, Read, Write
from twoaxis.depth.streams import ParallelEnds
from twoaxis.model import Decoder
from twoaxis.model.trace import sublayer_list
from twoaxis.ops.streams import piece_names

EMBEDDING = "embedding"


class Removal(Probe):
    """Removes a component in a pass, or as a control perturbs it in a random direction by the same norm.

    Args:
        sublayer: its position.
        target: its name.
        mean: its replacement; None is zero.

    Attributes:
        what: the kind of component.
        choice: of a source: `favourite` or `random`.
        sizes: the norm of the change of each token.
        direction: seed of the random direction of a control; None removes the component.
    """

    what: What
    choice: Choice = ""

    def __init__(self, sublayer: int, target: str, mean: Float[Tensor, " E"] | None = None) -> None:
        self.first = self.sublayer = sublayer
        self.target, self.mean = target, mean
        self.sizes = Means()
        self.direction: str | None = None

    @property
    def replacement(self) -> Replacement:
        """The kind of replacement."""
        return "zero" if self.mean is None else "mean"

    def instead(self, value: Float[Tensor, "B T E"]) -> Float[Tensor, "B T E"]:
        """The replacement of a value."""
        return torch.zeros_like(value) if self.mean is None else self.mean.to(value.dtype).expand_as(value)

    def changed(self, before: Float[Tensor, "B T *E"], after: Float[Tensor, "B T *E"], where: str = "") -> Tensor:
        """Returns the removed value `after`, or as a control `before` with a random change of the same norm."""
        size = torch.linalg.vector_norm((after - before).flatten(2), dim=-1, keepdim=True)
        if self.direction is None:
            self.sizes["change"].add(size)
            return after
        drawn = noise(tuple(before.shape), f"{self.direction}/{where}").to(before.dtype).flatten(2)
        return before + (size * drawn / torch.linalg.vector_norm(drawn, dim=-1, keepdim=True)).view_as(before)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Hooks into modules for one pass."""
        yield


class UpdateRemoval(Removal):
    """Removes the update of one sublayer; extra channels for the depth mixer stay."""

    what = "sublayer"

    def __init__(self, sublayer: int, target: str, width: int, mean: Tensor | None = None) -> None:
        super().__init__(sublayer, target, mean)
        self.width = width

    def update(self, index: int, update: Tensor) -> Tensor:
        """Changes the update of the sublayer."""
        if index != self.sublayer:
            return update
        own, extra = update[..., : self.width], update[..., self.width :]
        own = self.changed(own, self.instead(own))
        return torch.cat((own, extra), dim=-1) if extra.shape[-1] else own


class StreamRemoval(Removal):
    """Removes one stream, or one fraction of a stream, from the state before a sublayer or the final read."""

    what = "stream"

    def __init__(self, sublayer: int, target: str, stream: int, channels: slice, mean: Tensor | None = None) -> None:
        super().__init__(sublayer, target, mean)
        self.stream, self.channels = stream, channels

    def state(self, index: int, state: Any) -> Any:
        """Changes the state before the sublayer."""
        if index != self.sublayer:
            return state
        whole = state[self.stream]
        own = whole[..., self.channels]
        changed = whole.clone()
        changed[..., self.channels] = self.changed(own, self.instead(own))
        return (*state[: self.stream], changed, *state[self.stream + 1 :])


class LocalRemoval(Removal):
    """Replaces a local mixer by the identity, or by the identity plus its mean change."""

    what = "local"

    def __init__(self, sublayer: int, target: str, mixer: nn.Module, mean: Tensor | None = None) -> None:
        super().__init__(sublayer, target, mean)
        self.mixer = mixer

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Hooks into the local mixer."""

        def replace_output(module: nn.Module, given: tuple[Any, ...], result: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
            x, (y, cache) = given[0], result
            return self.changed(y, x + self.instead(x)), cache

        handle = self.mixer.register_forward_hook(replace_output)
        try:
            yield
        finally:
            handle.remove()


class SourceRemoval(Removal):
    """Removes one source from every weighted sum that one sublayer reads or writes; other weights are unchanged."""

    what = "source"

    def __init__(self, model: Decoder, sublayer: int, target: str, choice: Choice) -> None:
        super().__init__(sublayer, target)
        self.model, self.choice = model, choice
        self.sublayers = sublayer_list(model)

    def applies(self, index: int) -> bool:
        """Whether sums of a sublayer are changed."""
        return index == self.sublayer

    def read(self, index: int, state: Any, views: Views, carry: Any) -> tuple[Views, Any]:
        """Changes the read of the sublayer."""
        if not self.applies(index):
            return views, carry
        return self._without((views, carry), self.sublayers[index].depth.explain(Read(state, views, carry)).sums, index)

    def mixed(self, index: int, mix: Mix) -> Mix:
        """Changes the heads of the sublayer."""
        if not self.applies(index):
            return mix
        changed = self._without((mix.mixed, mix.next_state), self.sublayers[index].depth.explain(mix).sums, index)
        return Mix(mix.state, mix.heads, *changed)

    def written(self, index: int, written: Written) -> Any:
        """Changes the state after the sublayer."""
        if not self.applies(index):
            return written.next_state
        done = Write(*written[1:])
        return self._without(written.next_state, self.sublayers[index].depth.explain(done).sums, index)

    def left(self, state: Any, left: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Changes the final read."""
        end = len(self.sublayers)
        return self._without(left, self.model.ends.explain(Read(state, left)).sums, end) if self.applies(end) else left

    def _without(self, tree: Any, sums: tuple[WeightedSum, ...], index: int) -> Any:
        for number, one in enumerate(sums):
            if one.role == "read" and len(one.names) > 1 and self.target in one.names:
                source, where = one.names.index(self.target), f"{index}/{number}"
                tree, found = replace_tensor(tree, one.made, lambda: self.changed(one.made, one.without(source), where))  # noqa: B023
                if not found:
                    kind = self.model.config.depth.kind
                    raise ConfigError(
                        f"depth mixer {kind!r}: the sum {one.result!r} of sublayer {index} is no tensor that the mixer has "
                        "returned; give `made` the tensor itself"
                    )
        return tree


class EmbeddingRemoval(SourceRemoval):
    """Removes the embedding from all weighted sums with several sources."""

    what = "embedding"

    def __init__(self, model: Decoder, first: int) -> None:
        super().__init__(model, first, EMBEDDING, "")

    def applies(self, index: int) -> bool:
        """All sublayers are changed."""
        return True


def removals(observer: Observer, routing: tuple[Routing, ...], seed: int) -> list[Removal]:
    """All removals of an audit, in order of depth within each kind."""
    model = observer.model
    return [
        *_updates(observer),
        *_streams(observer),
        *_locals(observer),
        *_sources(model, routing, seed),
    ]


def _updates(observer: Observer) -> Iterator[Removal]:
    width = observer.model.config.d_model
    for site in observer.model.config.stack.sites:
        for mean in (None, observer.means["mean update", site.index].value):
            yield UpdateRemoval(site.index, site.slot.kind, width, mean)


def _streams(observer: Observer) -> Iterator[Removal]:
    """Every stream before each block but the first, which starts from the embedding, and before the final read."""
    model, (n, m) = observer.model, n_pieces(observer.model)
    if n * m == 1 or not isinstance(model.ends, ParallelEnds):
        return
    stack, width = model.config.stack, model.config.d_model // m
    boundaries = [site.index for site in stack.sites if site.opens_block and site.index] + [stack.n_sublayers]
    for index in boundaries:
        means = observer.means["piece", index].value
        for piece, name in enumerate(piece_names(n, m)):
            first = piece % m * width
            for mean in (None, means[piece]):
                yield StreamRemoval(index, name, piece // m, slice(first, first + width), mean)


def _locals(observer: Observer) -> Iterator[Removal]:
    for index, place, kind, mixer in local_mixers(observer.model):
        for mean in (None, observer.means["local", mixer].value):
            yield LocalRemoval(index, f"{place} ({kind})", mixer, mean)


def _sources(model: Decoder, routing: tuple[Routing, ...], seed: int) -> Iterator[Removal]:
    """The embedding if it is a source, and at each sublayer its favourite source and a random other one."""
    read = [one for one in routing if one.role == "read" and len(one.sources) > 1]
    holders = [one.sublayer for one in read if EMBEDDING in one.sources]
    if holders:
        yield EmbeddingRemoval(model, min(holders))
    for index in dict.fromkeys(one.sublayer for one in read):
        shares: dict[str, float] = {}
        for one in read:
            if one.sublayer == index:
                for name, share in zip(one.sources, one.share, strict=True):
                    shares[name] = shares.get(name, 0.0) + share
        favourite = max(shares, key=lambda name: shares[name])
        others = [name for name in shares if name != favourite]
        yield SourceRemoval(model, index, favourite, "favourite")
        yield SourceRemoval(model, index, random.Random(f"{seed}/{index}").choice(others), "random")
