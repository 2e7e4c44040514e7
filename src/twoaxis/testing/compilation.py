"""Checks of torch.compile: one graph for a deep model, none added by a second step, and the same numbers."""

import torch
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

from twoaxis.depth import DepthConfig
from twoaxis.testing.check import close, exactly, slow_check
from twoaxis.testing.measure import gradients
from twoaxis.testing.toy import ATTENTION, AxisConfig, toy_decoder, toy_tokens

DEEP = 10
"""More than the 8 versions of one function that torch.compile keeps."""


@slow_check
def compiles_once(config: AxisConfig) -> None:
    """A model of 10 layers compiles to one graph without a break, a second step adds none, and the loss is the eager one."""
    if isinstance(config, DepthConfig):
        model = toy_decoder(config, n_layers=DEEP, blocks=((ATTENTION,),))
    else:
        model = toy_decoder(config, n_layers=2)
    tokens, targets = toy_tokens(), toy_tokens(seed=1)
    torch._dynamo.reset()
    counters.clear()
    frames = CompileCounter()
    loss = torch.compile(lambda: model.loss(tokens, targets)[0], backend=frames)
    try:
        first = loss()
        exactly("graph breaks", sorted(counters["graph_break"].values()), [])
        exactly("graphs of the first step", frames.frame_count, 1)
        found = gradients(model, first)
        close("compiled loss", loss(), model.loss(tokens, targets)[0], "same_values")
        exactly("graphs after a second step", frames.frame_count, 1)
    finally:
        torch._dynamo.reset()
    expected = gradients(model, model.loss(tokens, targets)[0])
    for name, gradient in expected.items():
        close(f"compiled gradient of {name}", found[name], gradient, "same_gradients")
