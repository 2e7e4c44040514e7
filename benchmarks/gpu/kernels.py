"""The operators that mixers are made of, forward and backward, beside the memory floor or the full attention they replace.

Letters: B batch, H heads, T tokens, D width, S sources, K head width.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.settings import Items, Row, Settings
from benchmarks.gpu.timing import Candidate, compared
from twoaxis.ops import kernels
from twoaxis.ops.causal_conv import causal_conv
from twoaxis.ops.delta import delta_writes
from twoaxis.ops.depth_read import depth_read, source_factor
from twoaxis.ops.gated_delta import gated_delta
from twoaxis.ops.local_attention import local_attention
from twoaxis.ops.precision import Impl
from twoaxis.ops.sinkhorn import Sinkhorn, sinkhorn

EPS = 1e-6
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def items(settings: Settings) -> Items:
    """The depth read first, since the depth axis rests on it."""
    found: Items = {}
    for name, dtype in DTYPES.items():
        found[f"depth read, {name}"] = lambda dtype=dtype: depth_reads(settings, dtype)
    for tokens, window in itertools.product(settings.pick((1024, 4096, 16384), (64,)), settings.pick((16, 128), (16,))):
        found[f"local attention, T={tokens}, w={window}"] = lambda T=tokens, w=window: windows(settings, T, w)
    found["causal convolution"] = lambda: convolutions(settings)
    found["delta write"] = lambda: delta_writing(settings)
    found["sinkhorn"] = lambda: sinkhorns(settings)
    found["gated delta"] = lambda: gated_deltas(settings)
    return found


def depth_reads(settings: Settings, dtype: torch.dtype) -> list[Row]:
    """24 sources of 16k tokens with norms included; the floor reads sources twice and writes as many gradients."""
    n, tokens, width = settings.pick((24, 16384, 1024), (4, 32, 16))
    sources = [_random(settings, (1, tokens, width), dtype) for _ in range(n)]
    query = torch.zeros(width, device=settings.device, requires_grad=True)

    def read(impl: Impl) -> Callable[..., Tensor]:
        return lambda query, *v: depth_read(v, [source_factor(one, EPS, impl) for one in v], query, impl)

    numbers = (3 * n + 2) * tokens * width
    candidates: dict[str, Candidate] = {"memory floor": _copies(settings, numbers, dtype)}
    candidates |= _engines(read, (query, *sources))
    candidates["fused, kernels off"] = _without_kernels(_step(read("fused"), (query, *sources)))
    return compared(f"depth read, {n} x [{tokens}, {width}] {_name(dtype)}", candidates, settings, numbers * dtype.itemsize)


def windows(settings: Settings, tokens: int, window: int) -> list[Row]:
    """Windowed attention beside full causal attention, and beside FlexAttention, which only GPUs train with."""
    shape = settings.pick((max(1, 16384 // tokens), 12, tokens, 64), (1, 2, tokens, 8))
    q, k, v = (_random(settings, shape, torch.bfloat16) for _ in range(3))
    candidates: dict[str, Candidate] = {
        "full causal": _step(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v)),
        "windowed": _step(lambda q, k, v: local_attention(q, k, v, window=window), (q, k, v)),
    }
    candidates["windowed compiled"] = _step(_compiled(lambda q, k, v: local_attention(q, k, v, window=window)), (q, k, v))
    if settings.on_gpu:
        candidates["FlexAttention compiled"] = _step(_flex(settings.device, tokens, window), (q, k, v))
    return compared(f"attention {list(shape)} bfloat16, w={window}", candidates, settings)


def convolutions(settings: Settings) -> list[Row]:
    """A causal depthwise convolution of 4 taps; the floor is two arrays forward and three backward."""
    shape = settings.pick((16, 1024, 1024), (2, 16, 8))
    x, weight = _random(settings, shape, torch.bfloat16), _random(settings, (shape[-1], 4), torch.bfloat16)
    numbers = 5 * x.numel()

    def as_library(x: Tensor, weight: Tensor) -> Tensor:
        return F.conv1d(F.pad(x.mT, (3, 0)), weight.unsqueeze(1), groups=weight.shape[0]).mT

    def ours(impl: Impl) -> Callable[..., Tensor]:
        return lambda x, weight: causal_conv(x, weight, impl=impl)

    candidates: dict[str, Candidate] = {"memory floor": _copies(settings, numbers, x.dtype)}
    candidates |= _engines(ours, (x, weight))
    candidates["torch conv1d"] = _step(as_library, (x, weight))
    return compared(f"causal convolution {list(shape)} bfloat16, 4 taps", candidates, settings, numbers * x.element_size())


def delta_writing(settings: Settings) -> list[Row]:
    """One value channel; the floor reads state and update and writes a state, and backward moves five arrays."""
    shape = settings.pick((16384, 1024), (32, 16))
    x, u = (_random(settings, shape, torch.bfloat16) for _ in range(2))
    target, beta = _random(settings, (1, shape[0]), torch.float32), _random(settings, shape[:1], torch.float32)
    numbers = 8 * x.numel()

    def ours(impl: Impl) -> Callable[..., Tensor]:
        return lambda x, u, target, beta: delta_writes((x,), u, target, beta, EPS, impl=impl)[0]

    candidates: dict[str, Candidate] = {"memory floor": _copies(settings, numbers, x.dtype)}
    candidates |= _engines(ours, (x, u, target, beta))
    return compared(f"delta write {list(shape)} bfloat16", candidates, settings, numbers * x.element_size())


def sinkhorns(settings: Settings) -> list[Row]:
    """Matrices of 4 streams, 20 rounds; the floor moves two arrays forward and three backward."""
    shape = settings.pick((4, 4, 16384), (4, 4, 32))
    logits = _random(settings, shape, torch.float32)
    numbers = 5 * logits.numel()

    def ours(impl: Impl) -> Callable[..., Tensor]:
        return lambda logits: sinkhorn(logits, Sinkhorn(), impl)

    candidates: dict[str, Candidate] = {"memory floor": _copies(settings, numbers, logits.dtype)}
    candidates |= _engines(ours, (logits,))
    return compared(f"Sinkhorn {list(shape)} float32, 20 rounds", candidates, settings, numbers * logits.element_size())


def gated_deltas(settings: Settings) -> list[Row]:
    """The chunked recurrence beside full causal attention of the same heads."""
    shape = settings.pick((4, 6, 4096, 128), (1, 2, 96, 8))
    q, k, v = (_random(settings, shape, torch.bfloat16) for _ in range(3))
    gates = (torch.rand(shape[:3], device=settings.device) for _ in range(2))
    decay_log, beta = (gate.requires_grad_() for gate in gates)

    def ours(q: Tensor, k: Tensor, v: Tensor, decay_log: Tensor, beta: Tensor) -> Tensor:
        return gated_delta(q, F.normalize(k, dim=-1), v, -decay_log, beta)[0]

    candidates: dict[str, Candidate] = {
        "full causal attention": _step(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v)),
        "fused": _step(ours, (q, k, v, decay_log, beta)),
    }
    return compared(f"gated delta {list(shape)} bfloat16", candidates, settings)


def _engines(make: Callable[[Impl], Callable[..., Tensor]], inputs: Sequence[Tensor]) -> dict[str, Candidate]:
    """The fused engine, the fused one compiled, which then runs the plain form of all that is no kernel, and the reference."""
    return {
        "fused": _step(make("fused"), inputs),
        "compiled": _step(_compiled(make("fused")), inputs),
        "reference": _step(make("reference"), inputs),
    }


def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function, dynamic=False, fullgraph=True)


def _step(forward: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Candidate:
    grads: list[Tensor] = []

    def step() -> None:
        result = forward(*inputs)
        # Made once: a gradient per run would be timed with it.
        grads[:] = grads or [torch.ones_like(result)]
        result.backward(grads[0])
        # Freed here rather than before the next run, which else would seem to need less memory than it does.
        for tensor in inputs:
            tensor.grad = None

    return step


def _without_kernels(step: Candidate) -> Candidate:
    def run() -> None:
        with kernels.without_kernels():
            step()

    return run


def _copies(settings: Settings, numbers: int, dtype: torch.dtype) -> Candidate:
    """Moves this many numbers, half of them read and half written."""
    source, target = (torch.zeros(numbers // 2, dtype=dtype, device=settings.device) for _ in range(2))
    return lambda: target.copy_(source)


def _flex(device: str, tokens: int, window: int) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def visible(b: Any, h: Any, query: Any, key: Any) -> Any:
        del b, h
        return (query >= key) & (query - key < window)

    mask = create_block_mask(visible, None, None, tokens, tokens, device=device)
    attend: Any = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: attend(q, k, v, block_mask=mask)


def _random(settings: Settings, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device=settings.device).to(dtype).requires_grad_()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
