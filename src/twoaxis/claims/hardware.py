"""Claim 12: whether the sequence axis is usually the cheaper place: in bytes by the ledger, and in measured seconds."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Literal, NamedTuple

from twoaxis.claims import benchmarks
from twoaxis.claims.benchmarks import KeptTable, Ratio, kept_table
from twoaxis.claims.claim import PAPER, Claim, EvidenceTable, Finding, Verdict
from twoaxis.claims.studies import FIXED_ON
from twoaxis.core.cost import Shape
from twoaxis.display.numbers import change
from twoaxis.ledger.decoder_memory import decoder_cache_bytes, decoder_saved_bytes, decoder_trace
from twoaxis.model import DecoderConfig
from twoaxis.ops.local_attention import SMALLEST_CHUNK


class Size(NamedTuple):
    """A model and a batch of it.

    Attributes:
        name: blocks and width.
        layers: blocks of attention and SwiGLU.
        width: d_model.
        heads: of the attention, of ShortSWA and of the depth read.
        d_ff: of SwiGLU.
        vocab: tokens.
        shape: of a step.
    """

    name: str
    layers: int
    width: int
    heads: int
    d_ff: int
    vocab: int
    shape: Shape

    @property
    def window(self) -> int:
        """A sixteenth of the width, as 128 at d = 2048 in the author's companion text."""
        return self.width // 16


SIZES = (
    Size("12 x 256", 12, 256, 4, 688, 512, Shape(4, 512, 4)),
    Size("12 x 768", 12, 768, 12, 2048, 50_304, Shape(8, 1024, 2)),
    Size("32 x 4096", 32, 4096, 32, 11_008, 32_000, Shape(1, 4096, 2)),
)
"""The size of the benchmarks, that of GPT-2 small, and 7B."""

DEPTH_READS: dict[str, dict[str, Any]] = {
    "depth attention, K = 8": {"kind": "depth_attention", "window": 8},
    "depth attention, all states": {"kind": "depth_attention", "window": None},
    "Attention Residuals": {"kind": "attention_residuals"},
    "Attention Residuals, blocks of 4": {"kind": "attention_residuals", "block_size": 4},
    "DeepCrossAttention": {"kind": "deep_cross_attention"},
    "MUDDFormer": {"kind": "muddformer"},
}
"""The paper's read, and published ones whose weights depend on the input."""

TIMED = {
    "depth_attention 8": "depth attention, K = 8",
    "depth_attention 8, own": "depth attention, K = 8, own matrices before every sublayer",
    "attention_residuals full": "Attention Residuals",
    "attention_residuals block 4": "Attention Residuals, blocks of 4",
    "deep_cross_attention full": "DeepCrossAttention",
    "muddformer": "MUDDFormer",
}
"""Rows of the benchmark of the depth axis."""

TIMED_WINDOWS = ("short_swa 16", "short_swa 128")
"""Rows of the benchmark of the sequence axis, which compares with the same plain decoder."""

QUANTITIES = ("saved", "sent", "cached")
"""Bytes kept for the backward pass, at the middle boundary of stages, and in generation at the end of the context."""

MATERIAL = 0.05
"""Bytes that differ by less than this, as a fraction of what the plain decoder has, are equal."""

Side = Literal["cheaper", "more expensive", "equal"]
WORDS: dict[Side, str] = {"cheaper": "cheaper than", "more expensive": "more expensive than", "equal": "ranges overlap with"}


def added(size: Size, depth: Mapping[str, Any] | None) -> tuple[float, ...]:
    """What a placement adds to each quantity of the plain decoder, as a fraction of it.

    Args:
        size: the model.
        depth: a depth mixer; None is ShortSWA before the attention of every block.
    """
    plain = _bytes(size, _decoder(size, None, short_swa=False))
    own = _bytes(size, _decoder(size, depth, short_swa=depth is None))
    return tuple(with_it / without - 1 for with_it, without in zip(own, plain, strict=True))


