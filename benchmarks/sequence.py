"""`python benchmarks/sequence.py`: what local mixing along positions costs, as ratios in one run.

Windowed attention against every exact formulation that torch alone offers, causal convolution against the memory floor,
a block with Canon at all places against the plain block, and decoding far beyond the window.
"""

import argparse
import functools
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Run as a script, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import models
from benchmarks.bounds import Bound, bounds_table, over_first
from benchmarks.measure import Timing, header_lines, interleave, peak_memory, table
from benchmarks.peers import PeerShape
from benchmarks.profiles import print_missed
from benchmarks.swa_formulations import Attention, formulations
from twoaxis import Decoder, DecoderConfig
from twoaxis.core.cost import Shape
from twoaxis.core.layout import TokenLayout
from twoaxis.core.position import LayerStack
from twoaxis.model.cost import decoder_cost
from twoaxis.ops.causal_conv import causal_conv
from twoaxis.ops.local_attention import local_attention
from twoaxis.sequence import SEQUENCE

BATCH, HEADS, HEAD_DIM = 1, 4, 64
LENGTHS, WINDOWS = (512, 2048, 8192), (16, 64, 128)
MIB = 2**20


def run(rounds: int) -> list[Bound]:
    """Prints every table and returns the bounds."""
    return [*_windows(rounds), *_linear_memory(), *_convolutions(rounds), *_canon(rounds), *_decoding(rounds)]


def _windows(rounds: int) -> list[Bound]:
    seconds: dict[tuple[str, int, int], float] = {}
    against: dict[str, list[list[Timing]]] = {"training": [], "prefill": []}
    print(f"### Windowed attention, [{BATCH}, {HEADS}, T, {HEAD_DIM}]: ours against the fastest of the others\n")
    print("| T | window | pass | ours, ms | fastest other | ours / fastest (min..max) |")
    print("|---|---|---|---|---|---|")
    for tokens, window, training in itertools.product(LENGTHS, WINDOWS, (True, False)):
        name = "training" if training else "prefill"
        ours = functools.partial(local_attention, window=window)
        steps = {other: _attention_step(attend, tokens, training) for other, attend in formulations(tokens, window).items()}
        fastest = min(interleave(steps, rounds=3, warmup=1, sample_seconds=0.05), key=lambda t: t.seconds).name
        pair = interleave({fastest: steps[fastest], "ours": _attention_step(ours, tokens, training)}, rounds=rounds)
        against[name].append(pair)
        timing = pair[1]
        seconds[name, tokens, window] = timing.seconds
        spread = f"**{timing.ratio:.2f}** ({timing.lowest:.2f}..{timing.highest:.2f})"
        print(f"| {tokens} | {window} | {name} | {timing.seconds * 1e3:.2f} | {fastest} | {spread} |")
    print()
    bounds: list[Bound] = []
    for name, pairs in against.items():
        worst = max(pairs, key=lambda pair: pair[1].ratio)
        bounds.append(over_first(f"windowed attention, {name}, worst of {len(pairs)} shapes / fastest formulation", worst, 1.3))
    for name, window in itertools.product(against, WINDOWS):
        growth = seconds[name, 8192, window] / seconds[name, 2048, window]
        # Beyond the caches a token costs more; six tells linear from quadratic, which is 16.
        bounds.append(Bound(f"{name}, w={window}: time at T=8192 / at T=2048 (linear is 4)", growth, 6.0))
    return bounds


def _attention_step(attend: Attention, tokens: int, training: bool) -> Callable[[], object]:
    generator = torch.Generator().manual_seed(tokens)
    q, k, v, grad = (torch.randn(BATCH, HEADS, tokens, HEAD_DIM, generator=generator) for _ in range(4))
    if not training:
        return torch.inference_mode()(lambda: attend(q, k, v))
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def step() -> None:
        for x in inputs:
            x.grad = None
        attend(*inputs).backward(grad)

    return step


def _linear_memory() -> list[Bound]:
    """Peak memory of a training step of every local sublayer, doubling the tokens twice."""
    bounds = []
    print("### Peak memory of a training step of one sublayer of width 256, MiB\n")
    print("| sublayer | T=2048 | T=8192 |")
    print("|---|---|---|")
    for config in ({"kind": "short_swa", "window": 64}, {"kind": "short_conv"}, {"kind": "attention", "input_local": "canon"}):
        few, many = (peak_memory(functools.partial(_sublayer_step, config, tokens)).step_bytes for tokens in (2048, 8192))
        name = "attention with canon" if "input_local" in config else config["kind"]
        print(f"| {name} | {few / MIB:.1f} | {many / MIB:.1f} |")
        bounds.append(Bound(f"memory of {name} at T=8192 / at T=2048 (linear is 4)", many / few, 4.8))
    print()
    return bounds


def _sublayer_step(config: dict[str, Any], tokens: int) -> Callable[[], object]:
    mixer = SEQUENCE.parse(config).build(LayerStack(256, 1e-6, (1,)).sites[0])
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    context = torch.randn(BATCH, tokens, 256).requires_grad_()

    def step() -> None:
        mixer(context, TokenLayout.contiguous(tokens))[0].sum().backward()

    return step


def _convolutions(rounds: int) -> list[Bound]:
    bounds = []
    print("### Causal depthwise convolution of 4 taps, forward and backward\n")
    for channels in (256, 1024):
        x, grad = (torch.randn(4, 512, channels) for _ in range(2))
        x.requires_grad_()
        weight = torch.randn(channels, 4).requires_grad_()
        conv = torch.nn.Conv1d(channels, channels, 4, padding=3, groups=channels, bias=False)
        candidates = {
            "memory floor": _copies(5 * x.numel()),
            "ours": _backward(lambda x=x, w=weight: causal_conv(x, w), (x, weight), grad),
            "nn.Conv1d": _backward(lambda x=x, c=conv: c(x.mT)[..., :512].mT, (x, conv.weight), grad),
        }
        timings = interleave(candidates, rounds=rounds)
        print(f"[4, 512, {channels}]\n\n{table(timings)}\n")
        bounds.append(over_first(f"causal convolution [4, 512, {channels}] / memory floor", timings, 2.5, "ours"))
    return bounds


