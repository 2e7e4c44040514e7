"""Attention Residuals: traffic, training and inference time, memory of long prompts, parameters."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from planner.published.row import Published, Row
from planner.published.runs import PLAIN, Data, numbers, one, params, preset, step_seconds
from twoaxis.core.cost import Shape
from twoaxis.core.position import LayerStack
from twoaxis.depth import DEPTH, DepthConfig
from twoaxis.ledger.stack import trace_stack
from twoaxis.planner.hardware import read_device
from twoaxis.planner.setting import ParallelLayout, Setting

FULL: dict[str, Any] = {"kind": "attention_residuals"}
SUBLAYERS, BLOCK, BLOCKS = 128, 16, 8
PROMPT, CHUNK, RANKS = 131_072, 16_384, 8
CONTEXT = 8192


def blocks(size: int, schedule: str = "two_phase") -> dict[str, Any]:
    """Sources of so many sublayers each."""
    return {**FULL, "block_size": size, "schedule": schedule}


def attention_residuals() -> Published:
    """The predictions and what explains their differences."""
    return Published(
        method="Attention Residuals",
        source="arXiv:2603.15031: table of memory access, overheads, long prompts, parameters",
        setting=f"Traffic: {SUBLAYERS} sublayers, N = {BLOCKS} blocks of S = {BLOCK}. Time: kimi-linear-48b-a3b, blocks of 6 "
        f"sublayers. "
        "Devices and layouts are not published. Assumed: H100; training on 64, pipeline of 4 with 3 stages each, 16 "
        "microbatches of one "
        f"sequence of 4096, blocks recomputed; without a pipeline 16 sequences at once; inference on {RANKS} tensor-parallel "
        f"ranks that share the sequence in prompts. "
        f"Memory: moe-1t (d = 7168), prompts of {PROMPT}, bfloat16.",
        rows=(*_traffic(), *_seconds(), *_memory(), *_params()),
        remarks=(
            _two_phase(),
            _embedding(),
            "**R.** One more than published: a new source is read once for the statistic of its norm, which later reads then "
            "share.",
        ),
        contradicted=_contradicted(),
    )


def _widths(depth: dict[str, Any]) -> tuple[float, ...]:
    """Numbers that the least traffic reads and writes, by sublayer, over the width."""
    mixer: Any = DEPTH.parse(depth)
    return _traced_widths(mixer)


@lru_cache(maxsize=8)
def _traced_widths(mixer: DepthConfig) -> tuple[float, ...]:
    d_model = 4096
    stack = mixer.prepare(LayerStack(d_model, 1e-6, (2,) * (SUBLAYERS // 2)))
    return tuple(operation.moved / (2 * d_model) for operation in trace_stack(mixer, stack, Shape(1, 1, 2)).sublayers)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _traffic() -> list[Row]:
    # The last sublayer reads the embedding and the outputs of all before it.
    return [
        Row("plain residual: read and write", 3, _mean(_widths(PLAIN)), "widths"),
        Row(f"full, naive: last sublayer, n + 1 with n = {SUBLAYERS}", SUBLAYERS + 1, _widths(FULL)[-1], "widths", why="R"),
        Row("blocks, two-phase: mean, N / S + 5", BLOCKS / BLOCK + 5, _mean(_widths(blocks(BLOCK))), "widths", why="O"),
        Row("mHC with 4 streams: read and write", 34, max(_widths({"kind": "mhc"})), "widths", why="N"),
    ]


def _seconds() -> list[Row]:
    model = preset("kimi-linear-48b-a3b")
    plain, changed = numbers(model, PLAIN), numbers(model, blocks(6))
    layout = ParallelLayout(gpus=64, pipeline=4, virtual=3, data=16, microbatches=16)
    training = Setting(read_device("h100"), layout, 256, 4096, recompute="block", forwarding="cached")
    serving = Setting(read_device("h100"), ParallelLayout(gpus=RANKS, tensor=RANKS, sequence="tensor"), 1, CONTEXT)
    alone = training.replace(layout=ParallelLayout(gpus=64, data=64), batch=1024, sharding="weights")

    def token(numbers: Data) -> float:
        return serving.generation_step(numbers, 32, CONTEXT)["seconds"]

    def prompt(numbers: Data) -> float:
        return serving.prefill(numbers, 1, CONTEXT)["seconds"]

    return [
        Row("training time, pipeline", 1.04, step_seconds(training, changed) / step_seconds(training, plain), bound=True),
        Row("training time, no pipeline", 1.04, step_seconds(alone, changed) / step_seconds(alone, plain), bound=True),
        Row(f"token time, 32 sequences behind {CONTEXT} tokens", 1.02, token(changed) / token(plain), bound=True),
        Row(f"prompt time, {CONTEXT} tokens", 1.02, prompt(changed) / prompt(plain), bound=True),
    ]


def _memory() -> list[Row]:
    model = numbers(preset("moe-1t"), blocks(BLOCK, "per_read"))
    shared = one("h100", 1, PROMPT).replace(layout=ParallelLayout(gpus=RANKS, tensor=RANKS, sequence="tensor"))
    return [
        Row(
            "stored blocks of one prompt", 15, one("h100", 1, PROMPT).prefill_state_bytes(model, 1, PROMPT) / 1e9, "GB", why="P"
        ),
        Row("on each of 8 ranks", 1.9, shared.prefill_state_bytes(model, 1, PROMPT) / 1e9, "GB", why="P"),
        Row(f"in chunks of {CHUNK}", 0.3, shared.prefill_state_bytes(model, 1, PROMPT, CHUNK) / 1e9, "GB", bound=True),
    ]


def _params() -> list[Row]:
    small, large = preset("gpt-124m"), preset("olmo-1b")
    share = [100 * params(numbers(model, FULL), "depth") / params(numbers(model, PLAIN)) for model in (small, large)]
    return [
        Row("gpt-124m: parameters added", 0.03, share[0], "percent", digits=2),
        Row("olmo-1b: parameters added", 0.01, share[1], "percent", digits=2),
    ]


def _two_phase() -> str:
    """What our declared traffic of the two-phase schedule is made of."""
    each = _mean(_widths(blocks(BLOCK)))
    plain = _mean(_widths(blocks(BLOCK, "per_read")))
    return (
        f"**O.** Here a source is read once for the two sublayers of a block of the model, not once for all {BLOCK} of a block "
        f"of sources, "
        f"and an early read is kept in float32, which counts as 2 d for each of its write and its read. That is {each:.2f} d; "
        f"without the schedule it is {plain:.2f} d. The rest of the difference is unexplained."
    )


def _embedding() -> str:
    return (
        f"**P.** The published count is N = {BLOCKS} sources; the embedding is one more, which is {(BLOCKS + 1) / BLOCKS:.3f} "
        f"times that, "
        "and so is the prediction."
    )


def _contradicted() -> tuple[str, ...]:
    published = BLOCK + BLOCKS
    between = (BLOCKS - 1) + (BLOCK - 1)
    return (
        f"The traffic of full Attention Residuals in two phases, S + N = {published} d, counts keys and values as two reads. A "
        f"source "
        f"is its own key and value: a kernel that normalises what it has just loaded reads {between / 2:.0f} d on average "
        f"where the "
        f"paper counts {between}, so that read and write are {between / 2 + 2:.0f} d.",
    )
