"""The layouts of manifold-constrained Hyper-Connections of DeepSeek-V4 and V4.1: raw checkpoints, and transformers.

Letters: n streams, D width.
"""

from collections.abc import Callable

from twoaxis.checkpoints.layouts.state_map import DepthPaths, Entry, StateMap, entry
from twoaxis.core.errors import ConfigError, problem
from twoaxis.depth import MHCConfig
from twoaxis.depth.mhc_forms import ReadTime


def deepseek_v4(paths: DepthPaths) -> StateMap:
    """The names of transformers: `attn_hc` and `ffn_hc` of each layer, and `hc_head`.

    Source: transformers, DeepseekV4HyperConnection
    Raises:
        ConfigError: another depth mixer, scores per stream, or blocks of other than two sublayers.
    """

    def name(layer: int, site: str, what: str) -> str:
        return f"model.layers.{layer}.{site}_hc.{what}"

    entries = _entries(paths, name, "model.hc_head.hc_{}")
    return StateMap("deepseek_v4", entries, family=("model.layers.*.attn_hc.*", "model.layers.*.ffn_hc.*", "model.hc_head.*"))


def deepseek_v4_raw(paths: DepthPaths) -> StateMap:
    """The names of the published files: `hc_attn_fn`, `hc_ffn_fn` and so on, and `hc_head_fn`.

    Source: deepseek-ai, DeepSeek-V4 checkpoints
    Raises:
        ConfigError: another depth mixer, scores per stream, or blocks of other than two sublayers.
    """
    family = (*RAW_FAMILY, "hc_head_*")
    return StateMap("deepseek_v4_raw", _entries(paths, _raw, "hc_head_{}"), family=family)


def deepseek_v41(paths: DepthPaths) -> StateMap:
    """The names of the published files, which are those of V4 without a head: the last sublayer gives the read-out.

    Source: deepseek-ai, DeepSeek-V4.1 checkpoints, whose tensors of these names are in float32
    Raises:
        ConfigError: another depth mixer, reads that are not delayed, or blocks of other than two sublayers.
    """
    return StateMap("deepseek_v41", _entries(paths, _raw, "", "delayed"), family=RAW_FAMILY)


RAW_FAMILY = ("layers.*.hc_attn_*", "layers.*.hc_ffn_*")


def _raw(layer: int, site: str, what: str) -> str:
    return f"layers.{layer}.hc_{site}_{what}"


def _entries(
    paths: DepthPaths, name: Callable[[int, str, str], str], head: str, read: ReadTime = "current"
) -> tuple[Entry, ...]:
    depth = paths.depth
    fits = isinstance(depth, MHCConfig) and depth.form.scores == "joint" and set(paths.stack.block_lengths) == {2}
    if not isinstance(depth, MHCConfig) or not fits or depth.form.residual not in ("sinkhorn", "identity"):
        allowed = "mhc with joint scores in blocks of two sublayers"
        raise ConfigError(problem("depth", depth.kind, allowed, "use preset='deepseek_v4'"))
    if depth.form.read != read:
        preset = "deepseek_v4" if read == "current" else "deepseek_v41"
        raise ConfigError(problem("read", depth.form.read, f"{read!r} in this layout", f"use preset={preset!r}"))
    n, D, rows = depth.n_streams, paths.d_model, sum(depth.groups)
    shapes = {"fn": (rows, n * D), "base": (rows,), "scale": (len(depth.groups),)}
    found = []
    for index, ours in enumerate(paths.mixers):
        layer, site = index // 2, ("attn", "ffn")[index % 2]
        found += [entry(f"{ours}.{what}", name(layer, site, what), *shape) for what, shape in shapes.items()]
    if depth.form.read_out == "learned":
        shapes = {"fn": (n, n * D), "base": (n,), "scale": (1,)}
        found += [entry(f"{paths.ends}.{what}", head.format(what), *shape) for what, shape in shapes.items()]
    return tuple(found)
