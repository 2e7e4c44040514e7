"""The depth operations of a model as lines in the tokens of a pass, each through two measured passes of few tokens."""

from collections.abc import Callable, Iterable
from typing import Any

from twoaxis.core.cost import Shape
from twoaxis.core.position import LayerStack, SublayerPosition
from twoaxis.ledger.decoder_memory import (
    SavingModel,
    decoder_saved_bytes,
    native_config,
    part_cache_bytes,
    part_saved_bytes,
    recomputing_peak_bytes,
)
from twoaxis.ledger.kept import Data, read_or_measure
from twoaxis.ledger.meter import Mode, measured_once
from twoaxis.ledger.stack import DepthOperation, StackTrace, trace_stack

TOKENS = 16
"""Tokens of the shorter pass; the other has twice as many. Nothing that a depth mixer pads is longer."""

LONG = 2048
"""Tokens behind which activations are taken to grow evenly: engines that pad short sequences pad no more."""

MANY = 16
"""Sublayers from which on a measurement is kept in the cache folder; that of a smaller model takes less than a second."""


def depth_lines(
    model: SavingModel, element_bytes: int, cache_element_bytes: int, kernels: bool = False, mode: Mode = "eager"
) -> Data:
    """Measures what the depth operations of a model take.

    Args:
        model: the model.
        element_bytes: of one number.
        cache_element_bytes: of one number of a cache.
        kernels: whether kernels are counted, those of the backward pass too.
        mode: what runs.

    Returns:
        `sublayers`, in order, each with

        * `read`, `written`: the least traffic, bytes per token;
        * `saved`: [bytes per token, bytes once] beyond inputs and outputs; `heads_saved`: the same of a sublayer whose heads
          are mixed, nothing elsewhere; `handed_over`: bytes per token of views, context, update and statistics;
        * `cache`: bytes per sequence; `eager`, `eager_back`: [kernels, bytes per token, bytes once], where they are counted;

        `ends`, the same of both ends of the stack; `embedding_saved`: bytes per token; `leaves`: [first boundary, last
        boundary, bytes per token, saved] of every tensor of the depth state, where boundary i lies before sublayer i.

    Example:
        >>> from twoaxis.model import DecoderConfig
        >>> config = DecoderConfig(vocab_size=256, d_model=64, n_layers=2)
        >>> depth_lines(config, element_bytes=4, cache_element_bytes=4)["sublayers"][0]["read"]
        512
    """
    parts = tuple(native_config(part) for part in model.parts)
    key = (model.depth, model.stack, parts, model.norm, model.embedding_norm == "rms", model.embedding_local)
    return _lines(*key, mode, element_bytes, cache_element_bytes, kernels)


@measured_once(512)
def _lines(*key: Any) -> Data:
    depth, stack, parts = key[:3]
    return _kept(key, stack, (depth, *parts), lambda: _measured(*key))


def saved_by_training(model: SavingModel, shape: Shape) -> Data:
    """Measures `saved` bytes of one pass to the loss, and the `recomputed` peak when only states between blocks are saved."""

    def measured() -> Data:
        return {"saved": decoder_saved_bytes(model, shape), "recomputed": recomputing_peak_bytes(model, shape)}

    # A part that this library cannot build says itself what it saves, so its own class counts.
    configs = (model.depth, *(native_config(part) or part for part in model.parts))
    key = (
        "training",
        model.depth,
        model.stack,
        model.parts,
        model.norm,
        model.embedding_norm,
        model.embedding_local,
        model.vocab_size,
        shape,
    )
    return _kept(key, model.stack, configs, measured)


def _kept(key: tuple[Any, ...], stack: LayerStack, configs: Iterable[Any], measured: Callable[[], Data]) -> Data:
    """Reads what is worth a file; the code of other packages is no part of a key."""
    foreign = any(each is not None and not type(each).__module__.startswith("twoaxis.") for each in configs)
    return measured() if stack.n_sublayers < MANY or foreign else read_or_measure(key, measured)


