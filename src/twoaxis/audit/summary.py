"""Classes of tokens that any tokenizer has and that a reader understands.

Letters: B batch, T position, K classes, V vocabulary.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from twoaxis.audit.observe import Observer, n_pieces
from twoaxis.audit.result import Attention, Gain, Gates, Norms, Routing, Streams
from twoaxis.audit.routing import rounded
from twoaxis.core.errors import DataError
from twoaxis.core.layout import TokenLayout
from twoaxis.data import Tokenizer
from twoaxis.depth import DEPTH, DepthConfig
from twoaxis.ops.streams import piece_names

FREQUENT, RARE = 0.5, 0.1
"""The part of all tokens that the most frequent ids, and the rarest ids, make up."""

TEXT = ("space", "letters", "digits", "punctuation", "other")


class TokenClasses(NamedTuple):
    """Which ids belong to each class.

    `all` and `first` (the first token of a document or of a window) depend on the place; `frequent` and `rare` are the ids that
    together make up half of the sample, and a tenth from its rare end; the others go by the text of the id.

    Attributes:
        by_id: for every class that depends on the id alone, which ids belong to it.
    """

    by_id: dict[str, Bool[Tensor, " V"]]

    @property
    def names(self) -> tuple[str, ...]:
        """All classes, of which those without a token in the sample are left out."""
        return ("all", "first", *self.by_id)

    def masks(self, tokens: Int[Tensor, "B T"], layout: TokenLayout) -> Bool[Tensor, "K B T"]:
        """Which tokens of a batch belong to each class."""
        first = (layout.positions == 0).expand_as(tokens)
        return torch.stack([torch.ones_like(first), first, *(ids[tokens] for ids in self.by_id.values())])


def token_classes(batches: Iterable[Int[Tensor, "B T"]], tokenizer: Tokenizer, vocab_size: int) -> TokenClasses:
    """Sorts the ids that occur in a sample."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for tokens in batches:
        counts += torch.bincount(tokens.flatten(), minlength=vocab_size)
    order = torch.argsort(counts, descending=True, stable=True)
    below = counts[order].cumsum(0)
    total = int(below[-1])
    by_id = {name: torch.zeros(vocab_size, dtype=torch.bool) for name in ("frequent", "rare", *TEXT)}
    # The ids before which less than half is reached, and those behind which at most a tenth is left.
    by_id["frequent"][order] = below - counts[order] < FREQUENT * total
    by_id["rare"][order] = below - counts[order] >= (1 - RARE) * total
    for token in torch.nonzero(counts).flatten().tolist():
        by_id[_text_class(tokenizer, token)][token] = True
    seen = counts > 0
    return TokenClasses({name: ids & seen for name, ids in by_id.items() if bool((ids & seen).any())})


def _text_class(tokenizer: Tokenizer, token: int) -> str:
    try:
        text = tokenizer.decode([token])
    except DataError:
        # A model may have more ids than its tokenizer.
        return "other"
    bare = text.strip()
    if text and not bare:
        return "space"
    if bare.isalpha():
        return "letters"
    if bare.isdigit():
        return "digits"
    if bare.isascii() and bare.isprintable() and bare and not any(character.isalnum() for character in bare):
        return "punctuation"
    return "other"


def routing_note(config: DepthConfig, routing: tuple[Routing, ...]) -> str:
    """Says in words what is summed, or that the depth mixer has no such weights."""
    kind = config.kind
    what = f"{kind} {DEPTH[kind].summary}" if kind in DEPTH else kind
    reads = {one.sublayer for one in routing if one.role == "read"}
    mixes = {one.sublayer for one in routing if one.role == "mix"}
    if not routing:
        return f"{what}: it forms no weighted sum of depth sources, so there are no weights to show"
    parts = []
    if reads:
        parts.append(f"weighted sums are read at {_counted(reads)}")
    if mixes:
        parts.append(f"streams are mixed at {_counted(mixes)}")
    return f"{what}: {', and '.join(parts)}"


def _counted(places: set[int]) -> str:
    return f"{len(places)} place" + ("s" if len(places) > 1 else "")


def norms_of(observer: Observer) -> tuple[Norms, ...]:
    """The sizes at every sublayer."""
    means = observer.means
    names = ("read", "update", "state", "gradient")
    return tuple(
        Norms(sublayer=index, **{name: means.number((name, index)) for name in names})
        for index in range(len(observer.sublayers))
    )


def gates_of(observer: Observer) -> tuple[Gates, ...]:
    """The delta writes, where there are such."""
    means, found = observer.means, []
    for index in range(len(observer.sublayers)):
        if ("beta", index) not in means:
            continue
        near_0, near_1, above_1 = (means.number((name, index)) for name in ("near 0", "near 1", "above 1"))
        found.append(
            Gates(
                sublayer=index,
                mean=means.number(("beta", index)),
                near_0=near_0,
                between=round(max(0.0, 1 - near_0 - near_1 - above_1), 6),
                near_1=near_1,
                above_1=above_1,
                before=means.number(("before", index)),
                after=means.number(("after", index)),
            )
        )
    return tuple(found)


def streams_of(observer: Observer) -> Streams | None:
    """Spread and composite gain of parallel streams; None where there is one whole stream, or another state."""
    n, m = n_pieces(observer.model)
    if n * m == 1:
        return None
    means, count = observer.means, len(observer.sublayers)
    gains = tuple(
        Gain(sublayer=index, **{name: means.number((name, index)) for name in ("row", "column", "spectral")})
        for index in range(count)
        if ("row", index) in means
    )
    spread = tuple(means.number(("spread", index)) for index in range(count + 1))
    return Streams(names=piece_names(n, m), spread=spread, gain=gains)


def attention_of(observer: Observer) -> tuple[Attention, ...]:
    """How far every softmax attention looks back."""
    kinds = {(index, "mixer"): site.slot.kind for index, site in enumerate(observer.model.config.stack.sites)}
    kinds |= {(index, place): kind for index, place, kind, _ in observer.locals}
    found = []
    for (index, place), distances in sorted(observer.distances.items()):
        begins, mass = distances.bins()
        found.append(
            Attention(
                sublayer=index,
                place=place,
                kind=kinds[index, place],
                window=distances.window,
                mean_distance=round(distances.mean, 4),
                distances=begins,
                mass=rounded(mass, 5),
                sink=round(distances.sink / max(distances.queries, 1), 6),
            )
        )
    return tuple(found)
