"""`python benchmarks/backward.py`: what every hand-written backward pass gains in a training step, over its plain form.

A pass that gains less than a tenth of a step, in time or in what the step keeps for its backward pass, is not worth its code.
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

# Run as a script, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import models
from benchmarks.depth import saved_bytes
from benchmarks.measure import header_lines, interleave
from benchmarks.peers import PeerShape

SHAPE = PeerShape()
ATTENTION = {"kind": "attention", "n_heads": SHAPE.n_heads}

OPERATORS: dict[str, tuple[str, Any, tuple[Any, ...]]] = {
    "norm: RMSNorm": ("norm", "residual", ()),
    "norm: LayerNorm": ("norm", {"kind": "norm_placement", "placement": "deepnorm"}, ()),
    "gated_linear": ("gated_linear", "residual", ()),
    "blend": ("blend", {"kind": "norm_placement", "placement": "post", "blend": "annealed"}, ()),
    "mix: DenseFormer": ("mix", "denseformer", ()),
    "mix: MUDDFormer": ("mix", "muddformer", ()),
    "mix: LIMe": ("mix", "lime", ()),
    "weight_mlp": ("weight_mlp", "muddformer", ()),
    "depth_read": ("depth_read", "attention_residuals", ()),
    "two_phase": ("two_phase", {"kind": "attention_residuals", "block_size": 4, "schedule": "two_phase"}, ()),
    "depth_attention": ("depth_attention", {"kind": "depth_attention", "window": 8}, ()),
    "depth_attention: MoDA": ("depth_attention", "mixture_of_depths_attention", ()),
    "grn": ("grn", "deep_cross_attention", ()),
    "hyper_read": ("hyper_read", {"kind": "hyper_connections", "n_streams": 4}, ()),
    "streams": ("streams", {"kind": "mhc", "n_streams": 4}, ()),
    "scores: mHC": ("scores", {"kind": "mhc", "n_streams": 4}, ()),
    "sinkhorn": ("sinkhorn", {"kind": "mhc", "n_streams": 4}, ()),
    "gated_read": ("gated_read", {"kind": "gated_residual", "n_streams": 4}, ()),
    "delta": ("delta", "deep_delta", ()),
    "delta: 4 channels": ("delta", {"kind": "deep_delta", "value_channels": 4, "compressor": "channel"}, ()),
    "scores: DDL": ("scores", "deep_delta", ()),
    "low_rank": ("low_rank", "laurel", ()),
    "causal_conv: ShortConv": ("causal_conv", "residual", ("short_conv", ATTENTION)),
    "causal_conv: DDL TC": ("causal_conv", {"kind": "deep_delta", "value_channels": 4, "compressor": "time"}, ()),
    "token_taps": ("token_taps", "residual", ({**ATTENTION, "projected_local": "dynamic_conv"},)),
    "ngram_gate": ("ngram_gate", "residual", ("ngram_embedding", ATTENTION)),
}
"""By name: the module of the operator, a depth mixer, and the sublayers in place of attention, if not that alone."""


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=list(OPERATORS), choices=list(OPERATORS), metavar="OPERATOR")
    options = parser.parse_args()
    print(header_lines(), "\n")
    print("| operator | plain step / step (min..max) | kept for backward, plain / own |")
    print("|---|---|---|")
    for name in options.only:
        module, depth, sublayers = OPERATORS[name]
        model = models.decoder(SHAPE, depth, sublayers)
        own = models.loss_step(model, SHAPE.tokens())
        plain = _with_plain(module, own)
        timing = interleave({"own": own, "plain": plain}, rounds=options.rounds, warmup=1)[-1]
        kept = saved_bytes(plain) / saved_bytes(own)
        print(f"| {name} | **{timing.ratio:.2f}** ({timing.lowest:.2f}..{timing.highest:.2f}) | {kept:.2f} |", flush=True)


def _with_plain(module: str, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with _plain(module):
            return step()

    return run


@contextmanager
def _plain(name: str) -> Iterator[None]:
    """Lets one operator run in its plain form."""
    module: Any = importlib.import_module(f"twoaxis.ops.{name}")
    before, module.runs_plain = module.runs_plain, lambda impl: True
    try:
        yield
    finally:
        module.runs_plain = before


if __name__ == "__main__":
    main()
