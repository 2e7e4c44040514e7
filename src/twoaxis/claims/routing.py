"""Claim 4: where each depth mixer stands between static weights and attention-based routing, measured.

Letters: B batch, T position, D width, H heads, S sources.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from twoaxis.claims.claim import Claim, Evidence, EvidenceTable, Finding
from twoaxis.claims.toy import decoder, tokens
from twoaxis.core.measure import tensors
from twoaxis.core.probe import distance, noise
from twoaxis.core.table import Row
from twoaxis.depth import DEPTH, DepthConfig
from twoaxis.model import Decoder
from twoaxis.model.trace import Trace, sublayer_list, trace

WIDTH, LAYERS, HEADS = 48, 4, 2
"""Within a head, all sources of the reader are linearly independent."""

BLOCK = ({"kind": "attention", "n_heads": 4, "head_dim": 12}, {"kind": "swiglu", "d_ff": 16})

READER = 2 * LAYERS - 2
"""The sublayer whose read is looked at: it opens the last block, where every method has mixed."""

RELATIVE = 1e-8
"""Between rounding, near 1e-13, and the changes looked for, which are far larger."""

STATIC, CONTENT, ROUTED = "static", "by content", "by content and reader"

PLACED = {
    "residual": {STATIC},
    "elc_bert": {STATIC},
    "denseformer": {STATIC},
    "deep_cross_attention": {CONTENT, ROUTED},
    "muddformer": {CONTENT, ROUTED},
    "attention_residuals": {CONTENT, ROUTED},
}
"""The methods that the note places, and where it places their published form, which is the first example."""


class Inputs(NamedTuple):
    """Everything that reads depend on besides parameters: the embedding, all updates, and projected heads."""

    embedding: Tensor
    updates: list[Tensor]
    heads: list[Any]


class Dependence(NamedTuple):
    """What the weight of a source in a read depends on."""

    input: bool
    reader: bool
    position: bool

    @property
    def place(self) -> str:
        """Where on the scale it stands."""
        return ROUTED if self.reader else CONTENT if self.input else STATIC


def compute() -> Finding:
    """Measures every example of every depth mixer, and holds the methods that the note names to its placing."""
    found, rows = Evidence(), []
    for row in DEPTH:
        measured = {name: dependence(row.example(name)) for name in row.examples}
        rows += list(_rows(row, measured))
        if row.kind in PLACED:
            place = measured[next(iter(row.examples))].place
            found.true(f"{row.kind} is {' or '.join(sorted(PLACED[row.kind]))}; it is {place}", place in PLACED[row.kind])
    return found.finding(
        "No input changes a weight in the published forms of ELC-BERT and DenseFormer; it changes those of DCA, MUDDFormer and "
        "Attention Residuals.",
        "Undecided for Vertical Attention, which the note counts among the routing methods: no code is public, and the "
        "reconstruction here follows its reviews. Its weights are parameters; where it has norms of sources or of "
        "their sum, only these depend on the input.",
        table=EvidenceTable(
            (
                "depth mixer",
                "examples",
                "weights depend on the input",
                "on the newest state, beyond competition",
                "on the position",
                "place",
            ),
            tuple(rows),
        ),
    )


def _rows(row: Row[DepthConfig], measured: dict[str, Dependence]) -> Iterator[tuple[str, ...]]:
    """One row for all examples that behave alike."""
    for one in dict.fromkeys(measured.values()):
        examples = ", ".join(name for name, other in measured.items() if other == one)
        yield row.kind, examples, *("yes" if answer else "no" for answer in one), one.place


def dependence(config: DepthConfig) -> Dependence:
    """Measures one configuration on inputs that are noise.

    Input: another input changes the derivative of the read with respect to its sources.
    Reader: another newest update changes the derivative with respect to older sources, and does more than compete with them.
    Position: the same token everywhere is read differently at different positions.
    """
    model = decoder(config, block=BLOCK, d_model=WIDTH, n_layers=LAYERS)
    run = trace(model, tokens())
    one, other, alike = _inputs(run, "one"), _inputs(run, "other"), _inputs(run, "alike", same_tokens=True)
    newest = one._replace(updates=[*one.updates[: READER - 1], *other.updates[READER - 1 :]])
    on_input = _differ(_derivatives(model, one), _derivatives(model, other))
    same = _read(model, alike)
    on_position = _differ(same, [view[:, :1].expand_as(view) for view in same])
    on_reader = _differ(_derivatives(model, one), _derivatives(model, newest)) and not _only_competes(model, one, newest)
    return Dependence(on_input, on_reader, on_position)


def _inputs(run: Trace, name: str, same_tokens: bool = False) -> Inputs:
    """Noise in the shape of everything that a pass holds."""
    count = 0

    def fresh(like: Tensor) -> Tensor:
        nonlocal count
        count += 1
        shape = tuple(like.shape)
        if not same_tokens:
            return noise(shape, f"claims/{name}/{count}")
        return noise((shape[0], 1, *shape[2:]), f"claims/{name}/{count}").expand(shape).contiguous()

    updates = [fresh(update) for update in run.updates]
    return Inputs(fresh(run.left), updates, [tree_map(fresh, heads) for heads in run.heads])


def _read(model: Decoder, inputs: Inputs) -> list[Tensor]:
    """What the reader sees when these are the updates: its views, and its heads if they are mixed along depth."""
    state = model.ends.enter(inputs.embedding)
    for index, sublayer in enumerate(sublayer_list(model)):
        views, carry = sublayer.depth.read(state)
        context, seen = sublayer.normalise(views), tensors(views)
        if heads := inputs.heads[index]:
            mixed, state = sublayer.depth.mix_heads(heads, context, state)
            seen = tensors(mixed)
        if index == READER:
            return seen
        state = sublayer.depth.write(state, inputs.updates[index], context, carry)
    raise AssertionError("the reader is one of the sublayers")


def _sources(inputs: Inputs) -> list[Tensor]:
    """What is older than the reader's newest update."""
    return [inputs.embedding, *inputs.updates[: READER - 1], *tensors(inputs.heads[:READER])]


