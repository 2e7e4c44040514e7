"""Claim 4: depth mixers between static weights and routing, measured.

Letters: B batch, T position, D width, H heads, S sources.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from twoaxis.claims.attention_form import ATTENTION, LEARNED_QUERY, NO_ATTENTION, RELATIVE, attention_form
from twoaxis.claims.claim import PAPER, Claim, Evidence, EvidenceTable, Finding
from twoaxis.claims.toy_models import decoder, tokens
from twoaxis.core.measure import distance, noise, tensors
from twoaxis.core.parameters import Constant, declarations
from twoaxis.core.registry import Row
from twoaxis.depth import DEPTH, DepthAttentionConfig, DepthConfig
from twoaxis.model import Decoder
from twoaxis.model.trace import Trace, equal_tokens, sublayer_list, trace

WIDTH, LAYERS, HEADS = 48, 4, 2
"""Sizes at which all sources of the reader are linearly independent within a head."""

BLOCK = ({"kind": "attention", "n_heads": 4, "head_dim": 12}, {"kind": "swiglu", "d_ff": 16})

READER = 2 * LAYERS - 2
"""The measured sublayer: the first of the last block, where every method has mixed."""

STATIC, CONTENT, ROUTED = "static", "by content", "by content and reader"

PLACED = {
    "residual": {STATIC},
    "elc_bert": {STATIC},
    "denseformer": {STATIC},
    "vertical_attention": {CONTENT, ROUTED},
    "deep_cross_attention": {CONTENT, ROUTED},
    "muddformer": {CONTENT, ROUTED},
    "attention_residuals": {CONTENT, ROUTED},
}
"""The paper's classification of the published form of each method, which is its first example."""

FORMS = {
    "attention_residuals": LEARNED_QUERY,
    "deep_cross_attention": NO_ATTENTION,
    "muddformer": NO_ATTENTION,
    "depth_attention": ATTENTION,
}
"""The form of weights of each method, as stated in the evidence."""

RECONSTRUCTED = {"vertical_attention": "Vertical Attention"}
"""Methods without public text or code; the reconstruction here decides nothing."""


class Inputs(NamedTuple):
    """The inputs of reads other than parameters: the embedding, all updates, and projected heads."""

    embedding: Tensor
    updates: list[Tensor]
    heads: list[Any]


class Dependence(NamedTuple):
    """The variables on which the weight of a source depends, and its form."""

    input: bool
    reader: bool
    position: bool
    form: str

    @property
    def place(self) -> str:
        """The class of the weights."""
        return ROUTED if self.reader else CONTENT if self.input else STATIC


def compute() -> Finding:
    """Measures every example of every depth mixer, and compares with the paper's classification."""
    found, rows, doubtful = Evidence(), [], []
    for row in DEPTH:
        measured = {name: measure(row.example(name)) for name in row.examples}
        rows += list(_rows(row, measured))
        published = next(iter(measured.values()))
        if row.kind in FORMS:
            found.exactly(f"attention in {row.kind}", published.form, FORMS[row.kind])
        if row.kind not in PLACED:
            continue
        place = published.place
        if place not in PLACED[row.kind] and row.kind in RECONSTRUCTED:
            doubtful.append(RECONSTRUCTED[row.kind])
        else:
            allowed = " or ".join(sorted(PLACED[row.kind]))
            found.true(f"{row.kind} is {allowed}; it is {place}", place in PLACED[row.kind])
    finding = found.finding(
        "Weights of the published forms of ELC-BERT and DenseFormer are the same for every input; those of DCA, MUDDFormer and "
        "Attention Residuals depend on it. A norm of a source or of a sum is not counted as a weight.",
        f"Attention in the strict sense, a {ATTENTION} of states, is tested in the last column. The paper says that these "
        "methods move towards it, not that they are it: the published Attention Residuals ask with a learned vector, DCA and "
        "MUDDFormer have no softmax over depth.",
        table=EvidenceTable(("depth mixer", "examples", "weights", "attention"), tuple(rows)),
    )
    if not doubtful or finding.verdict != "holds exactly":
        return finding
    why = (
        f"{' and '.join(doubtful)}: the paper counts it among the routing methods, its public reviews describe one scalar per "
        "pair of layers. Neither text nor code is public; the reconstruction here follows the reviews and decides nothing."
    )
    others = len(PLACED) - len(doubtful)
    bound = f"for {' and '.join(doubtful)}; as the paper says for the other {others}"
    return replace(finding, verdict="undecided", bound=bound, evidence=(*finding.evidence, why))


