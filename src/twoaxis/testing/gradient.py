"""Checks of gradients, of torch.compile, of both engines, and of recomputation."""

from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from torch.autograd.gradcheck import GradcheckError
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten

from twoaxis.core.layout import TokenLayout
from twoaxis.core.parameters import declarations
from twoaxis.depth import DepthConfig
from twoaxis.model import Decoder
from twoaxis.testing.conformance import CheckFailed, bound, check, close, exactly, identical, require, slow_check
from twoaxis.testing.measured import gradients, read_and_write, saved_bytes, sublayer_list, tensors, trace
from twoaxis.testing.toy import (
    ATTENTION,
    FEED_FORWARD,
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

DEEP = 9
"""More than the 8 versions of one function that torch.compile keeps."""


@slow_check
def compiles_once(config: AxisConfig) -> None:
    """A model of 9 layers compiles to one graph without a break, a second step adds none, and the loss is the eager one."""
    if isinstance(config, DepthConfig):
        model = toy_decoder(config, n_layers=DEEP, blocks=((ATTENTION if _needs_heads(config) else FEED_FORWARD,),))
    else:
        model = toy_decoder(config, n_layers=2)
    tokens, targets = toy_tokens(), toy_tokens(seed=1)
    torch._dynamo.reset()
    counters.clear()
    frames = CompileCounter()
    loss = torch.compile(lambda: model.loss(tokens, targets)[0], backend=frames)
    try:
        first = loss()
        exactly("graph breaks", sorted(counters["graph_break"].values()), [])
        exactly("graphs of the first step", frames.frame_count, 1)
        found = gradients(model, first)
        close("compiled loss", loss(), model.loss(tokens, targets)[0], "same_values")
        exactly("graphs after a second step", frames.frame_count, 1)
    finally:
        torch._dynamo.reset()
    expected = gradients(model, model.loss(tokens, targets)[0])
    for name, gradient in expected.items():
        close(f"compiled gradient of {name}", found[name], gradient, "same_gradients")


def _needs_heads(config: DepthConfig) -> bool:
    """Whether it mixes heads, or separate views for them; a sublayer without heads is traced in a third of the time."""
    splits = any(config.splits_views(site) for site in toy_site().stack.sites)
    return splits or any(sublayer.depth.mixes_heads for sublayer in sublayer_list(toy_decoder(config)))


class _ThroughDepth(nn.Module):
    """Every read, every write and both ends, as a function of the embeddings and of each sublayer's update and context.

    All reads together: a state may contain statistics of its other tensors, which cannot be disturbed alone.
    """

    def __init__(self, model: Decoder, layout: TokenLayout) -> None:
        super().__init__()
        self.layout = layout
        self.mixers = nn.ModuleList(sublayer.depth for sublayer in sublayer_list(model))
        self.ends = model.ends

    def forward(self, embeddings: Tensor, updates: list[Tensor], contexts: list[Any], heads: list[Any]) -> list[Tensor]:
        state, _ = self.ends.enter(embeddings)
        seen: list[Tensor] = []
        for module, *inputs in zip(self.mixers, updates, contexts, heads, strict=True):
            views, mixed, state = read_and_write(module, state, *inputs, layout=self.layout)
            seen += tensors((views, mixed))
        return [*seen, self.ends.leave(state)[0]]


class _Mix(nn.Module):
    def __init__(self, mixer: Any) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, context: Tensor) -> list[Tensor]:
        return [self.mixer(context, toy_layout(context))[0]]


@check
def gradcheck_read_write(config: DepthConfig) -> None:
    """Gradients of reads, writes and ends match finite differences for every parameter, update and context."""
    model = toy_decoder(config)
    tokens = toy_tokens(batch=1, tokens=2)
    with torch.no_grad():
        run = trace(model, tokens)
        embeddings = model.embed(tokens)
    _gradcheck(
        "reads and writes",
        _ThroughDepth(model, run.layout),
        (embeddings, list(run.updates), list(run.contexts), list(run.heads)),
    )


@check
def gradcheck_mixer(config: MixerConfig) -> None:
    """Gradients match finite differences for every parameter and the input."""
    _gradcheck("mixer", _Mix(toy_mixer(config)), (toy_context(batch=1, tokens=5),))


def _gradcheck(what: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
    leaves, structure = tree_flatten(inputs)
    parameters = dict(module.named_parameters())

    # Two vectors, since finite differences take two passes for every input.
    # One vector comes back, since each output takes two backward passes.
    def function(values: Tensor, weights: Tensor) -> Tensor:
        arguments = tree_unflatten(_split(values, leaves), structure)
        given = dict(zip(parameters, _split(weights, list(parameters.values())), strict=True))
        return torch.cat([y.reshape(-1) for y in functional_call(module, given, arguments) if y.requires_grad])

    flat = [_joined(leaves), _joined(list(parameters.values()))]
    atol, rtol = bound("gradcheck_absolute"), bound("gradcheck_relative")
    try:
        torch.autograd.gradcheck(function, flat, eps=1e-6, fast_mode=True, atol=atol, rtol=rtol)
    except GradcheckError as error:
        lines = str(error).splitlines()
        raise CheckFailed(f"gradcheck of {what}: {lines[0].strip(' ,')}; {lines[-1].strip()} Bound {atol:.0e}") from None


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.float64), *(part.detach().reshape(-1) for part in parts)]).requires_grad_()


