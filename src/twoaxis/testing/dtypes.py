"""Checks of dtypes: outputs keep the dtype of inputs, and statistics are never computed in half precision."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from twoaxis.depth import DepthConfig
from twoaxis.local import LocalConfig
from twoaxis.sequence import SequenceConfig
from twoaxis.testing.conformance import bound, check, exactly, require
from twoaxis.testing.measured import LowPrecisionStatistics, read_and_write, sublayer_list, tensors, trace
from twoaxis.testing.toy import AxisConfig, toy_context, toy_decoder, toy_layout, toy_mixer, toy_tokens

DTYPES = (torch.bfloat16, torch.float32, torch.float64)
WIDE = 64
"""Wide enough for sums over a row to need more than 8 bits."""


@check
def dtype_is_kept(config: AxisConfig) -> None:
    """Logits, gradients, reads and updates have the dtype of the model, in bfloat16, float32 and float64."""
    for dtype in DTYPES:
        model = toy_decoder(config, dtype=dtype, n_layers=2)
        run = trace(model, toy_tokens())
        exactly("dtype of the logits", run.logits.dtype, dtype)
        for index, (views, update) in enumerate(zip(run.views, run.updates, strict=True)):
            exactly(f"dtype of the read of sublayer {index}", {view.dtype for view in views}, {dtype})
            exactly(f"dtype of the update of sublayer {index}", update.dtype, dtype)
        exactly("dtype of what is left", run.left.dtype, dtype)
        run.logits.float().sum().backward()
        exactly("gradients that are not finite", [n for n, p in model.named_parameters() if not _finite(p.grad)], [])


@check
def runs_under_autocast(config: AxisConfig) -> None:
    """A float32 model trains under bfloat16 autocast, with finite gradients in float32."""
    model = toy_decoder(config, dtype=torch.float32, n_layers=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = model.loss(toy_tokens(), toy_tokens(seed=1))
    loss.backward()
    exactly("dtype of the loss", loss.dtype, torch.float32)
    for name, parameter in model.named_parameters():
        require(_finite(parameter.grad), f"gradient of {name}: not finite")
        exactly(f"dtype of the gradient of {name}", getattr(parameter.grad, "dtype", torch.float32), torch.float32)


@check
def depth_statistics_are_wide(config: DepthConfig) -> None:
    """Reads and writes in bfloat16, or under its autocast, compute statistics in float32 and round the result."""
    for autocast in (False, True):
        dtype = torch.float32 if autocast else torch.bfloat16
        model, exact = (toy_decoder(config, dtype=dtype, d_model=WIDE, n_layers=2) for _ in range(2))
        exact = exact.double()
        where = "under autocast" if autocast else "in bfloat16"
        with torch.no_grad():
            run = trace(model, toy_tokens())
            for index, (low, high) in enumerate(zip(sublayer_list(model), sublayer_list(exact), strict=True)):
                inputs = (run.states[index], run.updates[index], run.contexts[index], run.heads[index])
                exactly_done = tensors(read_and_write(high.depth, *_double(inputs), layout=run.layout))
                with LowPrecisionStatistics() as seen, torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                    got = tensors(read_and_write(low.depth, *inputs, layout=run.layout))
                exactly(f"half-precision statistics of sublayer {index} {where}", seen.found, [])
                _within_rounding(f"read and write of sublayer {index} {where}", got, exactly_done)


@check
def mixer_statistics_are_wide(config: SequenceConfig | LocalConfig) -> None:
    """In bfloat16, or under its autocast, norms, rotations and softmax are computed in float32."""
    for autocast in (False, True):
        mixer = toy_mixer(config, dtype=torch.float32 if autocast else torch.bfloat16)
        context = toy_context().to(torch.float32 if autocast else torch.bfloat16)
        with LowPrecisionStatistics() as seen, torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            mixer(context, toy_layout(context))
        exactly("half-precision statistics", seen.found, [])


def _within_rounding(what: str, got: list[Tensor], exact: list[Tensor]) -> None:
    """The error may be a few times that of rounding the exact result to bfloat16 once."""
    for a, b in zip(got, exact, strict=True):
        error = _rms(a.double() - b)
        ideal = _rms(b.to(torch.bfloat16).double() - b)
        ratio = error / ideal if ideal else float(error > 0)
        limit = bound("low_precision_ratio")
        require(ratio <= limit, f"{what}: error {ratio:.1f} times that of one rounding, bound {limit:g}")


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def _double(values: Any) -> Any:
    return tree_map(lambda t: t.double() if isinstance(t, Tensor) else t, values)


def _finite(gradient: Tensor | None) -> bool:
    return gradient is None or bool(gradient.isfinite().all())
