"""Schematics of mixers: what each sublayer or token reads, measured at toy size, as SVG with one scale for all of them."""

from collections.abc import Sequence
from html import escape
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from twoaxis.core.registry import Row
from twoaxis.depth import DepthConfig
from twoaxis.model import Decoder
from twoaxis.testing.measured import read_and_write, sublayer_list, tensors, trace
from twoaxis.testing.toy import TOKENS, noise, toy_context, toy_decoder, toy_layout, toy_mixer, toy_tokens

N_LAYERS = 4
STEPS = (0.0, 0.1, 0.5, 0.9, 1.1, 4.0)
"""The shades: the first number of each; 0.9 to 1.1 is a read of the plain residual stream."""
CELL, LEFT, TOP, GAP = 30, 92, 24, 40

_LIGHT = ("#f3f5f9", "#d9e7f5", "#b1d2ec", "#7db4dd", "#2d74ad", "#0b3a66"), "#ffffff", "#1b2333", "#5c6470", "#ffffff"
_DARK = ("#232b37", "#22384f", "#24507a", "#2c6da6", "#7fbdee", "#d3e9fc"), "#14181e", "#eef2f8", "#a9b4c3", "#0d1116"


def schematic(axis: str, row: Row[Any]) -> str | None:
    """The drawing of the first example of a row; None for a feed-forward, which reads its own token only."""
    config = row.example(next(iter(row.examples)))
    if isinstance(config, DepthConfig):
        panels = {
            title: _depth_pattern(toy_decoder(config, n_layers=N_LAYERS, perturbed=perturbed))
            for title, perturbed in (("at initialisation", False), ("away from it", True))
        }
        parts = [f"{part} {block + 1}" for block in range(N_LAYERS) for part in ("attention", "feed-forward")]
        return _drawing(row.kind, panels, ["embedding", *parts], [*parts, "head"], ("read of", "update of"))
    if axis == "feed_forward":
        return None
    names = [f"token {index + 1}" for index in range(TOKENS)]
    return _drawing(row.kind, {"away from initial values": _token_pattern(config)}, names, names, ("output at", "input at"))


@torch.no_grad()
def _depth_pattern(model: Decoder) -> list[list[float | None]]:
    """The change of each read, row by row, when one earlier update changes by 1: the pattern of the depth mixer alone."""
    tokens = toy_tokens()
    run = trace(model, tokens)
    embeddings = model.embed(tokens)
    plain = _reads(model, run, embeddings, list(run.updates))
    columns = []
    for origin in range(len(run.updates) + 1):
        updates, moved = list(run.updates), embeddings
        disturbance = 1e-3 * noise(tuple((updates[origin - 1] if origin else embeddings).shape), f"docs/{origin}")
        if origin:
            updates[origin - 1] = updates[origin - 1] + disturbance
        else:
            moved = embeddings + disturbance
        changes = [
            max(float((a - b).norm() / disturbance.norm()) for a, b in zip(after, before, strict=True))
            for before, after in zip(plain, _reads(model, run, moved, updates), strict=True)
        ]
        columns.append([change if reader >= origin else None for reader, change in enumerate(changes)])
    return [list(row) for row in zip(*columns, strict=True)]


def _reads(model: Decoder, run: Any, embeddings: Tensor, updates: list[Tensor]) -> list[list[Tensor]]:
    """The reads of every sublayer and the head for given updates; contexts and heads are unchanged."""
    state, seen = model.ends.enter(embeddings)[0], []
    for index, sublayer in enumerate(sublayer_list(model)):
        given = (updates[index], run.contexts[index], run.heads[index], run.layout)
        views, _, state = read_and_write(sublayer.depth, state, *given)
        seen.append(tensors(tree_map(torch.clone, views)))
    return [*seen, [model.ends.leave(state)[0]]]


@torch.no_grad()
def _token_pattern(config: Any) -> list[list[float | None]]:
    """The change of each output, row by row, when the input at one token changes by 1."""
    mixer, context = toy_mixer(config), toy_context()
    layout = toy_layout(context)
    plain, _ = mixer(context, layout)
    columns = []
    for source in range(TOKENS):
        disturbance = 1e-3 * noise((2, context.shape[-1]), f"docs/{source}")
        moved = context.clone()
        moved[:, source] += disturbance
        change = (mixer(moved, layout)[0] - plain).norm(dim=(0, 2)) / disturbance.norm()
        columns.append([float(value) if reader >= source else None for reader, value in enumerate(change)])
    return [list(row) for row in zip(*columns, strict=True)]