def _measured(
    depth: Any,
    stack: Any,
    parts: Any,
    norm: Any,
    embedding_norm: bool,
    embedding_local: Any,
    mode: Mode,
    element_bytes: int,
    cache_bytes: int,
    kernels: bool,
) -> Data:
    def trace(tokens: int, width: int = element_bytes, traffic: bool = True) -> StackTrace:
        options: Any = {"parts": parts, "norm": norm, "embedding_norm": embedding_norm, "embedding_local": embedding_local}
        return trace_stack(
            depth, stack, Shape(1, tokens, width), **options, mode=mode, backward=kernels and traffic, traffic=traffic
        )

    short, long = trace(TOKENS), trace(2 * TOKENS, traffic=kernels)
    carries = short.ends.cache or any(each.cache for each in short.sublayers)
    far = trace(LONG, cache_bytes, traffic=False) if carries else short
    mixes = any(each.heads_saved for each in short.sublayers)
    windowed = mixes and any(slot.window for slot in stack.slots)
    # No window of attention is longer.
    heads = [trace(n * LONG, traffic=False) for n in (1, 2)] if windowed else [short, long]
    heads_tokens = heads[0].shape.tokens

    def operation(of: Callable[[StackTrace], DepthOperation]) -> Data:
        one, two = of(short), of(long)
        counts = {"eager": (one.forward, two.forward), "eager_back": (one.backward, two.backward)} if kernels else {}
        return {
            "read": one.read // TOKENS,
            "written": one.written // TOKENS,
            "saved": _line(one.saved, two.saved),
            "cache": of(far).cache,
            **{name: [a.count, *map(int, _line(a.bytes, b.bytes))] for name, (a, b) in counts.items()},
        }

    def sublayer(index: int) -> Data:
        found = operation(lambda trace: trace.sublayers[index])
        found["handed_over"] = _line(short.handed_over(index), long.handed_over(index))[0]
        mixed = _line(*[each.sublayers[index].heads_saved for each in heads], tokens=heads_tokens)
        return found | {"heads_saved": mixed if any(mixed) else []}

    ends = short.ends.views // TOKENS + element_bytes * stack.d_model * short.ends.saves_update
    return {
        "sublayers": [sublayer(index) for index in range(stack.n_sublayers)],
        "ends": operation(lambda found: found.ends) | {"handed_over": ends},
        "embedding_saved": _line(short.embedding_saved, long.embedding_saved)[0],
        "leaves": _leaves(short),
    }


def part_lines(
    part: Any, site: SublayerPosition, element_bytes: int, cache_element_bytes: int, tokens: tuple[int, ...]
) -> Data:
    """Measures what a sublayer takes by itself.

    Returns:
        `saved`: [bytes per token, bytes once] of long sequences; `caches`: bytes behind each of these numbers of tokens.
    """

    def measured() -> Data:
        saved = [part_saved_bytes(part, site, Shape(1, n * LONG, element_bytes)) for n in (1, 2)]
        caches = [part_cache_bytes(part, site, Shape(1, n, cache_element_bytes)) for n in tokens]
        return {"saved": _line(saved[0], saved[1], tokens=LONG), "caches": caches}

    config: Any = native_config(part)
    if config is None:
        return measured()
    key = ("part", config, site.d_model, site.norm_eps, site.slot, config.cost(site, Shape(1, 1)).params)
    return _kept((*key, element_bytes, cache_element_bytes, tokens), site.stack, (config,), measured)


def _line(short: int, long: int, tokens: int = TOKENS) -> list[float]:
    """Bytes per token and bytes once, given those of so many tokens and of twice as many."""
    slope = (long - short) / tokens
    return [slope, short - slope * tokens]


def _leaves(found: StackTrace) -> list[list[int]]:
    leaves: dict[int, list[int]] = {}
    for index, state in enumerate(found.states):
        for tensor in state:
            first = leaves[tensor.number][0] if tensor.number in leaves else index
            leaves[tensor.number] = [first, index, tensor.bytes // found.shape.total_tokens, int(tensor.saved)]
    return list(leaves.values())
