"""Claim 1: a depth read over a window is ShortSWA with layers as positions."""

from twoaxis.claims.claim import PAPER, Claim, Evidence, Finding, gradients_of
from twoaxis.claims.depth_as_position import (
    SIZES,
    cotangents,
    depth_kernel,
    layer_by_layer,
    plain_loops,
    random_read,
    transposed_short_swa,
    windows,
)

LOOPED_LAYERS = 7
"""Limit of the plain loops, which are slow."""

GRADIENTS = 1e-11
"""Looser than for outputs, since gradients are sums over layers and tokens."""


def compute() -> Finding:
    """Compares outputs and gradients of both axes, and of each with plain loops."""
    found, compared = Evidence(), 0
    for case, (layers, *_) in enumerate(SIZES):
        read = random_read(case)
        directions = cotangents(read)
        for window in windows(layers):
            outputs = {"depth": layer_by_layer(read, window), "ShortSWA": transposed_short_swa(read, window)}
            outputs["kernel"] = depth_kernel(read, window)
            if layers <= LOOPED_LAYERS:
                outputs["loops"] = plain_loops(read, window)
            gradients = {name: gradients_of(one, directions, read.leaves) for name, one in outputs.items()}
            pairs = [("depth", "ShortSWA"), ("kernel", "ShortSWA"), ("depth", "loops"), ("ShortSWA", "loops")]
            for one, other in pairs:
                if {one, other} <= set(outputs):
                    found.all_close(f"outputs, {one} against {other}", outputs[one], outputs[other])
                    found.all_close(f"gradients, {one} against {other}", gradients[one], gradients[other], GRADIENTS)
            compared += 1
    return found.finding(
        f"{compared} cases: {len(SIZES)} stacks of 1 to {max(size[0] for size in SIZES)} layers, 1 to 4 heads, windows from 1 "
        "to all layers, in float64.",
        "Layer by layer through ops.local_attention, and the mixer short_swa on the transposed stack: outputs differ by less "
        "than 1e-12, gradients of every state and projection by less than 1e-11.",
        f"Each also equals plain loops (stacks of up to {LOOPED_LAYERS} layers), and the operator of the depth mixer "
        "depth_attention equals both.",
    )


CLAIM = Claim(
    number=1,
    title="Depth reads are ShortSWA on the transposed axis",
    statement="Fix a token and let layers take the place of positions: residual attention that reads the last K states is "
    "causal sliding-window attention with window K, the same operator with the same gradients.",
    source=f"{PAPER}, section 2.2",
    tested="A read computed layer by layer against the sequence mixer applied to the transposed stack, and both against loops: "
    "outputs, and gradients of states and projections.",
    compute=compute,
)