def _drawing(kind: str, panels: dict[str, Any], columns: list[str], rows: list[str], axes: tuple[str, str]) -> str:
    side, bottom = CELL * len(columns), TOP + CELL * len(rows)
    width, height = max(560, LEFT + len(panels) * (side + GAP)), bottom + 124
    found = [f'<rect width="{width}" height="{height}" class="paper"/>']
    for panel, (title, pattern) in enumerate(panels.items()):
        x = LEFT + panel * (side + GAP)
        found.append(f'<text x="{x}" y="16" class="title">{escape(title)}</text>')
        for r, values in enumerate(pattern):
            cells = ((c, value) for c, value in enumerate(values) if value is not None)
            found += [line for c, value in cells for line in _cell(x + CELL * c, TOP + CELL * r, value)]
        for c, name in enumerate(columns):
            place = f"translate({x + CELL * c + CELL / 2 + 4:g} {bottom + 6}) rotate(-90)"
            found.append(f'<text transform="{place}" text-anchor="end">{escape(name)}</text>')
    found += [
        f'<text x="{LEFT - 6}" y="{TOP + CELL * r + CELL / 2 + 4:g}" text-anchor="end">{escape(name)}</text>'
        for r, name in enumerate(rows)
    ]
    words = f"{axes[0]} (row) moves by, when {axes[1]} (column) moves by 1:"
    found += _legend(words, height - 14)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img"'
    )
    label = f'aria-label="{escape(f"{kind}: {words} {_words(panels)}")}">'
    return "\n".join([f"{head} {label}", f"<style>{_style()}</style>", *found, "</svg>", ""])


def _cell(x: float, y: float, value: float) -> Sequence[str]:
    shade = max(index for index, start in enumerate(STEPS) if value >= start)
    # A number at rounding distance of zero is none.
    if value < 5e-4:
        return (f'<rect x="{x}" y="{y}" width="{CELL - 1}" height="{CELL - 1}" class="s0"/>',)
    number = (
        f"{value:.2f}".lstrip("0") if value < 0.995 else f"{value:.1f}".removesuffix(".0") if value < 9.95 else f"{value:.0f}"
    )
    return (
        f'<rect x="{x}" y="{y}" width="{CELL - 1}" height="{CELL - 1}" class="s{shade}"/>',
        f'<text x="{x + CELL / 2 - 0.5:g}" y="{y + CELL / 2 + 3.5:g}" text-anchor="middle" class="n{shade}">{number}</text>',
    )


def _legend(words: str, y: int) -> list[str]:
    found, x = [f'<text x="8" y="{y - 20}">{words}</text>'], 8
    ends = (*(f"below {end:g}" for end in STEPS[1:4]), "as in the residual stream", "below 4", "4 or more")
    for shade, text in enumerate(ends):
        found.append(
            f'<rect x="{x}" y="{y - 10}" width="12" height="12" class="s{shade}"/><text x="{x + 16}" y="{y}">{text}</text>'
        )
        x += 28 + round(4.75 * len(text))
    return found


def _words(panels: dict[str, Any]) -> str:
    """The last row of each panel in words, for readers who cannot see it."""
    last = {title: ", ".join(f"{value:.2g}" for value in pattern[-1] if value is not None) for title, pattern in panels.items()}
    return "; ".join(f"last row {title}: {numbers}" for title, numbers in last.items())


def _style() -> str:
    def colours(shades: tuple[str, ...], paper: str, ink: str, muted: str, strong: str) -> str:
        cells = "".join(f".s{index}{{fill:{shade}}}" for index, shade in enumerate(shades))
        return f".paper{{fill:{paper}}}text{{fill:{muted}}}.title,.n0,.n1,.n2,.n3{{fill:{ink}}}.n4,.n5{{fill:{strong}}}{cells}"

    fixed = "text{font:11px sans-serif}.title{font-size:13px;font-weight:bold}.n0,.n1,.n2,.n3,.n4,.n5{font-size:10px}"
    return f"{fixed}{colours(*_LIGHT)}@media (prefers-color-scheme:dark){{{colours(*_DARK)}}}"