def _backward(forward: Callable[[], Tensor], inputs: tuple[Tensor, ...], grad: Tensor) -> Callable[[], None]:
    def step() -> None:
        for tensor in inputs:
            tensor.grad = None
        forward().backward(grad)

    return step


def _copies(floats: int) -> Callable[[], None]:
    """Moves this many numbers once: half of them read, half of them written, between arrays larger than the caches.

    Forward reads the input and writes the output; backward reads both gradient and input and writes a gradient.
    """
    source, target = (torch.zeros(64 * MIB) for _ in range(2))
    half, place = floats // 2, 0

    def step() -> None:
        nonlocal place
        place = place + half if place + 2 * half <= source.numel() else 0
        target[place : place + half].copy_(source[place : place + half])

    return step


CANON: dict[str, Any] = {"input_local": "canon", "projected_local": "canon"}


def _canon(rounds: int) -> list[Bound]:
    shape = PeerShape()
    plain: list[dict[str, Any]] = [{"kind": "attention", "n_heads": shape.n_heads}, {"kind": "swiglu", "d_ff": shape.d_ff}]
    blocks = {
        "plain": [plain],
        "canon AC": [[{**sublayer, "input_local": "canon"} for sublayer in plain]],
        "canon ABCD": [[{**sublayer, **CANON} for sublayer in plain]],
        "short_conv": [[{"kind": "short_conv"}, *plain]],
        "short_swa 16": [[{"kind": "short_swa", "window": 16}, *plain]],
        "short_swa 128": [[{"kind": "short_swa", "window": 128}, *plain]],
        "dynamic_conv of q, k, v": [[{**plain[0], "projected_local": "dynamic_conv"}, plain[1]]],
        # In one block, as published tables stand in a few.
        "n-gram table": [
            plain,
            [{"kind": "ngram_embedding", "preset": "engram_tiny"}, *plain],
            *[plain] * (shape.n_layers - 2),
        ],
    }
    configs = {name: _config(shape, block) for name, block in blocks.items()}
    print(f"### Training step of a decoder with local mixing, {shape}\n")
    steps = {name: models.loss_step(Decoder.build(config), shape.tokens()) for name, config in configs.items()}
    timings = interleave(steps, rounds=rounds, warmup=1)
    print(table(timings), "\n")
    most = {"canon ABCD": 1.2, "dynamic_conv of q, k, v": 1.25, "n-gram table": 1.05}
    bounds = {name: over_first(f"training step, {name} / plain block", timings, bound, name) for name, bound in most.items()}
    one = Shape(shape.batch, shape.max_seq_len)
    flops = {name: decoder_cost(config, one).flops for name, config in configs.items()}
    shares = {name: flops[name] / flops["plain"] for name in configs}
    for name in ("short_swa 16", "short_swa 128"):
        what = f"training step, {name} / plain block (FLOPs {shares[name]:.2f})"
        bounds[name] = over_first(what, timings, 1.1 * shares[name], name)
    missed = {name: bound for name, bound in bounds.items() if not bound.kept}
    print_missed(missed, steps["plain"], steps.__getitem__, lambda name: f"FLOPs {shares[name]:.2f}")
    return [*bounds.values()]


def _config(shape: PeerShape, blocks: list[list[dict[str, Any]]]) -> DecoderConfig:
    sizes = {name: getattr(shape, name) for name in ("vocab_size", "d_model", "n_layers", "max_seq_len")}
    return DecoderConfig.from_data({**sizes, "blocks": blocks})


def _decoding(rounds: int) -> list[Bound]:
    """The time of one token behind caches of different lengths, without the full attention that grows with them."""
    bounds = []
    print("### One decoded token, 12 blocks of width 256, by tokens before it\n")
    for local in ({"kind": "short_swa", "window": 64}, {"kind": "short_conv"}, {"kind": "gated_delta_net"}):
        model = Decoder.build(
            DecoderConfig.from_data(
                {"vocab_size": 512, "d_model": 256, "n_layers": 12, "max_seq_len": 100_000, "blocks": [[local, "swiglu"]]}
            )
        )
        timings = interleave({f"{tokens}": _decode_step(model, tokens) for tokens in (64, 1024, 8192)}, rounds=rounds)
        print(f"{local['kind']}\n\n{table(timings)}\n")
        bounds.append(over_first(f"decode step, {local['kind']}: at token 8192 / at token 64", timings, 1.15))
    return bounds


def _decode_step(model: Decoder, tokens: int) -> Callable[[], object]:
    text = torch.randint(512, (1, tokens), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        _, cache = model(text, None, model.new_cache())

    def step() -> None:
        nonlocal cache
        # One continuation, as in generation: a second one would copy the buffers of the first.
        with torch.inference_mode():
            _, cache = model(text[:, :1], None, cache)

    return step


def main() -> int:
    """Prints everything; 1 when a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="samples of each candidate")
    rounds = parser.parse_args().rounds
    print("## Sequence axis\n")
    print(header_lines())
    bounds = run(rounds)
    print(f"### Bounds\n\n{bounds_table(bounds)}")
    return 0 if all(bound.kept for bound in bounds) else 1


if __name__ == "__main__":
    sys.exit(main())