def _derivatives(model: Decoder, inputs: Inputs) -> list[Tensor]:
    """A fixed combination of what is read, differentiated with respect to each older source."""
    leaves = tree_map(lambda t: t.clone().requires_grad_(), inputs)
    seen = _read(model, leaves)
    total = sum(
        ((view * noise(tuple(view.shape), f"claims/view {part}")).sum() for part, view in enumerate(seen)),
        torch.zeros((), dtype=torch.float64),
    )
    found = torch.autograd.grad(total, _sources(leaves), allow_unused=True)
    return [torch.zeros_like(s) if g is None else g for s, g in zip(_sources(leaves), found, strict=True)]


def _only_competes(model: Decoder, one: Inputs, newest: Inputs) -> bool:
    """Whether the newest update changes the weights of older sources by a common factor and offset only.

    That is what happens in a softmax whose query is the same for all inputs: all weights shrink when a rival grows.
    """
    before, after = (_combination(model, inputs) for inputs in (one, newest))
    if before is None or after is None or not _differ(before, after):
        return False
    return not _differ([_shape(weights) for weights in before], [_shape(weights) for weights in after])


def _shape(weights: Tensor) -> Tensor:
    """Weights up to a common factor and offset."""
    centred = weights - weights.mean(-1, keepdim=True)
    return centred / centred.norm(dim=-1, keepdim=True).clamp(min=RELATIVE)


@torch.no_grad()
def _combination(model: Decoder, inputs: Inputs) -> list[Tensor] | None:
    """The weights of older sources within each head of each view; None if a view is no combination of sources."""
    views = _read(model, inputs)
    if any(view.shape != inputs.embedding.shape for view in views):
        return None
    # A mixer may also read vectors that it has learned, such as a null source.
    mixer = sublayer_list(model)[READER].depth
    learned = [p.expand_as(inputs.embedding) for p in mixer.parameters() if p.shape == (WIDTH,)]
    sources = [inputs.embedding, *(update[..., :WIDTH] for update in inputs.updates[:READER])]
    basis = torch.stack([*sources, *learned], dim=-1).unflatten(2, (HEADS, -1))
    found = []
    for view in views:
        target = view.unflatten(2, (HEADS, -1)).unsqueeze(-1)
        weights = torch.linalg.lstsq(basis, target).solution
        if distance(basis @ weights, target) > RELATIVE:
            return None
        older, own = weights[..., :READER, 0], weights[..., READER : READER + 1, 0]
        # What has the newest update's own weight is summed into one source with it.
        apart = (older - own).abs().flatten(0, -2).amax(0) > RELATIVE
        found.append(older[..., apart] if apart.any() else older)
    return found


def _differ(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether any of them differ by more than rounding can."""
    largest = max(float(t.detach().abs().max()) for t in one)
    return max(distance(a, b) for a, b in zip(one, other, strict=True)) > RELATIVE * largest


CLAIM = Claim(
    number=4,
    title="Depth mixers reach from static weights to routing",
    statement="ELC-BERT and DenseFormer learn weights over depth that are the same for every token; DeepCrossAttention, "
    "MUDDFormer and Attention Residuals move towards attention-based routing, with weights that depend on the input.",
    source="arXiv:2603.16039, abstract",
    tested="For every depth mixer, on noise in place of updates: whether the read's derivative changes with the input; whether "
    "the newest update changes that of older sources by more than competing with them; whether equal tokens are read alike "
    "everywhere.",
    compute=compute,
)
