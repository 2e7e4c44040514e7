"""Attention and SwiGLU under the names of a layout.

Letters: D width, H heads, G kv-heads, K key width, F hidden width.
"""

from collections.abc import Iterator
from typing import NamedTuple

from twoaxis.core.errors import ConfigError
from twoaxis.interop.state_maps.state_map import Entry, Part
from twoaxis.model import DecoderConfig
from twoaxis.sequence.heads import HeadsConfig


class HeadNames(NamedTuple):
    """What a layout calls the modules of attention, with a place for `q`, `k` or `v`."""

    projection: str
    output: str
    norm: str


def heads(config: HeadsConfig, d_model: int, ours: str, theirs: str, names: HeadNames) -> Iterator[Entry]:
    """Attention: the projections to heads and back, their biases, and the norms of queries and keys."""
    D, K, H, G = d_model, config.key_width(d_model), config.n_heads, config.kv_heads
    rows = {"q": H * K, "k": G * K, "v": G * K}
    projections = {f"{theirs}.{names.projection.format(x)}": n for x, n in rows.items()}
    yield Entry(f"{ours}.qkv.weight", tuple(Part(f"{name}.weight", (n, D)) for name, n in projections.items()))
    if config.bias == "qkv":
        yield Entry(f"{ours}.qkv_bias", tuple(Part(f"{name}.bias", (n,)) for name, n in projections.items()))
    yield Entry(f"{ours}.output.weight", (Part(f"{theirs}.{names.output}.weight", (D, H * K)),))
    if config.qk_norm != "none":
        for x in "qk":
            width = K if config.qk_norm_over == "head" else rows[x]
            yield Entry(f"{ours}.{x}_gain", (Part(f"{theirs}.{names.norm.format(x)}.weight", (width,)),))


def gated_mlp(d_model: int, d_ff: int, ours: str, theirs: str, names: tuple[str, str, str]) -> Iterator[Entry]:
    """SwiGLU: gate and value in one matrix of ours; the names are those of gate, value and output."""
    gate, up, down = names
    yield Entry(f"{ours}.gate_up.weight", tuple(Part(f"{theirs}.{name}.weight", (d_ff, d_model)) for name in (gate, up)))
    yield Entry(f"{ours}.down.weight", (Part(f"{theirs}.{down}.weight", (d_model, d_ff)),))


def check_blocks(config: DecoderConfig) -> None:
    """Refuses blocks that layouts have no names for.

    Raises:
        ConfigError: sublayers other than attention and SwiGLU.
    """
    for block in config.layers:
        kinds = [sublayer.kind for sublayer in block]
        if kinds != ["attention", "swiglu"]:
            raise ConfigError(f"blocks of {kinds}: must be ['attention', 'swiglu'] in this layout; keep our own format")