def _rows(row: Row[DepthConfig], measured: dict[str, Dependence]) -> Iterator[tuple[str, ...]]:
    """One row per distinct result."""
    for one in dict.fromkeys(measured.values()):
        examples = ", ".join(name for name, other in measured.items() if other == one)
        yield row.kind, examples, f"{one.place} and position" if one.position else one.place, one.form


def measure(config: DepthConfig) -> Dependence:
    """Measures one configuration on noise.

    Weights depend on the input if another input changes the derivative of the read with respect to its sources, by more than
    norms and static weights can. They depend on the reader if another newest update changes that derivative by more than
    competition in a softmax can. They depend on the position if equal tokens are read differently at different positions.
    """
    if isinstance(config, DepthAttentionConfig) and config.window == 1:
        # A softmax over one state is 1.
        return Dependence(False, False, False, NO_ATTENTION)
    model = decoder(config, block=BLOCK, d_model=WIDTH, n_layers=LAYERS)
    run = trace(model, tokens())
    one, other, alike = _inputs(run, "one"), _inputs(run, "other"), _inputs(run, "alike", same_tokens=True)
    newest = one._replace(updates=[*one.updates[: READER - 1], *other.updates[READER - 1 :]])
    derivatives = _derivatives(model, one)
    on_input = _differ(derivatives, _derivatives(model, other)) and not turns_with_inputs(model, run)
    same = _read(model, alike)
    on_position = _differ(same, [view[:, :1].expand_as(view) for view in same])
    on_reader = on_input and _differ(derivatives, _derivatives(model, newest))
    on_reader = on_reader and not _only_competes(model, one, newest)
    return Dependence(on_input, on_reader, on_position, _form(config, model, run))


@contextmanager
def _plain_norms(model: Decoder) -> Iterator[None]:
    """Norms as they start within the block: equal gains, which keep a mean of 0 at 0, and no bias."""
    norms = [
        (parameter, declaration.init.value, parameter.detach().clone())
        for _, parameter, declaration in declarations(model)
        if declaration.tag == "norm" and isinstance(declaration.init, Constant)
    ]
    try:
        for parameter, start, _ in norms:
            parameter.fill_(start)
        yield
    finally:
        for parameter, _, own in norms:
            parameter.copy_(own)


def _form(config: DepthConfig, model: Decoder, run: Trace) -> str:
    """The form of the weights of a read with at least three sources."""
    if isinstance(config, DepthAttentionConfig) and config.window == 2:
        model = decoder(config.replace(window=3), block=BLOCK, d_model=WIDTH, n_layers=LAYERS)
        run = trace(model, tokens())
    return attention_form(sublayer_list(model)[READER].depth, tree_map(torch.detach, run.states[READER]))


@torch.no_grad()
def turns_with_inputs(model: Decoder, run: Trace) -> bool:
    """Whether the read is equivariant to sign flips of channels in all inputs.

    Flips keep every norm and mean (channels come in opposite pairs) and commute with static weights of sources, heads and
    channels, so only comparisons of contents with learned vectors break the equivariance. The bias of a norm is no such vector.
    """
    inputs = tree_map(_paired, _inputs(run, "paired"))
    flipped = tree_map(_flipped, inputs)
    with _plain_norms(model):
        return not _differ([_flipped(view) for view in _read(model, inputs)], _read(model, flipped))


def _paired(x: Tensor) -> Tensor:
    """Makes every odd channel the negative of the one before; an unpaired last channel is zero."""
    half = x[..., : x.shape[-1] - x.shape[-1] % 2 : 2]
    return torch.nn.functional.pad(torch.stack((half, -half), dim=-1).flatten(-2), (0, x.shape[-1] % 2))


