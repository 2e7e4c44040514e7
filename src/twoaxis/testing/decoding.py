"""Checks of generation: with a cache, in any chunks, padding and batch, outputs are unchanged.

Letters: B batch, T position.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from twoaxis.core.cost import Shape
from twoaxis.core.layout import TokenLayout
from twoaxis.depth import DepthConfig
from twoaxis.ledger.decoder_memory import decoder_trace
from twoaxis.ledger.meter import held_bytes
from twoaxis.ledger.sublayer import sublayer_cache_bytes
from twoaxis.model import Decoder
from twoaxis.model.static_cache import StaticSteps, histories_are_full
from twoaxis.testing.conformance import check, close, exactly, require
from twoaxis.testing.measured import gradients, reachable_tensors, storage_bytes
from twoaxis.testing.toy import (
    TOKENS,
    AxisConfig,
    MixerConfig,
    noise,
    toy_context,
    toy_decoder,
    toy_layout,
    toy_mixer,
    toy_site,
    toy_tokens,
    with_toy_ids,
)

RAGGED = (2, 1, 3, 1, 2)
LONGEST_HISTORY = 128
"""Tokens within which the histories of every mixer are full, with some more."""
NO_BOUND = 4
"""The window from which chunk lengths are made if there is none."""
LONG = (300, 1, 1, 1, 7, 1, 65, 1, 2, *(1,) * 70)
"""A prefill longer than a window, odd chunks, and more steps than the free capacity of a cache."""


@check
def incremental_decode(config: AxisConfig) -> None:
    """Token by token equals ragged chunks equals one pass, also in chunks for left-padded rows of different lengths."""
    model = toy_decoder(config)
    tokens = toy_tokens()
    full = model(tokens)
    layout = TokenLayout.left_padded(torch.tensor([4, TOKENS]), TOKENS)
    ragged = model(tokens, layout)
    # A mixer of depth that keeps no tokens sees single ones in ragged chunks too.
    plans = (RAGGED,) if isinstance(config, DepthConfig) and not config.design.position else ((1,) * TOKENS, RAGGED)
    with torch.no_grad():
        for chunks in plans:
            close(f"logits in chunks {chunks}", decode(model, tokens, chunks), full, "same_values")
        got = decode(model, tokens, RAGGED, layout)
    close(f"left-padded logits in chunks {RAGGED}", got[:, -4:], ragged[:, -4:], "same_values")


@check
def left_padding(config: AxisConfig) -> None:
    """A left-padded row equals the row alone, in one pass and in decoding, even after more padding than a window."""
    model = toy_decoder(config)
    width = getattr(config, "receptive_field", None) or NO_BOUND
    prompts = (3, width + 4, 2 * width + 5)
    total = max(prompts)
    tokens = toy_tokens(batch=3, tokens=total + 5, seed=1)
    # Padding carries ids that are real elsewhere: nothing may depend on them.
    layout = TokenLayout.left_padded(torch.tensor(prompts), total)
    with torch.no_grad():
        prompt, cache = model(tokens[:, :total], layout, model.new_cache())
        logits = [model(tokens[:, :total], layout), prompt]
        steps = []
        for position in range(total, total + 5):
            step, cache = model(tokens[:, position : position + 1], None, cache)
            steps.append(step)
        for row, length in enumerate(prompts):
            alone = model(tokens[row : row + 1, total - length :])[0]
            for how, got in zip(("in one pass", "into a cache"), logits, strict=True):
                close(f"row of {length} tokens {how}", got[row, total - length :], alone[:length], "same_values")
            close(f"row of {length} tokens decoded on", torch.cat(steps, dim=1)[row], alone[length:], "same_values")
    if isinstance(config, DepthConfig):
        return
    # A decoder has zeros in padding, which would hide a mixer that reads it.
    mixer, context = toy_mixer(config), toy_context(batch=3, tokens=total)
    got, _ = mixer(context, with_toy_ids(layout, len(context)))
    for row, length in enumerate(prompts):
        text = context[row : row + 1, total - length :]
        alone, _ = mixer(text, toy_layout(text))
        close(f"output for a row of {length} tokens", got[row, total - length :], alone[0], "same_values")


COMPARED_STEPS = 4


@check
def static_cache_decode(config: AxisConfig) -> None:
    """Steps on caches that keep their size, as they are compiled, equal those on caches that grow, also behind padding."""
    model, tokens = toy_decoder(config), toy_tokens(tokens=LONGEST_HISTORY)
    layout, static, compared, at = TokenLayout.left_padded(torch.tensor([4, TOKENS]), TOKENS), None, 0, TOKENS
    with torch.no_grad():
        _, cache = model(tokens[:, :TOKENS], layout, model.new_cache())
        while compared < COMPARED_STEPS:
            given, before = tokens[:, at : at + 1], cache
            expected, cache = model(given, None, cache)
            at += 1
            if static is not None:
                close(f"logits of step {at}", model.logits(static.hidden(given)), expected, "same_values")
                compared += 1
            elif histories_are_full(before, cache):
                static = StaticSteps(model, cache, len(tokens), LONGEST_HISTORY, compile=False)
            else:
                require(at < LONGEST_HISTORY - COMPARED_STEPS, f"histories still grow behind {at} tokens; they must be bounded")


@check
def chunk_size_invariance(config: MixerConfig) -> None:
    """Chunks of 1, w-1, w, w+1 and more tokens after prompts of lengths around the window give one result."""
    mixer, w = toy_mixer(config), config.receptive_field or NO_BOUND
    total = 4 * w + 3
    context = toy_context(tokens=total)
    full, _ = mixer(context, toy_layout(context))
    plans = [(prompt, chunk) for chunk in (w - 1, w, w + 1, 2 * w + 1) for prompt in (1, 2, w - 1, w, w + 1)]
    # Single tokens take the most steps, and pass all lengths of a cache.
    plans += [(1, 1), (w + 1, 1)]
    for prompt, chunk in sorted({(max(1, a), max(1, b)) for a, b in plans}):
        with torch.no_grad():
            got = decode_mixer(mixer, context, [prompt, *[chunk] * total])
        close(f"output after a prompt of {prompt} in chunks of {chunk}", got, full, "same_values")


@check
def long_prefill(config: AxisConfig) -> None:
    """Steps and odd chunks after a prefill of 300 tokens equal one pass."""
    total = sum(LONG)
    if not isinstance(config, DepthConfig):
        mixer, context = toy_mixer(config), toy_context(tokens=total)
        with torch.no_grad():
            full, _ = mixer(context, toy_layout(context))
            close("output behind a long prefill", decode_mixer(mixer, context, LONG), full, "same_values")
        return
    model, tokens = toy_decoder(config), toy_tokens(tokens=total)
    with torch.no_grad():
        _, cache = model(tokens[:, :TOKENS], None, model.new_cache())
        if not any(leaf is not None for leaf in tree_leaves((cache.ends, _depth_caches(cache)))):
            # What attention keeps is for the checks of attention.
            return
        close("logits behind a long prefill", decode(model, tokens, LONG), model(tokens), "same_values")


@check
def chunked_gradients(config: MixerConfig) -> None:
    """Gradients through the cache of a pass in chunks equal those of one pass."""
    mixer = toy_mixer(config)
    context = toy_context().requires_grad_()
    weights = noise(tuple(context.shape), "loss")
    full, _ = mixer(context, toy_layout(context))
    # Zeros for a mixer of token ids alone.
    kept: Any = {"retain_graph": True, "materialize_grads": True}
    (b,) = torch.autograd.grad((full * weights).sum(), context, **kept)
    expected = gradients(mixer, (decode_mixer(mixer, context, [TOKENS]) * weights).sum())
    for chunks in ([1] * TOKENS, RAGGED, (4, 5)):
        got = decode_mixer(mixer, context, chunks)
        (a,) = torch.autograd.grad((got * weights).sum(), context, **kept)
        close(f"gradient of the input in chunks {tuple(chunks)}", a, b, "same_gradients")
        for name, gradient in gradients(mixer, (got * weights).sum()).items():
            close(f"gradient of {name} in chunks {tuple(chunks)}", gradient, expected[name], "same_gradients")


@check
def forked_cache(config: MixerConfig) -> None:
    """Two continuations of one cache are both right, also when their tokens alternate."""
    mixer = toy_mixer(config)
    width = config.receptive_field or NO_BOUND
    for prompt in sorted({1, width - 1 or 1, width, width + 2}):
        stem = toy_context(tokens=prompt, name="stem")
        branches = [toy_context(tokens=6, name=f"branch {n}") for n in range(2)]
        with torch.no_grad():
            _, start = mixer(stem, toy_layout(stem), mixer.new_cache())
            caches, outputs = [start, start], ([], [])
            for step in range(6):
                for n, branch in enumerate(branches):
                    token = branch[:, step : step + 1]
                    y, caches[n] = mixer(token, toy_layout(token, start=prompt + step), caches[n])
                    outputs[n].append(y)
            for n, branch in enumerate(branches):
                text = torch.cat((stem, branch), dim=1)
                whole, _ = mixer(text, toy_layout(text))
                what = f"continuation {n} of a cache of {prompt} tokens"
                close(what, torch.cat(outputs[n], dim=1), whole[:, prompt:], "same_values")


METERED = (1, 2, 5, 20, 300)
"""Numbers of tokens after which the bytes of a cache are measured."""


@check
def cache_size(config: MixerConfig) -> None:
    """The cache has the bytes that the meter finds after any number of tokens, and a cache with a window does not grow."""
    mixer, full, field, one = toy_mixer(config), set[int](), config.receptive_field, toy_context(tokens=1)
    for first, steps in ((1, 20), (300, 20)):
        with torch.no_grad():
            _, cache = mixer(toy_context(tokens=first), toy_layout(toy_context(tokens=first)), mixer.new_cache())
            for length in range(first, first + steps):
                held = held_bytes(cache)
                if length in METERED:
                    metered = sublayer_cache_bytes(config, toy_site(), Shape(2, length, element_bytes=8))
                    exactly(f"cache bytes after {length} tokens", held, metered)
                if field is not None and length >= field - 1:
                    full.add(held)
                _, cache = mixer(one, toy_layout(one, start=length), cache)
    if field is not None:
        exactly(f"sizes of the cache behind {field - 1} tokens or more", len(full), 1)
        sizes = list(_storage_sizes(mixer, 400))
        early, late = max(sizes[:200]), max(sizes[200:])
        require(late <= early, f"cache storage: {late} bytes after token 200, but at most {early} before; must not grow")


@check
def depth_cache_is_exact(config: DepthConfig) -> None:
    """The caches of depth mixers and ends have the bytes that the meter finds after any number of tokens, and do not grow."""
    model = toy_decoder(config)
    held = dict[int, list[int]]()
    for chunks in (RAGGED, (TOKENS, 1), (1,) * TOKENS):
        if chunks[0] == 1 and not any(map(any, held.values())):
            # Ragged chunks hold single tokens too.
            break
        cache, length = model.new_cache(), 0
        for tokens in chunks:
            with torch.no_grad():
                _, cache = model(toy_tokens(tokens=tokens), None, cache)
            length += tokens
            found = [held_bytes(part) for part in (*_depth_caches(cache), cache.ends)]
            exactly(f"depth cache bytes after {length} tokens in chunks {chunks}", found, held.setdefault(length, found))
    # Where nothing is ever held, one length is enough.
    lengths = held if any(map(any, held.values())) else (TOKENS,)
    metered = {length: _metered_caches(model, length) for length in (*lengths, 200)}
    for length in lengths:
        exactly(f"depth cache bytes after {length} tokens, of each sublayer and the ends", held[length], metered[length])
    exactly(f"depth cache bytes after 200 tokens and after {TOKENS}", metered[200], metered[TOKENS])


def _depth_caches(cache: Any) -> list[Any]:
    return [sublayer.depth for block in cache.sublayers for sublayer in block]


def _metered_caches(model: Decoder, tokens: int) -> list[int]:
    found = decoder_trace(model.config, Shape(2, tokens, element_bytes=8), traffic=False)
    return [operation.cache for operation in (*found.sublayers, found.ends)]


def _storage_sizes(mixer: Any, tokens: int) -> Iterator[int]:
    cache, context = mixer.new_cache(), toy_context(tokens=1)
    with torch.no_grad():
        for position in range(tokens):
            _, cache = mixer(context, toy_layout(context, start=position), cache)
            yield storage_bytes(reachable_tensors(cache))


def decode(model: Decoder, tokens: Tensor, chunks: Iterable[int], layout: TokenLayout | None = None) -> Tensor:
    """Runs a decoder chunk by chunk with its cache and returns all logits."""
    cache, start, parts = model.new_cache(), 0, []
    for length in chunks:
        part = None if layout is None else layout.part(start, start + length)
        logits, cache = model(tokens[:, start : start + length], part, cache)
        parts.append(logits)
        start += length
    return torch.cat(parts, dim=1)


def decode_mixer(mixer: Any, context: Tensor, chunks: Iterable[int]) -> Tensor:
    """Runs one mixer chunk by chunk with its cache over all tokens."""
    cache, start, parts = mixer.new_cache(), 0, []
    for length in chunks:
        part = context[:, start : start + length]
        if not part.shape[1]:
            break
        y, cache = mixer(part, toy_layout(part, start), cache)
        parts.append(y)
        start += length
    return torch.cat(parts, dim=1)