def _bytes(size: Size, model: DecoderConfig) -> tuple[int, int, int]:
    stack = model.stack
    middle = sum(stack.block_lengths[: size.layers // 2])
    sent = decoder_trace(model, size.shape).state_bytes(middle)
    saved = decoder_saved_bytes(model, size.shape)
    if any(sublayer.kind == "short_swa" for sublayer in model.layers[0]):
        saved -= mask_bytes(size)
    return saved, sent, decoder_cache_bytes(model, size.shape)


def mask_bytes(size: Size) -> int:
    """What the eager engine of windowed attention keeps for its mask in all blocks, and a windowed kernel would not."""
    T, window = size.shape.tokens, size.window
    length = max(window, SMALLEST_CHUNK)
    rows, span = -(-T // length) * length, length + window - 1
    # All query heads share one kv-head, and stand below each other in the mask.
    return size.layers * size.heads * rows * span * size.shape.element_bytes


def _decoder(size: Size, depth: Mapping[str, Any] | None, short_swa: bool) -> DecoderConfig:
    attention = {"kind": "attention", "n_heads": size.heads}
    local = [{"kind": "short_swa", "n_heads": size.heads, "window": size.window}] if short_swa else []
    mixer = dict(depth or {"kind": "residual"})
    if mixer["kind"] == "depth_attention":
        mixer["n_heads"] = size.heads
    block = [*local, attention, {"kind": "swiglu", "d_ff": size.d_ff}]
    return DecoderConfig.from_data(
        {"vocab_size": size.vocab, "d_model": size.width, "n_layers": size.layers, "depth": mixer, "blocks": [block]}
    )


def compute() -> Finding:
    """Counts in how many comparisons ShortSWA is the cheaper, by the ledger and by the benchmarks."""
    ledger, rows = [], []
    for size in SIZES:
        swa = added(size, None)
        rows.append((size.name, f"ShortSWA, w = {size.window}", *map(_change, swa)))
        for name, depth in DEPTH_READS.items():
            own = added(size, depth)
            ledger += [_side(one, other, MATERIAL) for one, other in zip(swa, own, strict=True)]
            rows.append((size.name, name, *map(_change, own)))
    tables = kept_table("Depth mixers"), kept_table("Training step of a decoder with local mixing")
    timed = list(seconds(*tables))
    evidence = [_counted("Bytes by the ledger", ledger)]
    if timed and tables[0] is not None:
        what = f"Seconds of a training step ({tables[0].where})"
        evidence += [_counted(what, [one.side for one in timed]), *_sentences(timed)]
    else:
        evidence.append(f"No seconds: no kept benchmark has both axes in {benchmarks.KEPT}.")
    evidence.append(
        "The table has the bytes that a placement adds, as a fraction of those of the plain decoder: saved for backward, sent "
        "at the middle boundary of pipeline stages, cached at the end of the context. Saved bytes are those of the eager "
        "engines, without the mask that ours keeps for windowed attention and a windowed kernel would not. FLOPs and "
        "parameters are not compared here; `twoaxis plan` lists them. No GPU was measured."
    )
    evidence.append("Blocks x width: " + "; ".join(f"{size.name}, {_batch(size.shape)}" for size in SIZES) + ".")
    verdict = decide(ledger, [one.side for one in timed])
    table = EvidenceTable(("model", "placement", *QUANTITIES), tuple(rows))
    links = dict.fromkeys(one.path for one in tables if one is not None)
    return Finding(verdict, "", tuple(evidence), table, tuple(links))


class Timed(NamedTuple):
    """ShortSWA against a read over depth, each measured against the same plain decoder.

    Attributes:
        swa: the row of ShortSWA with its ratio.
        depth: the read over depth with its ratio.
        side: what the ranges of the rounds leave to ShortSWA.
    """

    swa: str
    depth: str
    side: Side


def seconds(depth: KeptTable | None, sequence: KeptTable | None) -> Iterator[Timed]:
    """Each measured pair; nothing where a table is missing."""
    if depth is None or sequence is None:
        return
    reads, windows = depth.ratios("step"), sequence.ratios("ratio")
    # Before there was a row for own matrices, those were what the mixer had.
    as_it_was = {} if "depth_attention 8, own" in reads else {"depth_attention 8": TIMED["depth_attention 8, own"]}
    for window, read in product(TIMED_WINDOWS, TIMED):
        if window in windows and read in reads:
            swa, other = windows[window], reads[read]
            name = as_it_was.get(read, TIMED[read])
            yield Timed(f"{window}, {swa}", f"{name} {other}", _side_of_ranges(swa, other))


def _sentences(timed: Sequence[Timed]) -> Iterator[str]:
    for swa in dict.fromkeys(one.swa for one in timed):
        reads = {words: [one.depth for one in timed if (one.swa, one.side) == (swa, side)] for side, words in WORDS.items()}
        yield f"{swa}: " + "; ".join(f"{words} {', '.join(names)}" for words, names in reads.items() if names) + "."


def _side(swa: float, depth: float, margin: float = 0.0) -> Side:
    return "equal" if abs(swa - depth) <= margin else "cheaper" if swa < depth else "more expensive"


def _side_of_ranges(swa: Ratio, depth: Ratio) -> Side:
    if swa.lowest <= depth.highest and depth.lowest <= swa.highest:
        return "equal"
    return _side(swa.middle, depth.middle)


def leaning(sides: Sequence[Side]) -> Literal["for", "against", "open"]:
    """Where more than half of the comparisons point.

    Example:
        >>> leaning(["cheaper", "cheaper", "equal"]), leaning(["cheaper", "equal"]), leaning([])
        ('for', 'open', 'open')
    """
    if 2 * sides.count("cheaper") > len(sides):
        return "for"
    return "against" if 2 * sides.count("more expensive") > len(sides) else "open"


def decide(ledger: Sequence[Side], timed: Sequence[Side]) -> Verdict:
    """The verdict by the rule of the claim."""
    said = {leaning(ledger), leaning(timed)}
    if said == {"for"}:
        return "holds"
    return "does not hold at this scale" if "against" in said and "for" not in said else "undecided"


def _counted(what: str, sides: Sequence[Side]) -> str:
    counts = ", ".join(f"{side} in {sides.count(side)}" for side in ("cheaper", "more expensive", "equal"))
    return f"{what}: of {len(sides)} comparisons with a read over depth, ShortSWA is {counts}."


def _batch(shape: Shape) -> str:
    return f"{shape.batch} x {shape.tokens} tokens of {8 * shape.element_bytes} bits"


def _change(value: float) -> str:
    return change(value) if value else "0"


CLAIM = Claim(
    number=12,
    title="The sequence axis is usually more hardware-friendly",
    statement="For local mixing, ShortSWA along positions is usually cheaper on hardware than reads over depth: in bytes saved "
    "for backward, sent between pipeline stages and cached in generation, and in seconds.",
    source=f"{PAPER}, abstract and sections 2.4 and 3",
    tested="Bytes that each placement adds to a plain decoder at three sizes, by the declared costs that tests hold to "
    "measurement; seconds of a training step from the kept benchmarks, as ratios to the same plain decoder in one run.",
    compute=compute,
    rule="ShortSWA stands in every block, with a window of d/16. The ledger and the stopwatch each point where more than half "
    "of their comparisons do; bytes that differ by less than 5 % of the plain decoder's are equal, and so are seconds whose "
    "ranges overlap. The claim holds if both point to ShortSWA, does not hold at this scale if one points away and none to it, "
    f"and is undecided otherwise. {FIXED_ON}; the benchmarks were known then.",
)
