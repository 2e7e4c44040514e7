"""`python docs/coordinates.py`: the coordinate check of every depth mixer, and its part of `docs/recipe.md`.

A model takes a few steps on random tokens; what its final hidden states change by is compared with a model of the base size.
Under `parametrization = "completep"` the change does not depend on width and depth, so the learning rate need not either. With
`page` it writes the page anew from the numbers that are kept; else it measures for about half an hour.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import altair as alt
import torch

# So that modules next to this file are found if a test loads it.
sys.path.append(str(Path(__file__).parent))
from markup import table
from twoaxis.data import Batch
from twoaxis.depth import DEPTH
from twoaxis.display.figures import Figure, own_color, side_by_side, values
from twoaxis.display.theme import ARMS, MUTED
from twoaxis.model import Decoder, DecoderConfig
from twoaxis.train.optim import OptimizerConfig, Rule, build_optimizer, parameter_groups
from twoaxis.train.parallel.placement import Placement
from twoaxis.train.step import take_step

DOCS = Path(__file__).parent
PAGE, KEPT, FIGURE = DOCS / "recipe.md", DOCS / "coordinates.json", DOCS / "figures" / "coordinates.svg"
BEGIN, END = "<!-- Written by docs/coordinates.py. -->\n", "<!-- End. -->\n"

BASE, HEAD_DIM, VOCAB, STEPS, LR = (32, 2), 16, 64, 4, 2e-3
"""Width and blocks of the base size; the rest is the same at all sizes."""

WIDTHS, DEPTHS = (32, 64, 128, 256), (2, 4, 8, 16)
OPTIMIZERS: dict[Rule, str] = {"adamw": "AdamW", "muon": "Muon"}

CHANGES = {
    "residual": "nothing: the stream is the sum of updates, each times 1/m_L",
    "residual_scalars": "both scalars act on the stream itself: rate 1/m_L",
    "attention_residuals": "nothing: the norm after a read undoes the division by the number of sources, so updates keep the "
    "factor that they have in the plain model. `inkling2` normalises sources, which removes the factor: its change grows with "
    "depth; the map of token queries (`query = 'token'`) is summed over the width twice: its change grows with the width",
    "delta_attention_residuals": "nothing: reads are added to a stream of scaled updates",
    "depth_attention": "W_O of a read joins the stream itself: rate 1/m_L, as that of W_Q, W_K, W_V without it; its own heads "
    "keep their width only if `head_dim` is given",
    "deep_cross_attention": "nothing: one weighted sum of scaled block outputs is read at a time. `middle = 'drop'` forgets "
    "all updates but the newest, of which each has the factor 1/m_L: its change falls with depth",
    "deep_delta": "an update gives a direction without length, so beta has the factor 1/m_L",
    "denseformer": "a row weights all earlier outputs, and the stream passes through all rows: rate 1/m_L^2; gains of "
    "skips 1/m_L",
    "elc_bert": "softmax weights: nothing; `normalized` outputs have lost the factor: their logits start at log(1/m_L). "
    "Beside a raw embedding (`embedding_norm = 'none'`) its change doubles with depth",
    "frac_connections": "weights and maps of the residual act on the streams: rate 1/m_L; those of the write scale an update",
    "hyper_connections": "weights and maps of the residual act on the streams: rate 1/m_L; those of the write scale an update",
    "mhc": "one parameter holds the maps of read, write and residual: rate 1/m_L for its map, bias and scale, unless the "
    "residual is the identity",
    "gated_residual": "nothing: streams keep their sum, and gates scale the read and the update",
    "muddformer": "sums weight all earlier outputs, and the stream passes through all of them: static weights and the last "
    "map have rate 1/m_L^2, gains of norms behind a sum 1/m_L; where sums start far from the plain stream, that is more than "
    "needed",
    "vertical_attention": "softmax weights: nothing; normalised deltas have lost the factor: their logits start at log(1/m_L)",
    "laurel": "weights and maps act on the stream: rate 1/m_L",
    "laurel_gemma3n": "updates are normalised, so the factor 1/m_L comes after their norms",
    "norm_placement": "norms of updates (`sandwich`, `reordered`) remove the factor, so it comes after them. Norms of the sum "
    "(`post`, `mix`, `keel`, `deepnorm`) rescale the stream in every layer; `deepnorm` and `keel` scale by depth themselves; a "
    "learned blend has rate 1/m_L",
    "residual_dual": "nothing: both streams take the scaled update, of which one is normalised in every layer",
    "siamese_norm": "nothing: both streams take the scaled update",
    "two_lanes": "weights of lanes and of the embedding act on the streams: rate 1/m_L; those of the write scale an update",
    "depth_value_mixing": "nothing: values of earlier layers are mixed inside a branch",
    "mixture_of_depths_attention": "nothing: keys and values of earlier layers are seen inside a branch",
    "value_embedding": "nothing: rows of the table are added to values; tables have the rate of the embedding",
    "per_layer_embedding": "a normalised vector joins the stream in every block: its gain starts at 1/m_L and has rate 1/m_L",
    "lime": "a router weights the heads of all earlier layers: rate 1/m_L, and 1/m_N for their number",
    "value_residual": "nothing: two sets of values are mixed inside a branch",
}
"""What completeP changes about each depth mixer; m_N and m_L are width and depth over those of the base size."""

APART = {
    "attention_residuals-inkling2": "sources are normalised, which removes the factor of updates",
    "attention_residuals-token": "the query of a token is summed over the width twice",
    "deep_cross_attention-package": "all updates but the newest are dropped",
    "mixture_of_depths_attention-post": "the stream is normalised in every layer",
    "norm_placement-sandwich": "normalised updates have a scale that Muon does not know",
    "norm_placement-post": "the stream is normalised in every layer",
    "norm_placement-deepnorm": "the stream is normalised in every layer, with a scale by depth of its own",
    "elc_bert-raw_embedding": "normalised outputs next to an embedding that is not",
}
"""Examples whose change depends on the size, and why."""


def model_of(depth: Any, size: tuple[int, int], parametrization: str = "completep") -> DecoderConfig:
    """A decoder of this width and depth; heads keep their width."""
    width, layers = size
    base = {"base_d_model": BASE[0], "base_n_layers": BASE[1]} if parametrization == "completep" else {}
    attention = {"kind": "attention", "n_heads": width // HEAD_DIM, "head_dim": HEAD_DIM}
    sizes = {"vocab_size": VOCAB, "d_model": width, "n_layers": layers, "max_seq_len": 64}
    options = {"depth": depth, "blocks": [[attention, "swiglu"]], "parametrization": parametrization}
    return DecoderConfig.from_data({**sizes, **options, **base})


def change(config: DecoderConfig, kind: Rule = "adamw", rows: int = 8, tokens: int = 16) -> float:
    """The root mean square of what the final hidden states change by in the first steps."""
    model, optimizer = Decoder.build(config, seed=0), OptimizerConfig(kind=kind, lr=LR)
    built = build_optimizer(parameter_groups(model, optimizer), optimizer)
    drawn = torch.randint(VOCAB, (STEPS + 1, rows, tokens + 1), generator=torch.Generator().manual_seed(1))
    *batches, held_out = (Batch(one[:, :-1].contiguous(), one[:, 1:].contiguous(), None) for one in drawn)

    @torch.no_grad()
    def hidden() -> torch.Tensor:
        found, _ = model.hidden(model.embed(held_out.tokens), tokens=held_out.tokens)
        # The norm has the factor of the logits in it.
        return found / config.logit_scale

    before = hidden()
    for batch in batches:
        take_step(
            Placement(),
            lambda one: model.loss(one.tokens, one.targets)[0],
            built,
            batch,
            rows=rows,
            multiplier=1.0,
            clip_norm=1.0,
        )
    return (hidden() - before).square().mean().sqrt().item()


def sizes() -> Iterator[tuple[int, int]]:
    """Every width at the depth of the base size, and every depth at its width."""
    yield from ((width, BASE[1]) for width in WIDTHS)
    yield from ((BASE[0], layers) for layers in DEPTHS[1:])


def measure() -> dict[str, Any]:
    """All changes: of the plain model at all sizes, and of every example at four times the width or depth of the base size."""
    plain = [
        {"optimizer": kind, "parametrization": way, "d_model": size[0], "n_layers": size[1]}
        | {"change": change(model_of("residual", size, way), kind)}
        for kind in OPTIMIZERS
        for way in ("standard", "completep")
        for size in sizes()
    ]
    mixers = {}
    for row in DEPTH:
        for name in row.examples:
            found = {}
            for kind in OPTIMIZERS:
                base, wide, deep = (change(model_of(row.example(name), size), kind) for size in (BASE, (128, 2), (32, 8)))
                found[kind] = [round(wide / base, 2), round(deep / base, 2)]
            mixers[f"{row.kind}-{name}"] = found
            print(f"{row.kind}-{name}: {found}", file=sys.stderr)
    return {"plain": plain, "mixers": mixers}


def drawing(data: Mapping[str, Any]) -> Figure:
    """The changes of the plain model over widths and over depths."""
    rows = data["plain"]
    colors = dict(zip(OPTIMIZERS, ARMS, strict=False))

    def panel(along: str, width: int) -> Any:
        fixed = "n_layers" if along == "d_model" else "d_model"
        least = min(row[fixed] for row in rows)
        own = [
            row | {"color": colors[row["optimizer"]], "name": f"{row['optimizer']} {row['parametrization']}"}
            for row in rows
            if row[fixed] == least
        ]
        scale = alt.Scale(type="log", base=2, nice=False)
        ticks = alt.Axis(values=sorted({row[along] for row in own}), format="d")
        x = alt.X(f"{along}:Q", title=f"{along}, {fixed} = {least}", scale=scale, axis=ticks)
        y = alt.Y("change:Q", title="change of the final hidden states", scale=alt.Scale(type="log", domain=[0.05, 2.0]))
        lines = [
            values([row for row in own if row["parametrization"] == way])
            .mark_line(point=True, strokeDash=[] if way == "completep" else [4, 3])
            .encode(x=x, y=y, detail="name:N", color=own_color())
            for way in ("completep", "standard")
        ]
        last = [row for row in own if row[along] == max(each[along] for each in own)]
        named = [
            values([row for row in last if row["parametrization"] == way])
            .mark_text(align="left", dx=6, dy=dy, color=MUTED)
            .encode(x=x, y=y, text="name:N")
            for way, dy in (("completep", 6), ("standard", -6))
        ]
        return alt.layer(*lines, *named).properties(width=width - 150, height=220)

    def draw(width: int) -> Any:
        return side_by_side([panel("d_model", width // 2), panel("n_layers", width // 2)], width, 2)

    caption = (
        f"Root mean square of what the final hidden states of the plain model change by in {STEPS} steps at learning rate "
        f"{LR:g}. Solid: completeP from a base of width {BASE[0]} and {BASE[1]} blocks; dashed: the standard parametrization."
    )
    ends = {way: [row["change"] for row in rows if row["parametrization"] == way] for way in ("standard", "completep")}
    said = "; ".join(f"{way}: {min(found):.2f} to {max(found):.2f}" for way, found in ends.items())
    return Figure("coordinates", "How far the first steps move a model, by width and depth", caption, said, draw)


def part(data: Mapping[str, Any]) -> str:
    """The part of the page with numbers."""
    rows = []
    for row in DEPTH:
        names = [f"{row.kind}-{name}" for name in row.examples]
        usual = [data["mixers"][name] for name in names if name not in APART]
        cells = [span(one[kind][index] for one in usual) for kind in OPTIMIZERS for index in (0, 1)]
        rows.append((f"`{row.kind}`", CHANGES[row.kind], *cells))
    columns = [f"{title}, 4 times the {size}" for title in OPTIMIZERS.values() for size in ("width", "depth")]
    lines = table(("mixer", "what completeP changes about it", *columns), rows)
    lines += ["Left out of the ranges above:\n"]
    apart = [
        (f"`{name}`", why, *(f"{one:.2f}" for kind in OPTIMIZERS for one in data["mixers"][name][kind]))
        for name, why in APART.items()
    ]
    return "\n".join([*lines, *table(("example", "why", *columns), apart)])


def span(found: Iterator[float]) -> str:
    """The smallest and the largest of some numbers."""
    known = sorted(found)
    return f"{known[0]:.2f}" if known[0] == known[-1] else f"{known[0]:.2f} to {known[-1]:.2f}"


def page(data: Mapping[str, Any]) -> str:
    """The page with the numbers in it."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + "\n" + part(data) + END + rest.partition(END)[2]


def main(*words: str) -> int:
    """Measures, unless told to write the page alone, and writes."""
    if words != ("page",):
        KEPT.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
    data = json.loads(KEPT.read_text(encoding="utf-8"))
    PAGE.write_text(page(data), encoding="utf-8")
    FIGURE.write_text(drawing(data).svg(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
