"""Claim 2: reading every state equals a window that reaches back to the first one."""

from torch import Tensor

from twoaxis.claims.claim import PAPER, Claim, Evidence, Finding, gradients_of
from twoaxis.claims.depth_as_position import (
    SIZES,
    cotangents,
    depth_kernel,
    layer_by_layer,
    random_read,
    transposed_short_swa,
)
from twoaxis.claims.duality import GRADIENTS

VISIBLE = 1e-6
"""Far below the effect of omitting one state of size 1 from a softmax mixture."""


def compute() -> Finding:
    """Tests at every layer that a window of l + 1 equals the unlimited read, and that a window of l differs."""
    found, layers_seen = Evidence(), 0
    for case, (layers, *_) in enumerate(SIZES):
        read = random_read(case)
        directions = cotangents(read)
        whole = transposed_short_swa(read, None)
        reached = [layer_by_layer_at(case, layer, layer + 1) for layer in range(layers)]
        found.all_close("window l + 1 against all states", reached, whole)
        found.all_close("operator over all sources against all states", depth_kernel(read, None), whole)
        together = gradients_of(layer_by_layer(read, layers), directions, read.leaves)
        found.all_close(
            "gradients, window L against all states", together, gradients_of(whole, directions, read.leaves), GRADIENTS
        )
        for layer in range(1, layers):
            found.apart(f"window {layer} at layer {layer}", layer_by_layer_at(case, layer, layer), whole[layer], VISIBLE)
        layers_seen += layers
    return found.finding(
        f"At each of {layers_seen} layers of {len(SIZES)} stacks the read with window l + 1 equals the read of all states "
        "within 1e-12; with one state fewer it differs by more than 1e-6.",
        "A window of L gives the same outputs, and gradients within 1e-11, at every layer at once.",
    )


def layer_by_layer_at(case: int, layer: int, window: int) -> Tensor:
    """The result of one layer with a separate window, read over the states up to it."""
    read = random_read(case)
    return layer_by_layer(read._replace(states=read.states[: layer + 1]), window)[-1]


CLAIM = Claim(
    number=2,
    title="Full memory is the limit of the window",
    statement="At layer l, counted from 0, a read with window K = l + 1 is the read of all states so far, and no shorter "
    "window is.",
    source=f"{PAPER}, section 2.2",
    tested="Every layer with its own window l + 1, and with l, against full causal attention over the transposed stack and the "
    "depth operator over all sources.",
    compute=compute,
)
