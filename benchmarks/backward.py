"""`python benchmarks/backward.py`: what every hand-written backward pass gains in a training step, over its plain form.

Kernels are off, since they replace such passes. A pass that gains less than a tenth of a step, in time or in what the step
saves for its backward pass, is not worth its code.
Saved bytes are counted, in three precisions, and do not depend on the machine's load: `--rounds 0` counts them alone.
"""

import argparse
import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Run as a script, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import models
from benchmarks.measure import header_lines, interleave
from benchmarks.peers import PeerShape
from twoaxis import Decoder
from twoaxis.core.measure import saved_bytes
from twoaxis.ops import kernels

SHAPE = PeerShape()
ATTENTION = {"kind": "attention", "n_heads": SHAPE.n_heads}

OPERATORS: dict[str, tuple[str, Any, tuple[Any, ...]]] = {
    "rms_norm": ("norm", "residual", ()),
    "layer_norm": ("norm", {"kind": "norm_placement", "placement": "deepnorm"}, ()),
    "silu_gate": ("gated_linear", "residual", ()),
    "weight_mlp": ("weight_mlp", "muddformer", ()),
    "_factor: source_factor": ("depth_read", "attention_residuals", ()),
    "grn": ("grn", "deep_cross_attention", ()),
    "hyper_read": ("hyper_read", {"kind": "hyper_connections", "n_streams": 4}, ()),
    "joint_scores": ("scores", {"kind": "mhc", "n_streams": 4}, ()),
    "stream_scores": ("scores", {"kind": "mhc", "n_streams": 4, "scores": "per_stream"}, ()),
    "sinkhorn": ("sinkhorn", {"kind": "mhc", "n_streams": 4}, ()),
    "gated_read": ("gated_read", {"kind": "gated_residual", "n_streams": 4}, ()),
    "delta_writes": ("delta", "deep_delta", ()),
    "delta_writes: 4 channels": ("delta", {"kind": "deep_delta", "value_channels": 4, "compressor": "channel"}, ()),
    "row_product": ("scores", "deep_delta", ()),
    "linear_scores: value residual": ("scores", {"kind": "value_residual", "variant": "gated"}, ()),
    "linear_scores: Gated DeltaNet": ("scores", "residual", ("gated_delta_net",)),
    "causal_conv_sum: ShortConv": ("causal_conv", "residual", ("short_conv", ATTENTION)),
    "causal_conv_sum: DDL TC": ("causal_conv", {"kind": "deep_delta", "value_channels": 4, "compressor": "time"}, ()),
    "_convolve: token_taps": ("token_taps", "residual", ({**ATTENTION, "projected_local": "dynamic_conv"},)),
    "ngram_gate": ("ngram_gate", "residual", ("ngram_embedding", ATTENTION)),
}
"""By function, and what calls it: its module, a depth mixer, and the sublayers in place of attention, if not that alone."""

PRECISIONS = {"float32": (torch.float32, False), "bfloat16": (torch.bfloat16, False), "autocast": (torch.float32, True)}
"""The dtype of the model, and whether it runs under autocast to bfloat16."""


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=list(OPERATORS), choices=list(OPERATORS), metavar="OPERATOR")
    options = parser.parse_args()
    print(header_lines(), "\n")
    with kernels.without_kernels():
        _table(options.only, options.rounds)


def _table(names: list[str], rounds: int) -> None:
    print(f"| operator | plain step / step (min..max) | {' | '.join(f'saved bytes, {name}' for name in PRECISIONS)} |")
    print("|---|---|---|---|---|")
    for name in names:
        module, depth, sublayers = OPERATORS[name]
        function = name.partition(":")[0]
        model = models.decoder(SHAPE, depth, sublayers)
        time = _time(model, module, function, rounds) if rounds else "-"
        saved = [f"{_saved_ratio(model, module, function, *precision):.2f}" for precision in PRECISIONS.values()]
        print(f"| {name} | {time} | {' | '.join(saved)} |", flush=True)


def _time(model: Decoder, module: str, function: str, rounds: int) -> str:
    own = models.loss_step(model, SHAPE.tokens())

    def plain() -> Tensor:
        with _plain(module, function):
            return own()

    timing = interleave({"own": own, "plain": plain}, rounds=rounds, warmup=1)[-1]
    return f"**{timing.ratio:.2f}** ({timing.lowest:.2f}..{timing.highest:.2f})"


def _saved_ratio(model: Decoder, module: str, function: str, dtype: torch.dtype, autocast: bool) -> float:
    """Bytes saved for the backward pass, parameters aside: the plain form's over the own pass's."""
    model, tokens = model.to(dtype), SHAPE.tokens()
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss() -> object:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model.loss(inputs, targets)

    own = saved_bytes(loss, lambda _: model.parameters())
    with _plain(module, function):
        return saved_bytes(loss, lambda _: model.parameters()) / own


@contextmanager
def _plain(name: str, function: str) -> Iterator[None]:
    """Lets one function of a module run in its plain form."""
    module: Any = importlib.import_module(f"twoaxis.ops.{name}")
    before = module.runs_plain
    asked: list[str] = []

    def runs_plain(impl: str) -> bool:
        frame = inspect.currentframe()
        assert frame is not None and frame.f_back is not None
        asked.append(frame.f_back.f_code.co_name)
        return asked[-1] == function or before(impl)

    module.runs_plain = runs_plain
    try:
        yield
    finally:
        module.runs_plain = before
    if function not in asked:
        raise SystemExit(f"{function} of ops/{name}.py did not run: this row measures nothing")


if __name__ == "__main__":
    main()
