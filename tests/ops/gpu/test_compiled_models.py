"""Models whose kernels are traced: one graph, with the values and gradients of the eager model."""

import importlib.util
from typing import Any

import pytest
import torch

from twoaxis.depth import DEPTH
from twoaxis.ops.gpu import launch
from twoaxis.testing.toy import toy_decoder, toy_tokens

pytestmark = pytest.mark.interpret

if importlib.util.find_spec("triton") is None:
    pytest.skip("without triton", allow_module_level=True)


@pytest.mark.parametrize(
    "depth",
    [
        {"kind": "attention_residuals", "schedule": "two_phase", "block_size": 2},
        {"kind": "deep_delta", "value_channels": 4, "compressor": "channel"},
        "mhc",
    ],
    ids=str,
)
def test_a_traced_model_is_one_graph(depth: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that start as one tensor are given to a kernel several times, which tracing has to cope with."""
    started, start = list[object](), launch.start

    def noted(kernel: Any, *given: Any, **options: Any) -> None:
        started.append(kernel)
        start(kernel, *given, **options)

    monkeypatch.setattr(launch, "start", noted)
    model = toy_decoder(DEPTH.parse(depth), n_layers=1).float()
    tokens = toy_tokens()
    found = []
    for run in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        logits = run(tokens)
        gradients = torch.autograd.grad(logits.sin().sum(), list(model.parameters()), allow_unused=True, materialize_grads=True)
        found.append([logits.detach(), *gradients])
        assert started, "no kernel has run"
        started.clear()
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)
