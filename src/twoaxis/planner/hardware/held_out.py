"""Computations of models that a calibration predicts and does not fit."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from twoaxis.core.layout import TokenLayout
from twoaxis.core.parameters import initialise
from twoaxis.core.position import LayerStack
from twoaxis.feed_forward import SwiGLUConfig
from twoaxis.model import Decoder, DecoderConfig
from twoaxis.ops.depth_read import depth_read
from twoaxis.ops.local_attention import local_attention
from twoaxis.ops.norm import inverse_rms, rms_norm
from twoaxis.planner.hardware.ceilings import Run, Work
from twoaxis.planner.hardware.counted import eager_operators

BATCH, TOKENS, WIDTH = 4, 512, 256
LONG = 1024
SOURCES = (4, 24)

Make = Callable[..., Tensor]


def held_out(device: torch.device, dtype: torch.dtype) -> Iterator[Work]:
    """The computations, each counted by running it once."""

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    found = {
        f"rms_norm of [{BATCH}, {TOKENS}, {WIDTH}]": lambda: _norm(make),
        f"SwiGLU of [{BATCH}, {TOKENS}, {WIDTH}], forward": lambda: _feed_forward(device, dtype, make),
        f"attention over {TOKENS // 2} tokens, 4 heads of 64": lambda: _attention(make, BATCH, TOKENS // 2),
        f"attention over {LONG} tokens, 4 heads of 64": lambda: _attention(make, 1, LONG),
    }
    for sources in SOURCES:
        name = f"depth read of {sources} sources of [{BATCH}, {TOKENS}, {WIDTH}]"
        found[f"{name}, forward and backward"] = lambda sources=sources: _depth(make, sources)
    found["training step of a decoder, 4 layers, width 128, 4 x 128 tokens"] = lambda: _training(device, dtype)
    found["one token of that decoder, batch 4"] = lambda: _token(device, dtype)
    for name, prepare in found.items():
        yield Work(name, tuple(eager_operators(prepare())), prepare)


def _norm(make: Make) -> Run:
    x, gain = make(BATCH, TOKENS, WIDTH), make(WIDTH)

    def run() -> None:
        with torch.no_grad():
            rms_norm(x, gain, 1e-6)

    return run


def _feed_forward(device: torch.device, dtype: torch.dtype, make: Make) -> Run:
    layer = SwiGLUConfig().build(LayerStack(WIDTH, 1e-6, (1,)).sites[0])
    initialise(layer, seed=0)
    layer.to(device=device, dtype=dtype)
    x, layout = make(BATCH, TOKENS, WIDTH), TokenLayout.contiguous(TOKENS, device=device)

    def run() -> None:
        with torch.no_grad():
            layer(x, layout)

    return run


def _attention(make: Make, batch: int, tokens: int) -> Run:
    q, k, v = (make(batch, 4, tokens, 64) for _ in range(3))

    def run() -> None:
        with torch.no_grad():
            local_attention(q, k, v)

    return run


def _depth(make: Make, count: int) -> Run:
    sources = [make(BATCH, TOKENS, WIDTH).requires_grad_() for _ in range(count)]
    factors = [inverse_rms(source.detach(), 1e-6) for source in sources]
    query = (make(WIDTH) * WIDTH**-0.5).requires_grad_()
    gradient = make(BATCH, TOKENS, WIDTH)

    def run() -> None:
        torch.autograd.grad(depth_read(sources, factors, query), [query, *sources], gradient)

    return run


def _decoder(device: torch.device, dtype: torch.dtype) -> tuple[Decoder, Tensor]:
    config = DecoderConfig(vocab_size=512, d_model=128, n_layers=4, max_seq_len=256)
    model = Decoder.build(config, seed=0).to(device=device, dtype=dtype)
    return model, torch.randint(0, config.vocab_size, (BATCH, 129), device=device)


def _training(device: torch.device, dtype: torch.dtype) -> Run:
    model, tokens = _decoder(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        total, counted = model.loss(tokens[:, :-1], tokens[:, 1:])
        (total / counted).backward()
        optimizer.step()

    return run


def _token(device: torch.device, dtype: torch.dtype) -> Run:
    model, tokens = _decoder(device, dtype)

    def run() -> None:
        with torch.inference_mode():
            model(tokens[:, :1])

    return run
