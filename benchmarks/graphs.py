"""How many graphs compiling a 16-layer model takes for every depth mixer, and that the second step takes no new one."""

import multiprocessing

import torch
from torch._dynamo.testing import CompileCounter

from benchmarks.bounds import Bound
from benchmarks.models import loss_step
from twoaxis import DEPTH, Decoder, DecoderConfig


def run(rounds: int) -> list[Bound]:
    """Prints the counts and returns the bounds."""
    print("### Graphs of a compiled 16-layer model\n\n| depth mixer | graphs | new graphs in the second step |\n|---|---|---|")
    most = again = 0
    kinds = [row.kind for row in DEPTH]
    # Nothing is timed.
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for kind, (first, second) in zip(kinds, pool.imap(graphs, kinds), strict=True):
            print(f"| {kind} {next(iter(DEPTH[kind].examples))} | {first} | {second} |")
            most, again = max(most, first), max(again, second)
    print()
    return [
        Bound("graphs of a compiled 16-layer model, any depth mixer", most, 1, unit="graphs"),
        Bound("new graphs in the second step, any depth mixer", again, 0, unit="graphs"),
    ]


def graphs(kind: str) -> tuple[int, int]:
    """The graphs of a first step of a depth mixer, and the new ones of a second."""
    torch.set_num_threads(1)
    # Tracing a history grows with the square of its reads, so its blocks have one sublayer instead of three.
    block = ["attention"] if kind == "attention_residuals" else ["short_swa", "attention", "swiglu"]
    sizes = {"vocab_size": 32, "d_model": 32, "n_layers": 16}
    row = DEPTH[kind]
    config = DecoderConfig.from_data({**sizes, "depth": row.example(next(iter(row.examples))), "blocks": [block]})
    model = Decoder.build(config)
    torch._dynamo.reset()
    counter = CompileCounter()
    tokens = torch.randint(32, (2, 17), generator=torch.Generator().manual_seed(0))
    step = loss_step(model, tokens, torch.compile(model.loss, backend=counter, dynamic=False))
    step()
    first = counter.frame_count
    step()
    return first, counter.frame_count - first
