"""Checks of influence: along positions and depth, within a window, across documents, and between rows of a batch."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twoaxis.core.layout import TokenLayout
from twoaxis.core.parameters import declarations
from twoaxis.depth import DepthConfig
from twoaxis.model import Decoder
from twoaxis.testing.conformance import check, close, differs, distance, exactly, identical, require
from twoaxis.testing.measured import Trace, gradients, trace
from twoaxis.testing.toy import (
    LOWEST_ID,
    TOKENS,
    VOCAB,
    AxisConfig,
    MixerConfig,
    decoder_config,
    noise,
    odd_width,
    other_tokens,
    toy_context,
    toy_decoder,
    toy_layout,
    toy_mixer,
    toy_tokens,
)


@check
def batch_invariance(config: AxisConfig) -> None:
    """A row gives the same logits in any order of the batch, and alone."""
    model = toy_decoder(config)
    tokens = toy_tokens(batch=4)
    base = model(tokens)
    order = torch.tensor([2, 0, 3, 1])
    close("logits of the permuted batch", model(tokens[order]), base[order], "same_values")
    for size in (1, 3):
        close(f"logits of a batch of {size}", model(tokens[:size]), base[:size], "same_values")


@check
def edge_shapes(config: AxisConfig) -> None:
    """One row of one token, one layer and an odd width work, and a one-token pass equals the first of many."""
    width = odd_width(config)
    smallest: dict[str, Any] = {"n_layers": 1, **({"d_model": width} if _builds(config, width) else {})}
    for changes in ({}, smallest):
        model = toy_decoder(config, **changes)
        tokens = toy_tokens(batch=1)
        full = model(tokens)
        one = model(tokens[:, :1])
        close(f"logits of one token with {changes or 'toy sizes'}", one, full[:, :1], "same_values")
        one.sum().backward()


def _builds(config: AxisConfig, d_model: int) -> bool:
    try:
        toy_decoder(config, n_layers=1, d_model=d_model)
    except ValueError:
        return False
    return True


@check
def empty_input(config: AxisConfig) -> None:
    """No rows, and rows without tokens, give logits of their shape, a loss of 0 and gradients of 0, in float32 and float64."""
    # One block has every read and write; mixers of heads find none of earlier layers before the second.
    mixes_heads = isinstance(config, DepthConfig) and config.design.heads != "none"
    model = Decoder.build(decoder_config(config, n_layers=2 if mixes_heads else 1))
    for dtype in (torch.float32, torch.float64):
        model, loss = model.to(dtype), torch.zeros((), dtype=dtype)
        for shape in ((0, TOKENS), (2, 0)):
            tokens, what = toy_tokens(*shape), f"of {list(shape)} tokens in {dtype}"
            logits = model(tokens)
            exactly(f"shape and dtype of the logits {what}", (tuple(logits.shape), logits.dtype), ((*shape, VOCAB), dtype))
            loss = loss + F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="sum")
            exactly(f"loss {what}", float(loss.detach()), 0.0)
        moved = [name for name, gradient in gradients(model, loss).items() if gradient.any()]
        exactly(f"gradients that are not 0 in {dtype}", moved, [])


@check
def causal_along_positions(config: AxisConfig) -> None:
    """Changing a token leaves every earlier position bit-identical, and changes its own."""
    model = toy_decoder(config)
    # A row for each position, so that two passes of one shape show all.
    tokens = toy_tokens(batch=1).repeat(TOKENS - 1, 1)
    changed = tokens.clone()
    for row, position in enumerate(range(1, TOKENS)):
        changed[row, position] = other_tokens(tokens)[row, position]
    base, got = model(tokens), model(changed)
    for row, position in enumerate(range(1, TOKENS)):
        identical(f"logits before token {position} when it changes", got[row, :position], base[row, :position])
        differs(f"logits at token {position} when it changes", got[row, position], base[row, position])


@check
def causal_along_depth(config: DepthConfig) -> None:
    """Disturbing the output of a sublayer changes no read up to that sublayer, and some later read, in values and gradients."""
    model = toy_decoder(config)
    tokens = toy_tokens()
    base = trace(model, tokens)
    for index, update in enumerate(base.updates):
        push = noise(tuple(update.shape), f"disturbance {index}")
        disturbed = trace(model, tokens, {index: push})
        _reads_until(index, disturbed, base, f"when sublayer {index} is disturbed")
        later = [*zip(disturbed.views[index + 1 :], base.views[index + 1 :], strict=True), ([disturbed.left], [base.left])]
        moved = max(distance(a, b) for got, expected in later for a, b in zip(got, expected, strict=True))
        require(moved > 0, f"no read after sublayer {index} changes when it is disturbed, some must")
    # State that a pass leaves behind shows in the next one.
    _reads_until(len(base.updates) - 1, trace(model, tokens), base, "after passes with disturbed sublayers")
    _gradients_go_down_only(model, tokens, base.updates)


def _reads_until(index: int, got: Trace, expected: Trace, when: str) -> None:
    for reader in range(index + 1):
        for a, b in zip(got.views[reader], expected.views[reader], strict=True):
            identical(f"read of sublayer {reader} {when}", a, b)


def _gradients_go_down_only(model: Decoder, tokens: Tensor, updates: list[Tensor]) -> None:
    probes = {index: torch.zeros_like(update, requires_grad=True) for index, update in enumerate(updates)}
    run = trace(model, tokens, probes)
    reaches = [False] * len(probes)
    for reader, views in enumerate([*run.views, [run.left]]):
        if not any(view.requires_grad for view in views):
            continue
        loss = torch.stack([(view * noise(tuple(view.shape), "probe")).sum() for view in views]).sum()
        found = torch.autograd.grad(loss, list(probes.values()), retain_graph=True, allow_unused=True)
        for index, gradient in enumerate(found):
            size = 0.0 if gradient is None else float(gradient.abs().max())
            if index >= reader:
                exactly(f"gradient of read {reader} to the output of sublayer {index}", size, 0.0)
            reaches[index] |= size > 0
    for index, reached in enumerate(reaches):
        require(reached, f"no later read has a gradient to the output of sublayer {index}, some must")


@check
def receptive_field_is_exact(config: MixerConfig) -> None:
    """An output changes with the farthest token of the declared receptive field, and not with the token before it."""
    for variant in with_windows(config, (1, 2, TOKENS - 1, TOKENS, TOKENS + 1)):
        mixer = toy_mixer(variant)
        width = variant.receptive_field or TOKENS + 1
        context = toy_context()
        layout = toy_layout(context)
        base, _ = mixer(context, layout)
        for source in range(TOKENS):
            changed, ids = context.clone(), layout.ids(config.kind).clone()
            changed[:, source] += noise((2, context.shape[-1]), f"token {source}")
            ids[:, source] = LOWEST_ID + (ids[:, source] + 1) % (VOCAB - LOWEST_ID)
            got, _ = mixer(changed, layout.of(ids))
            for reader in range(TOKENS):
                what = f"output {reader} with receptive field {width} when token {source} changes"
                if 0 <= reader - source < width:
                    # A mixer of pairs of tokens has nothing to say of the first one.
                    if reader == 0 and width > 1:
                        continue
                    differs(what, got[:, reader], base[:, reader])
                else:
                    identical(what, got[:, reader], base[:, reader])


@check
def window_covers_all(config: MixerConfig) -> None:
    """A window of at least all tokens means full causal mixing, however large it is."""
    layout = toy_layout(toy_context())
    windows = (TOKENS, TOKENS + 1, 4 * TOKENS, *((None,) if _allows_no_window(config) else ()))
    wide = with_windows(config, windows)[1:] or [config]
    outputs = [toy_mixer(variant)(toy_context(), layout)[0] for variant in wide]
    for variant, got in zip(wide[1:], outputs[1:], strict=True):
        close(f"output with receptive field {variant.receptive_field}", got, outputs[0], "same_values")


def with_windows(config: MixerConfig, windows: tuple[int | None, ...]) -> list[MixerConfig]:
    """The configuration with each of these windows; itself alone if it has no window."""
    if getattr(config, "window", None) is None:
        return [config]
    return [config, *(config.replace(window=window) for window in windows)]


def _allows_no_window(config: MixerConfig) -> bool:
    field = type(config).model_fields.get("window")
    return field is not None and field.default is None


@check
def position_offset_invariance(config: MixerConfig) -> None:
    """Shifting all positions by a constant leaves the outputs unchanged, if the gains of norms are equal."""
    mixer = toy_mixer(config)
    with torch.no_grad():
        # A norm after the rotation commutes with it only if its gain is the same for both channels of a pair.
        for _, parameter, declaration in declarations(mixer):
            if declaration.tag == "norm":
                parameter.fill_(1.5)
    context, layout = toy_context(), toy_layout(toy_context())
    base, _ = mixer(context, layout)
    for start in (1, 1000):
        got, _ = mixer(context, toy_layout(context, start).of(layout.tokens))
        close(f"output with positions from {start}", got, base, "position_offset")


@check
def document_isolation(config: AxisConfig) -> None:
    """In a packed row no document depends on another: gradients are exactly 0, and values equal those of it alone."""
    model = toy_decoder(config)
    first, second = 5, 6
    tokens = toy_tokens(tokens=first + second)
    layout = TokenLayout.packed(torch.tensor([[0] * first + [1] * second]).expand(2, -1))
    changed = torch.cat((other_tokens(tokens[:, :first]), tokens[:, first:]), dim=1)
    base = model(tokens, layout)
    identical("second document when the first changes", model(changed, layout)[:, first:], base[:, first:])
    close("second document against it alone", base[:, first:], model(tokens[:, first:]), "same_values")
    close("first document against it alone", base[:, :first], model(tokens[:, :first]), "same_values")
    embeddings = model.embed(tokens).detach().requires_grad_()
    hidden, _ = model.hidden(embeddings, layout, tokens=tokens)
    (gradient,) = torch.autograd.grad((hidden * noise(tuple(hidden.shape), "loss"))[:, first:].sum(), embeddings)
    exactly("gradient of the second document to the first", float(gradient[:, :first].abs().max()), 0.0)
    require(float(gradient[:, first:].abs().max()) > 0, "gradient of the second document to itself: 0, must not be")
