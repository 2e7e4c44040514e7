"""Claim 3: the residual stream is a depth read with fixed unit weights, which a softmax can match only up to scale.

Letters: B batch, T position, D width, S sources.
"""

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from twoaxis.claims.claim import PAPER, ROUNDING, Claim, Evidence, EvidenceTable, Finding
from twoaxis.claims.toy_models import D_MODEL, decoder, tokens, weighted_sum
from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import InitEquivalence, MixingDesign
from twoaxis.core.measure import distance, gradients, noise
from twoaxis.core.position import LayerStack, SublayerPosition
from twoaxis.core.views import Views
from twoaxis.depth import (
    AttentionResidualsConfig,
    DeltaAttentionResidualsConfig,
    DepthAttentionConfig,
    DepthConfig,
    DepthEnds,
    DepthMixer,
)
from twoaxis.depth.base import Layout, Stream
from twoaxis.model import Decoder
from twoaxis.model.trace import trace
from twoaxis.ops.depth_read import softmax_mix
from twoaxis.ops.mix import mix

GRADIENTS = 1e-11
NO_EPS = 1e-20
"""A norm eps negligible against every mean square here, so that norms remove scale entirely."""
BEHIND_A_NORM, VISIBLE = 1e-10, 1e-4

Outputs = tuple[Float[Tensor, "B T D"], ...]


class UnitReadConfig(DepthConfig):
    """Stores every sublayer's output and reads their sum with weights of one."""

    kind: Literal["unit_read"] = "unit_read"

    @property
    def design(self) -> MixingDesign:
        """Reads every output with weight 1."""
        return MixingDesign("none", "none", "f_j, e", "none: weight 1", "all", "none", "is the stream")

    @property
    def init_equivalence(self) -> InitEquivalence:
        """Exact, which is the claim."""
        return InitEquivalence("exact", "the sum of all outputs is the stream")

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """One product and one sum per source."""
        return Cost(elementwise_flops=2 * shape.total_tokens * site.d_model * (site.index + 1))

    def build(self, stack: LayerStack) -> "tuple[list[UnitRead], UnitReadEnds]":
        """Builds reads without parameters."""
        return [UnitRead() for _ in stack.sites], UnitReadEnds()


def unit_read(outputs: Outputs) -> Float[Tensor, "B T D"]:
    """The linear read of all outputs with unit weights."""
    return mix(outputs, torch.ones(1, len(outputs), dtype=outputs[0].dtype))[0]


class UnitRead(DepthMixer):
    """See `UnitReadConfig`."""

    def read(self, state: Outputs, layout: Layout = None, cache: Any = None) -> tuple[Stream, None, Any]:
        """Returns the sum."""
        return unit_read(state), None, cache

    def write(self, state: Outputs, update: Stream, context: Views, carry: Any) -> Outputs:
        """Returns the outputs with this one."""
        return (*state, update)


class UnitReadEnds(DepthEnds):
    """The embedding is the first output, and the head reads like a sublayer."""

    def enter(self, embeddings: Stream, layout: Layout = None, cache: Any = None) -> tuple[Outputs, Any]:
        """Returns the embedding alone."""
        return (embeddings,), cache

    def leave(self, state: Outputs, layout: Layout = None, cache: Any = None) -> tuple[Stream, Any]:
        """Returns the sum."""
        return unit_read(state), cache


READS: tuple[tuple[str, DepthConfig, str], ...] = (
    ("attention_residuals, zero queries", AttentionResidualsConfig(), "behind a norm"),
    ("attention_residuals, zero queries, blocks of 2", AttentionResidualsConfig(block_size=2), "behind a norm"),
    ("attention_residuals, zero queries and 4 heads", AttentionResidualsConfig(n_heads=4), "behind a norm"),
    ("delta_attention_residuals, zero queries", DeltaAttentionResidualsConfig(), "behind a norm"),
    ("depth_attention added through a zero matrix", DepthAttentionConfig(n_heads=2), "exactly"),
    ("depth_attention in place of the stream", DepthAttentionConfig(n_heads=2, mode="replace"), "no"),
    (
        "attention_residuals, sources weighed by their number of outputs",
        AttentionResidualsConfig(block_size=2, key_rank=4, source_prior="log_count"),
        "no",
    ),
)
"""Softmax reads at initialisation, and their relation to the plain decoder."""


