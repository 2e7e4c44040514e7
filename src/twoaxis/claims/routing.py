"""Claim 4: depth mixers between static weights and routing, measured."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch.utils._pytree import tree_map

from twoaxis.claims.attention_form import ATTENTION, LEARNED_QUERY, NO_ATTENTION, attention_form
from twoaxis.claims.claim import PAPER, Claim, Evidence, EvidenceTable, Finding
from twoaxis.claims.toy_models import decoder, tokens
from twoaxis.core.design import Weights
from twoaxis.core.registry import Row
from twoaxis.depth import DEPTH, DepthAttentionConfig, DepthConfig
from twoaxis.model.trace import sublayer_list, trace
from twoaxis.testing.mixing_design import measured_dependence

WIDTH, LAYERS = 48, 4

BLOCK = ({"kind": "attention", "n_heads": 4, "head_dim": 12}, {"kind": "swiglu", "d_ff": 16})

READER = 2 * LAYERS - 2
"""The measured sublayer: the first of the last block, where every method has mixed."""

IN_HEADS = "not tested: weights of heads"

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


class Weighting(NamedTuple):
    """The variables on which the weight of a source depends, and its form."""

    weights: Weights
    position: bool
    form: str

    @property
    def place(self) -> str:
        """The class of the weights."""
        return {"static": STATIC, "input": CONTENT, "input and reader": ROUTED}[self.weights]


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


def _rows(row: Row[DepthConfig], measured: dict[str, Weighting]) -> Iterator[tuple[str, ...]]:
    """One row per distinct result."""
    for one in dict.fromkeys(measured.values()):
        examples = ", ".join(name for name, other in measured.items() if other == one)
        yield row.kind, examples, f"{one.place} and position" if one.position else one.place, one.form


def measure(config: DepthConfig) -> Weighting:
    """Measures what the weights of one configuration depend on, as the checks of designs do, and their form."""
    return Weighting(*measured_dependence(config), _form(config))


def _form(config: DepthConfig) -> str:
    """The form of the weights of a read with at least three sources."""
    if isinstance(config, DepthAttentionConfig) and config.window == 2:
        config = config.replace(window=3)
    model = decoder(config, block=BLOCK, d_model=WIDTH, n_layers=LAYERS)
    mixer = sublayer_list(model)[READER].depth
    if mixer.mixes_heads and config.design.weights != "static":
        return IN_HEADS
    run = trace(model, tokens())
    return attention_form(mixer, tree_map(torch.detach, run.states[READER]))


CLAIM = Claim(
    number=4,
    title="Depth mixers range from static weights to routing",
    statement="ELC-BERT and DenseFormer learn weights over depth that are the same for every token; Vertical Attention, "
    "DeepCrossAttention, MUDDFormer and Attention Residuals move towards attention-based routing: their weights depend on the "
    "input.",
    source=f"{PAPER}, section 2.3",
    tested="For every depth mixer, on noise in place of updates and heads: whether its weights change with the input by more "
    "than norms do; whether the newest state changes those of older sources by more than competing with them; whether equal "
    "tokens are read alike everywhere; and, unless it mixes the heads of attention, whether the weights are attention.",
    compute=compute,
)
