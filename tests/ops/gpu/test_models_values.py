"""Whole models with interpreted kernels in float32 against the same models without them in float64."""

import importlib.util

import pytest
import torch
from torch import Tensor

from twoaxis import DEPTH, Decoder
from twoaxis.core.measure import distance, gradients
from twoaxis.ops.gpu import delta_operator, depth_read_operator, sinkhorn_operator, stream_operator, two_phase_operator
from twoaxis.testing.toy import toy_decoder, toy_tokens

pytestmark = pytest.mark.interpret

if importlib.util.find_spec("triton") is None:
    pytest.skip("without triton", allow_module_level=True)

READ, EARLY = (depth_read_operator, "read"), (two_phase_operator, "early_reads")
MIX, MATRIX, WRITE = (stream_operator, "mix"), (sinkhorn_operator, "normalise"), (delta_operator, "write")

EXAMPLES = {
    "attention_residuals": {"full": [READ], "token": [READ], "two_phase_block3": [READ, EARLY], "inkling2": [READ]},
    "delta_attention_residuals": {"retrofit": [READ], "alpha_null": [READ], "values": [READ]},
    "mhc": {"glm5": [MIX, MATRIX], "hy_v4": [MIX]},
    "deep_delta": {"blend": [WRITE], "channel_write_only": [WRITE]},
}
"""By kind and example, the functions of operators that it calls."""

LARGEST = 2e-5
"""Of all errors relative to the largest entry, as in `benchmarks/gpu_check.py`."""


def loss_and_gradients(model: Decoder) -> list[Tensor]:
    loss, _ = model.loss(toy_tokens(seed=0), toy_tokens(seed=1))
    with torch.no_grad():
        # Not of seeds 2 and 3: each has a token whose logits amplify any rounding, in float32 without kernels too.
        logits = model(toy_tokens(seed=6))
    return [loss.detach(), logits, *gradients(model, loss).values()]


@pytest.mark.parametrize(("kind", "example"), [(kind, name) for kind, names in EXAMPLES.items() for name in names])
def test_a_model_is_the_same_with_kernels(kind: str, example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, calls = DEPTH[kind].example(example), []
    for called in (READ, EARLY, MIX, MATRIX, WRITE):
        right = getattr(*called)
        monkeypatch.setattr(
            *called,
            lambda *given, right=right, called=called, **named: (calls.append(called), right(*given, **named))[1],
        )
    want = loss_and_gradients(toy_decoder(config))
    assert not calls
    got = loss_and_gradients(toy_decoder(config, dtype=torch.float32))
    assert set(calls) == set(EXAMPLES[kind][example])
    for ours, exact in zip(got, want, strict=True):
        assert distance(ours, exact) <= LARGEST * max(float(exact.abs().max()), 1e-3)
