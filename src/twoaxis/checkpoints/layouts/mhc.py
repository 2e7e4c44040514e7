"""The layouts of DeepSeek-V4's manifold-constrained Hyper-Connections: raw checkpoints, and transformers.

Letters: n streams, D width.
"""

from collections.abc import Callable

from twoaxis.checkpoints.layouts.state_map import DepthPaths, Entry, StateMap, entry
from twoaxis.core.errors import ConfigError, problem
from twoaxis.depth import MHCConfig


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

    def name(layer: int, site: str, what: str) -> str:
        return f"layers.{layer}.hc_{site}_{what}"

    family = ("layers.*.hc_attn_*", "layers.*.hc_ffn_*", "hc_head_*")
    return StateMap("deepseek_v4_raw", _entries(paths, name, "hc_head_{}"), family=family)


def _entries(paths: DepthPaths, name: Callable[[int, str, str], str], head: str) -> tuple[Entry, ...]:
    depth = paths.depth
    if not isinstance(depth, MHCConfig) or depth.form.scores != "joint" or set(paths.stack.block_lengths) != {2}:
        allowed = "mhc with joint scores in blocks of two sublayers"
        raise ConfigError(problem("depth", depth.kind, allowed, "use preset='deepseek_v4'"))
    n, D = depth.n_streams, paths.d_model
    rows = n * (n + 2) if depth.form.residual == "sinkhorn" else 2 * n
    shapes = {"fn": (rows, n * D), "base": (rows,), "scale": (3 if depth.form.residual == "sinkhorn" else 2,)}
    found = []
    for index, ours in enumerate(paths.mixers):
        layer, site = index // 2, ("attn", "ffn")[index % 2]
        found += [entry(f"{ours}.{what}", name(layer, site, what), *shape) for what, shape in shapes.items()]
    if depth.form.read_out == "learned":
        shapes = {"fn": (n, n * D), "base": (n,), "scale": (1,)}
        found += [entry(f"{paths.ends}.{what}", head.format(what), *shape) for what, shape in shapes.items()]
    return tuple(found)