def _split(joined: Tensor, parts: list[Tensor]) -> list[Tensor]:
    pieces = joined[1:].split([part.numel() for part in parts]) if parts else ()
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


@check
def gradients_reach_parameters(config: AxisConfig) -> None:
    """Every parameter has a non-zero gradient, or is declared dead with a reason and has none."""
    model = toy_decoder(config, tie_embeddings=False)
    logits = model(toy_tokens())
    found = gradients(model, (logits * noise(tuple(logits.shape), "loss")).sum())
    for name, _, declaration in declarations(model):
        size = float(found[name].abs().max())
        if declaration.dead is None:
            require(size > 0, f"gradient of {name}: 0, must not be, or the parameter must be declared dead")
        else:
            exactly(f"gradient of {name}, declared dead", size, 0.0)


@check
def fused_equals_reference(config: AxisConfig) -> None:
    """Both engines give the same outputs and the same gradients of parameters and inputs."""
    if "impl" not in type(config).model_fields:
        return
    models = [toy_decoder(config.replace(impl=impl)) for impl in ("reference", "fused")]
    tokens = toy_tokens()
    layouts = (None, TokenLayout.packed(torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0] * 4 + [1] * 5])))
    for layout in layouts:
        logits = [model(tokens, layout) for model in models]
        close("logits of the fused engine", logits[1], logits[0], "engines")
        weights = noise(tuple(logits[0].shape), "loss")
        expected, got = (gradients(m, (y * weights).sum()) for m, y in zip(models, logits, strict=True))
        for name, gradient in expected.items():
            close(f"gradient of {name} in the fused engine", got[name], gradient, "engine_gradients")
    if not isinstance(config, DepthConfig):
        _engines_of_a_long_row(config)


def _engines_of_a_long_row(config: MixerConfig) -> None:
    """Compares both engines on a row that a windowed engine processes in several chunks."""
    tokens = 150
    documents = torch.arange(tokens).expand(2, -1) // 40
    for layout in (TokenLayout.contiguous(tokens), TokenLayout.packed(documents)):
        layout = with_toy_ids(layout, 2)
        found = []
        for impl in ("reference", "fused"):
            mixer = toy_mixer(config.replace(impl=impl))
            context = toy_context(tokens=tokens).requires_grad_()
            y, _ = mixer(context, layout)
            loss = (y * noise(tuple(y.shape), "loss")).sum()
            (gradient,) = torch.autograd.grad(loss, context, retain_graph=True, materialize_grads=True)
            found.append((y, gradient, *gradients(mixer, loss).values()))
        close("output of the fused engine on a long row", found[1][0], found[0][0], "engines")
        for expected, got in zip(found[0][1:], found[1][1:], strict=True):
            close("gradients of the fused engine on a long row", got, expected, "engine_gradients")


@check
def recompute_parity(config: AxisConfig) -> None:
    """Recomputing blocks keeps loss and gradients bit-identical, and saves the states between blocks alone."""
    model = toy_decoder(config)
    tokens, targets = toy_tokens(), toy_tokens(seed=1)
    losses = [model.loss(tokens, targets, recompute=recompute)[0] for recompute in (False, True)]
    identical("loss", losses[1], losses[0])
    expected, got = (gradients(model, loss) for loss in losses)
    for name, gradient in expected.items():
        identical(f"gradient of {name}", got[name], gradient)
    exactly("bytes kept beyond the states between blocks", *_kept_and_allowed(model, tokens))


def _kept_and_allowed(model: Decoder, tokens: Tensor) -> tuple[int, int]:
    """Bytes that a pass with recomputation saves besides the states between blocks, and those of both ends alone."""
    parameters = list(model.parameters())
    embeddings = model.embed(tokens).detach().requires_grad_()
    states: list[Tensor] = []
    hooks = [block.register_forward_pre_hook(lambda _, inputs: states.extend(tensors(inputs[0]))) for block in model.blocks]
    hooks.append(model.blocks[-1].register_forward_hook(lambda _m, _i, output: states.extend(tensors(output[0]))))
    kept = saved_bytes(
        lambda: model.hidden(embeddings, recompute=True, tokens=tokens), lambda _: [*parameters, embeddings, *states]
    )
    for hook in hooks:
        hook.remove()
    last = trace(model, tokens).states[-1]
    layout = TokenLayout.contiguous(tokens.shape[1])

    def entered() -> Any:
        return model.ends.enter(model.mix_embeddings(embeddings, layout)[0])[0]

    enter = saved_bytes(entered, lambda first: [*parameters, embeddings, *tensors(first)])
    leave = saved_bytes(lambda: model.norm(model.ends.leave(last)[0]), lambda _: [*parameters, *tensors(last)])
    return kept, enter + leave
