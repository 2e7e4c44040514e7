"""The layout of the Deep Delta Learning repository.

Letters: D width, C value channels.
"""

from collections.abc import Iterator
from typing import cast

from twoaxis.checkpoints.layouts.llama import HeadNames, check_blocks, embedding_and_head, gated_mlp, heads, tied
from twoaxis.checkpoints.layouts.state_map import Entry, StateMap, entry
from twoaxis.core.errors import ConfigError, problem
from twoaxis.depth import DeepDeltaConfig
from twoaxis.feed_forward import SwiGLUConfig
from twoaxis.model import DecoderConfig
from twoaxis.sequence.heads import HeadsConfig

EMBEDDING, HEAD = "transformer.wte.weight", "lm_head.weight"
HEADS, MLP = HeadNames("c_{}", "c_proj", "{}_rms"), ("c_fc1", "c_fc2", "c_proj")


def deep_delta(config: DecoderConfig) -> StateMap:
    """The whole decoder of `DDL-gpt-mha-rope*.py`, with one value channel or several.

    Source: yifanzhang-pro/deep-delta-learning, arXiv:2601.00417
    Raises:
        ConfigError: another depth mixer, the target or the gate bias of the paper, which the code lacks, or grouped kv-heads.
    """
    depth = config.depth
    if not isinstance(depth, DeepDeltaConfig):
        raise ConfigError(problem("depth", depth.kind, "deep_delta", "use kind='deep_delta' with value_target='code'"))
    if depth.value_target == "paper":
        allowed = "a target of the released code, whose checkpoints these are"
        raise ConfigError(problem("value_target", depth.value_target, allowed, "set value_target='code'"))
    if depth.gate == "two_layer_bias":
        raise ConfigError(problem("gate", depth.gate, "'linear' or 'two_layer' of the released code", "use gate='two_layer'"))
    check_blocks(config)
    return StateMap("deep_delta", tuple(_entries(config, depth)), tied=tied(config, HEAD, EMBEDDING))


def _entries(config: DecoderConfig, depth: DeepDeltaConfig) -> Iterator[Entry]:
    D = config.d_model
    yield from embedding_and_head(config, EMBEDDING, "ln_f.weight", HEAD)
    yield from _compressor("ends.readout", "readout", depth, D)
    if depth.expansion == "embedding_conv":
        shape = (depth.value_channels * D, 1, depth.kernel_size)
        yield entry("ends.embedding_weight", "input_embed.conv.weight", *shape)
    sites = config.stack.sites
    for layer, (attention, swiglu) in enumerate(config.layers):
        ours, theirs = f"blocks.{layer}", f"transformer.h.{layer}"
        yield from _compressor(f"{ours}.attention.depth.compressor", f"{theirs}.compress", depth, D)
        for kind, number, name in (("attention", 1, "ddl_attn"), ("swiglu", 2, "ddl_mlp")):
            yield entry(f"{ours}.{kind}.norm.gain", f"{theirs}.ln_{number}.weight", D)
            yield from _write(f"{ours}.{kind}.depth", f"{theirs}.{name}", depth, D)
        yield from heads(cast(HeadsConfig, attention), D, f"{ours}.attention.mixer", f"{theirs}.attn", HEADS)
        F = cast(SwiGLUConfig, swiglu).width_at(sites[2 * layer + 1])
        yield from gated_mlp(D, F, f"{ours}.swiglu.mixer", f"{theirs}.mlp", MLP)


def _write(ours: str, theirs: str, depth: DeepDeltaConfig, D: int) -> Iterator[Entry]:
    C = depth.value_channels
    yield entry(f"{ours}.target_weight", f"{theirs}.v_proj.weight", C, D)
    yield entry(f"{ours}.target_bias", f"{theirs}.v_proj.bias", C)
    two_layer = depth.gate == "two_layer"
    gate, width = (f"{theirs}.beta_out", depth.gate_width) if two_layer else (f"{theirs}.beta", D)
    yield entry(f"{ours}.gate.weight", f"{gate}.weight", 1, width)
    yield entry(f"{ours}.gate.bias", f"{gate}.bias", 1)
    if two_layer:
        yield entry(f"{ours}.gate.hidden_weight", f"{theirs}.beta_in.weight", width, D)


def _compressor(ours: str, theirs: str, depth: DeepDeltaConfig, D: int) -> Iterator[Entry]:
    C = depth.value_channels
    if depth.compressor == "time":
        yield entry(f"{ours}.weight", f"{theirs}.shortconv.weight", C * D, depth.kernel_size)
    elif depth.compressor == "channel":
        yield entry(f"{ours}.weight", f"{theirs}.weight", D, C)
    if depth.compressor != "none":
        yield entry(f"{ours}.read_weight", f"{theirs}.read", C)