def compute() -> Finding:
    """Compares decoders with unit reads and with softmax reads with the plain one."""
    found = Evidence()
    plain, built = decoder(), decoder(UnitReadConfig())
    compare(found, "unit reads", built, plain, ROUNDING, GRADIENTS)
    rows = [("linear, unit weights", "exactly"), *(row(found, *read) for read in READS)]
    trained = decoder(AttentionResidualsConfig(), norm_eps=NO_EPS)
    found.apart("attention_residuals, other queries", trained(tokens()), decoder(norm_eps=NO_EPS)(tokens()), VISIBLE)
    rows.append(("attention_residuals, queries away from zero", "no"))
    check_means(found)
    return found.finding(
        "A decoder of three blocks that keeps all outputs and reads them with unit weights equals the plain decoder: logits "
        "within 1e-12, gradients of every parameter within 1e-11.",
        "Softmax weights sum to one, so a softmax over n equal sources returns one of them where the residual stream holds n "
        "times as much: without a norm behind it no softmax read is the residual stream beyond its first source.",
        "Zero queries read the mean of the sources, the stream divided by their number: behind a norm the same logits and "
        "gradients within 1e-10, before it different by the number of sources.",
        table=EvidenceTable(("read", "equals the plain decoder"), tuple(rows)),
    )


def compare(found: Evidence, what: str, got: Decoder, plain: Decoder, outputs: float, grads: float) -> None:
    """Compares logits and the gradients of all parameters of the plain decoder."""
    logits, expected = got(tokens()), plain(tokens())
    found.close(f"logits, {what}", logits, expected, outputs)
    of_got, of_plain = gradients(got, weighted_sum(logits)), gradients(plain, weighted_sum(expected))
    for name, gradient in of_plain.items():
        found.close(f"gradients, {what}", of_got[name], gradient, grads)


def row(found: Evidence, what: str, depth: DepthConfig, relation: str) -> tuple[str, str]:
    """Tests the stated relation of one softmax read at initialisation to the plain decoder."""
    # Parameters of the same name have the same initial value, so that only the reads differ.
    plain, built = decoder(moved=False, norm_eps=NO_EPS), decoder(depth, moved=False, norm_eps=NO_EPS)
    if relation == "no":
        found.apart(what, built(tokens()), plain(tokens()), VISIBLE)
    else:
        bound = BEHIND_A_NORM if relation == "behind a norm" else ROUNDING
        compare(found, what, built, plain, bound, bound)
        sources = plain.config.stack.n_sublayers + 1
        left, expected = trace(built, tokens()).left, trace(plain, tokens()).left
        if isinstance(depth, AttentionResidualsConfig) and depth.block_size == 1:
            found.close("mean of all sources before the last norm", left * sources, expected, BEHIND_A_NORM)
            found.true(f"{what}: the scale differs before the norm", distance(left, expected) > VISIBLE)
    return what, relation


def check_means(found: Evidence) -> None:
    """Tests that a softmax over n equal sources returns the source, and a unit read n times the source."""
    source = noise((2, 3, D_MODEL), "claims/source")
    for n in (1, 2, 5):
        logits = 3 * noise((n, 2, 3, 1), f"claims/logits {n}")
        found.close("softmax over equal sources", softmax_mix((source,) * n, logits), source)
        found.close("unit read of equal sources", unit_read((source,) * n), n * source)


CLAIM = Claim(
    number=3,
    title="The residual stream is a fixed depth read",
    statement="The ordinary residual stream reads the embedding and all earlier sublayer outputs with weight one each. A "
    "softmax read can hold the same direction, their mean, but not the same scale.",
    source=f"{PAPER}, sections 1 and 2.1",
    tested="A small decoder built from unit reads against the plain one: logits and all gradients. Softmax reads as they start "
    "against the same.",
    compute=compute,
)
