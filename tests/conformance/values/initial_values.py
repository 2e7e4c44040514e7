"""Writes what every parameter starts at under seed 0, in every case: `python -m tests.conformance.values.initial_values`.

A parameter is described by its shape, its tag and its numbers, or by its declared distribution and a digest of the bits that
are drawn. Blocks that start alike share a line. Of a depth mixer there is what the plain model lacks or starts otherwise.
"""

import functools
import hashlib
import itertools
import json
import re
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from twoaxis.core.parameters import Constant, Values, declarations, initial_values
from twoaxis.depth import DEPTH, ResidualConfig
from twoaxis.local import LOCAL
from twoaxis.model import Decoder
from twoaxis.testing.toy import D_MODEL, decoder_config, toy_site

from .cases import every_case

TABLE = Path(__file__).with_suffix(".json")

Starts = dict[str, str]
"""What parameters start at, by name; `blocks.0,2.` stands for two blocks."""


def starts(config: Any) -> Starts:
    """What the parameters of one mixer start at."""
    if config.kind not in DEPTH:
        local = (D_MODEL,) if config.kind in LOCAL else ()
        return joined(described(config.build(*local, toy_site())))
    own = described(Decoder(decoder_config(config)))
    return joined({name: start for name, start in own.items() if plain().get(name) != start})


@functools.cache
def plain() -> Starts:
    """What the parameters of the plain model start at."""
    return described(Decoder(decoder_config(ResidualConfig())))


def read() -> dict[str, Starts]:
    """The kept starts of the plain model and of every case, by the name of the case."""
    kept = json.loads(TABLE.read_text())
    return {name: kept[start] if isinstance(start, str) else start for name, start in kept.items()}


def write() -> None:
    """Keeps the starts as they are; a case that starts as an earlier one has the name of that."""
    found: dict[str, Starts] = {"plain": joined(plain()), **{case.name: starts(case.config) for case in every_case()}}
    first: dict[str, str] = {}
    kept = {name: first.setdefault(json.dumps(start), name) for name, start in found.items()}
    TABLE.write_text(json.dumps({name: found[name] if kept[name] == name else kept[name] for name in found}, indent=1) + "\n")


def described(model: nn.Module) -> Starts:
    """Every parameter by its full name."""
    found = {}
    for (name, _, declared), (_, value) in zip(declarations(model), initial_values(model, seed=0), strict=True):
        drawn = not isinstance(declared.init, Constant | Values)
        numbers = f"{declared.init} #{digest(value.numpy().tobytes())}" if drawn else runs(value)
        found[name] = f"{'x'.join(map(str, value.shape))} {declared.tag} {numbers}"
    return found


def joined(found: Starts) -> Starts:
    """The same with one line for blocks that start alike but for what is drawn, whose digests become one."""
    lines: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for name, start in found.items():
        before, block, after = re.fullmatch(r"(?:(blocks\.)(\d+)(\.))?.*", name).groups("")  # type: ignore[union-attr]
        rest = name[len(before + block + after) :]
        text, _, bits = start.partition(" #")
        lines.setdefault((before, after + rest, text), []).append((block, bits))
    described_once = {}
    for (before, rest, text), blocks in lines.items():
        bits = " ".join(bits for _, bits in blocks if bits)
        name = before + ",".join(block for block, _ in blocks) + rest
        described_once[name] = f"{text} #{digest(bits.encode())}" if bits else text
    return described_once


def runs(value: Tensor) -> str:
    """The numbers in order, equal neighbours once with how many they are."""
    equal = [(number, len(list(group))) for number, group in itertools.groupby(value.flatten().tolist())]
    return "= " + " ".join(f"{number:.7g}" + (f" *{times}" if times > 1 else "") for number, times in equal)


def digest(data: bytes) -> str:
    """The first 8 hex digits of the SHA-256."""
    return hashlib.sha256(data).hexdigest()[:8]


if __name__ == "__main__":
    write()