def _flipped(x: Tensor) -> Tensor:
    """Flips the signs of some pairs of channels, the same in every slice of twelve and so in every head and part."""
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0, -1.0, 1.0], dtype=x.dtype).repeat_interleave(2)
    return x * signs.repeat(-(-x.shape[-1] // 12))[: x.shape[-1]]


_noise = lru_cache(maxsize=1024)(noise)
"""Most mixers are measured on the same numbers; no mixer writes into what it is given."""


def _inputs(run: Trace, name: str, same_tokens: bool = False) -> Inputs:
    """Noise in the shapes of all inputs of a pass."""
    count = 0

    def fresh(like: Tensor) -> Tensor:
        nonlocal count
        count += 1
        shape = tuple(like.shape)
        if not same_tokens:
            return _noise(shape, f"claims/{name}/{count}")
        return _noise((shape[0], 1, *shape[2:]), f"claims/{name}/{count}").expand(shape).contiguous()

    updates = [fresh(update) for update in run.updates]
    return Inputs(fresh(run.left), updates, [tree_map(fresh, heads) for heads in run.heads])


def _read(model: Decoder, inputs: Inputs) -> list[Tensor]:
    """The views of the reader for given updates, or its heads if they are mixed along depth."""
    state, _ = model.ends.enter(inputs.embedding)
    layout = equal_tokens(inputs.embedding)
    for index, sublayer in enumerate(sublayer_list(model)):
        views, carry, _ = sublayer.depth.read(state, layout)
        context, seen = sublayer.normalise(views), tensors(views)
        if sublayer.depth.mixes_heads:
            mixed, state = sublayer.depth.mix_heads(inputs.heads[index], context, state, layout)
            # The weight of a blend stands beside the heads.
            seen = [mix for mix in tensors(mixed) if mix.dim() > 1] if mixed else seen
        if index == READER:
            return seen
        state = sublayer.depth.write(state, inputs.updates[index], context, carry)
    raise AssertionError("the reader is one of the sublayers")


def _sources(inputs: Inputs) -> list[Tensor]:
    """The sources older than the newest update."""
    return [inputs.embedding, *inputs.updates[: READER - 1], *tensors(inputs.heads[:READER])]


def _derivatives(model: Decoder, inputs: Inputs) -> list[Tensor]:
    """The derivatives of a fixed combination of the read with respect to each older source."""
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

    So it is in a softmax with a learned query: all weights shrink when another grows.
    """
    before, after = (_combination(model, inputs) for inputs in (one, newest))
    if before is None or after is None or not _differ(before, after):
        return False
    return not _differ([_shape(weights) for weights in before], [_shape(weights) for weights in after])


def _shape(weights: Tensor) -> Tensor:
    """Normalises weights up to a common factor and offset."""
    centred = weights - weights.mean(-1, keepdim=True)
    return centred / centred.norm(dim=-1, keepdim=True).clamp(min=RELATIVE)


@torch.no_grad()
def _combination(model: Decoder, inputs: Inputs) -> list[Tensor] | None:
    """The weights of older sources within each head of each view; None if a view is no combination of sources."""
    views = _read(model, inputs)
    if any(view.shape != inputs.embedding.shape for view in views):
        return None
    # A mixer may also read learned vectors, such as a null source.
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
        # Sources with the weight of the newest update are part of the same sum.
        apart = (older - own).abs().flatten(0, -2).amax(0) > RELATIVE
        found.append(older[..., apart] if apart.any() else older)
    return found


def _differ(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether any pair differs by more than rounding."""
    largest = max(float(t.detach().abs().max()) for t in one)
    return max(distance(a, b) for a, b in zip(one, other, strict=True)) > RELATIVE * largest


CLAIM = Claim(
    number=4,
    title="Depth mixers range from static weights to routing",
    statement="ELC-BERT and DenseFormer learn weights over depth that are the same for every token; Vertical Attention, "
    "DeepCrossAttention, MUDDFormer and Attention Residuals move towards attention-based routing: their weights depend on the "
    "input.",
    source=f"{PAPER}, section 2.3",
    tested="For every depth mixer, on noise in place of updates: whether its weights change with the input by more than norms "
    "do; whether the newest update changes those of older sources by more than competing with them; whether equal tokens are "
    "read alike everywhere; and whether the weights are attention.",
    compute=compute,
)
