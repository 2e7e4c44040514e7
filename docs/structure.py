"""Draws the packages of `src/twoaxis` by floor, with their sizes, into `docs/figures/structure.svg`."""

import ast
import textwrap
import tomllib
from html import escape
from pathlib import Path

ROOT = Path(__file__).parent.parent
WIDTH, GAP, HEIGHT, LEAST = 1120, 8, 100, 132
WALK = {
    "cli": "1 reads the command line",
    "train": "2 recipe and run folder, 10 gradients, clipping, AdamW",
    "data": "3 a batch of tokens [B T]",
    "model": "4 embeds [B T D], 9 norm and head",
    "depth": "5 reads the state, 8 writes the update",
    "sequence": "6 projects and mixes positions",
    "ops": "7 the kernel, forward and backward",
}
"""Steps of the walk of one tensor in CONTRIBUTING.md, by package."""


def floors() -> list[list[str]]:
    """Returns the packages of each floor, from the top, as the import contract of pyproject.toml lists them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [[name.strip(" ()").removeprefix("twoaxis.") for name in layer.split("|")] for layer in layers]


def size_and_words(package: str) -> tuple[int, int, str]:
    """Returns the number of files and of lines of a package, and the first sentence of its docstring."""
    path = ROOT / "src" / "twoaxis" / package
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    first = path / "__init__.py" if path.is_dir() else files[0]
    words = (ast.get_docstring(ast.parse(first.read_text())) or "").split("\n\n")[0].replace("\n", " ")
    words = words.split(": ", 1)[-1] if words.startswith("Floor") else words
    return len(files), sum(len(file.read_text().splitlines()) for file in files), words.split(". ")[0].rstrip(".")


def box(x: float, y: float, width: float, package: str) -> list[str]:
    """Returns the lines of one package's box: name, size, words, and its place in the walk."""
    files, lines, words = size_and_words(package)
    noun = "file" if files == 1 else "files"
    wrapped = textwrap.wrap(words, max(12, int((width - 16) / 6.1)))
    wrapped = wrapped if len(wrapped) <= 3 else [*wrapped[:2], wrapped[2].rstrip(",;:") + " …"]
    found = [
        f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="{HEIGHT}" rx="6" class="room"/>',
        f'<text x="{x + 8:.0f}" y="{y + 19}" class="name">{package}</text>',
        f'<text x="{x + 8:.0f}" y="{y + 35}" class="words">{files} {noun}, {lines / 1000:.1f}k lines</text>',
    ]
    for i, line in enumerate(wrapped):
        found.append(f'<text x="{x + 8:.0f}" y="{y + 51 + 13 * i}" class="words">{escape(line)}</text>')
    if package in WALK:
        found.append(f'<text x="{x + 8:.0f}" y="{y + HEIGHT - 8}" class="walk">{WALK[package]}</text>')
    return found


def drawing() -> str:
    """Returns the drawing as SVG; a box is as wide as its package has lines."""
    rows, found, y = floors(), [], 8
    listed = {package for row in rows for package in row}
    packages = {path.parent.name for path in (ROOT / "src" / "twoaxis").glob("*/__init__.py")}
    rows[0] += sorted(packages - listed)
    sizes = {package: size_and_words(package)[1] for package in packages | listed}
    scale = min((WIDTH - 16 - (LEAST + GAP) * len(row)) / sum(sizes[package] for package in row) for row in rows)
    for row in rows:
        x = 8.0
        for package in row:
            width = LEAST + scale * sizes[package]
            found += box(x, y, width, package)
            x += width + GAP
        y += HEIGHT + GAP
    colours = [
        ".room{fill:#f3f5f9;stroke:#8a94a6}.name{fill:#1b2333}.words{fill:#4a5568}.walk{fill:#b3541e}",
        ".room{fill:#1d2430;stroke:#5a6578}.name{fill:#eef2f8}.words{fill:#b6c0d0}.walk{fill:#f0a36b}",
    ]
    style = f"text{{font:11px sans-serif}}.name{{font-size:14px}}.name,.walk{{font-weight:bold}}{colours[0]}"
    style += f"@media (prefers-color-scheme:dark){{{colours[1]}}}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img" aria-label="Packages by floor">'
    return "\n".join([head, f"<style>{style}</style>", *found, "</svg>", ""])


if __name__ == "__main__":
    (ROOT / "docs" / "figures" / "structure.svg").write_text(drawing())
