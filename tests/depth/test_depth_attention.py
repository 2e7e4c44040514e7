"""Depth attention is causal short-window attention with depth as the position: in a decoder, and read by read."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from twoaxis.core.cost import Shape
from twoaxis.core.errors import ConfigError
from twoaxis.core.layout import TokenLayout
from twoaxis.core.measure import gradients
from twoaxis.core.parameters import initialise
from twoaxis.core.position import LayerStack
from twoaxis.depth import DepthAttentionConfig, DepthAxis
from twoaxis.depth.depth_attention import DepthAttention
from twoaxis.model import Decoder, DecoderConfig
from twoaxis.model.trace import trace
from twoaxis.ops.depth_attention import depth_attention
from twoaxis.ops.local_attention import local_attention
from twoaxis.testing.toy import noise, perturb

D, G, B, T = 6, 7, 2, 3

ATTENTION, FEED_FORWARD = {"kind": "attention", "n_heads": 2, "head_dim": 4}, {"kind": "swiglu", "d_ff": 12}
N_BLOCKS, WIDTH = 4, 8
UNEQUAL = ((ATTENTION, FEED_FORWARD), (ATTENTION,), (ATTENTION, ATTENTION, FEED_FORWARD))


def decoder(blocks: Any = ((ATTENTION, FEED_FORWARD),), **options: Any) -> Decoder:
    depth = {"kind": "depth_attention", **options}
    sizes = {"vocab_size": 11, "d_model": WIDTH, "n_layers": N_BLOCKS, "blocks": blocks, "tie_embeddings": False}
    return perturb(Decoder.build(DecoderConfig.from_data({**sizes, "depth": depth})).double())


def tokens() -> Tensor:
    return torch.arange(B * T).reshape(B, T) ** 2 % 11


def paper_read(owner: Any, config: DepthAttentionConfig, states: list[Tensor], eps: float) -> Tensor:
    """z^(l) of section 2.2 for the last of these states, one number of a softmax at a time."""
    n_heads = config.n_heads
    # Without a choice to make there is one matrix, that of the values; any query and key have the same softmax then.
    *asking, W_V = owner.projection.unflatten(0, (-1, config.width(WIDTH))).unbind(0)
    W_Q, W_K = asking or (torch.zeros_like(W_V), torch.zeros_like(W_V))
    d_k = len(W_V) // n_heads
    first = 0 if config.window is None else max(0, len(states) - config.window)
    rows = []
    for b in range(B):
        for t in range(T):
            window = [h[b, t] for h in states[first:]]
            if config.states == "normalised":
                window = [h / torch.sqrt((h * h).mean() + eps) * owner.gain for h in window]
            heads = []
            for part in range(n_heads):
                of = slice(part * d_k, (part + 1) * d_k)
                q = W_Q[of] @ window[-1]
                scores = [torch.exp((q @ (W_K[of] @ h)) / math.sqrt(d_k)) for h in window]
                values = [score / sum(scores) * (W_V[of] @ h) for score, h in zip(scores, window, strict=True)]
                heads.append(torch.stack(values).sum(0))
            rows.append(torch.cat(heads))
    return torch.stack(rows).unflatten(0, (B, T))


def as_in_the_paper(model: Decoder) -> Tensor:
    """Logits of the decoder, every depth read being transcribed and every sublayer run as it is."""
    config: Any = model.config.depth
    layout, h, states = TokenLayout.contiguous(T), model.embed(tokens()), list[Tensor]()

    def read() -> Tensor:
        z = paper_read(model.ends, config, states, model.config.norm_eps)
        z = z @ model.ends.output.T if config.output == "matrix" else z  # type: ignore[union-attr,operator]
        return states[-1] + z if config.mode == "add" else z

    for block in model.blocks:
        for place, sublayer in enumerate(block.sublayers):  # type: ignore[operator,arg-type,union-attr]
            if place == 0 or config.granularity == "sublayer":
                states.append(h)
                h = read()
            h = h + sublayer.mixer(sublayer.norm(h), layout)[0]
    if config.head == "read":
        states.append(h)
        h = read()
    return model.logits(model.norm(h))


@pytest.mark.parametrize("n_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [1, 2, 3, N_BLOCKS, None])
def test_a_decoder_is_section_2_2_of_the_paper(window: int | None, n_heads: int) -> None:
    check_transcription(decoder(window=window, n_heads=n_heads))


@pytest.mark.parametrize(
    "options",
    [
        {"states": "raw", "head": "read"},
        {"head": "read", "window": 2},
        {"mode": "replace", "window": None},
        {"mode": "replace", "output": "none", "states": "raw"},
        {"output": "none", "head": "read"},
        {"output_init": "scaled", "head_dim": 3, "window": None},
        {"granularity": "sublayer", "window": 3},
        {"blocks": UNEQUAL, "window": 3},
        {"blocks": UNEQUAL, "granularity": "sublayer", "head": "read"},
    ],
    ids=str,
)
def test_options_are_what_they_say(options: dict[str, Any]) -> None:
    check_transcription(decoder(**{"n_heads": 2, **options}))


def check_transcription(model: Decoder) -> None:
    logits, expected = model(tokens()), as_in_the_paper(model)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)
    weights = noise(tuple(logits.shape), "loss")
    got, want = (gradients(model, (y * weights).sum()) for y in (logits, expected))
    for name, gradient in want.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(got[name], gradient, rtol=0, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")


def test_all_blocks_share_one_set_of_matrices_that_stands_once_in_a_checkpoint() -> None:
    model = decoder(n_heads=2)
    names = {name for name in model.state_dict() if name.startswith("ends.") or ".depth." in name}
    assert names == {"ends.projection", "ends.output", "ends.gain"}
    owned = decoder(n_heads=2, projections="own")
    assert sum(name.endswith(".depth.projection") for name in owned.state_dict()) == N_BLOCKS
    axis = DepthAxis(DepthAttentionConfig(n_heads=2), WIDTH, N_BLOCKS)
    assert {name for name, _ in axis.named_parameters()} == names


def test_at_7b_the_shared_matrices_are_67_million_and_own_ones_64_times_as_many() -> None:
    stack, shape = LayerStack(4096, 1e-6, (2,) * 32), Shape(1, 1)

    def params(config: DepthAttentionConfig) -> int:
        return config.ends_cost(stack, shape).params + sum(config.cost(site, shape).params for site in stack.sites)

    assert params(DepthAttentionConfig()) == 4 * 4096**2 + 4096 == 67_112_960
    # The first of 64 readers has nothing to choose from and no query.
    own = DepthAttentionConfig(projections="own", granularity="sublayer")
    assert params(own) == 64 * (4 * 4096**2 + 4096) - 4096**2


@pytest.mark.parametrize("window", [1, 3])
def test_a_reader_uses_as_many_shared_parameters_as_it_would_own(window: int) -> None:
    stack, shape = LayerStack(WIDTH, 1e-6, (2,) * N_BLOCKS), Shape(1, 1)
    shared, own = (DepthAttentionConfig(window=window, n_heads=2, projections=form) for form in ("shared", "own"))
    used = [shared.cost(site, shape).shared_params for site in stack.sites]
    assert used == [own.cost(site, shape).params for site in stack.sites]
    assert [count > 0 for count in used] == [site.opens_block for site in stack.sites]
    assert max(used) == shared.ends_cost(stack, shape).params


def test_a_window_of_one_has_no_query_and_no_key() -> None:
    model = decoder(window=1, n_heads=2)
    assert model.ends.projection.shape == (WIDTH, WIDTH)  # type: ignore[union-attr]
    assert all(state.keys == state.values == () for state in trace(model, tokens()).states)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"window": None}, [0, 1, 1, 2, 2, 3, 3, 0, 0]),
        ({"window": 2}, [0, 1, 1, 1, 1, 1, 1, 0, 0]),
        ({"window": 3, "head": "read"}, [0, 1, 1, 2, 2, 2, 2, 2, 2]),
        ({"window": 3, "granularity": "sublayer"}, [0, 1, 2, 2, 2, 2, 2, 2, 0]),
    ],
    ids=str,
)
def test_a_state_holds_one_key_and_value_for_each_block_that_can_still_be_read(
    options: dict[str, Any], kept: list[int]
) -> None:
    states = trace(decoder(n_heads=2, **options), tokens()).states
    assert [len(state.keys) for state in states] == [len(state.values) for state in states] == kept
    # A key that is handed on is the tensor itself, made once.
    for before, after in itertools.pairwise(states):
        shared = {id(key) for key in before.keys} & {id(key) for key in after.keys}
        assert len(shared) >= len(after.keys) - 1


RECORDS = {
    "added": (
        {"window": 3, "mode": "add", "n_heads": 2, "head_dim": None, "states": "normalised"},
        [-0.41848552488756, 0.0785709454415813, 1.09192423451927],
    ),
    "replaced": (
        {"window": None, "mode": "replace", "n_heads": 2, "head_dim": 3, "states": "raw"},
        [-1.24302190971942, 0.199624982698393, 0.662993745985368],
    ),
}
"""All options of a record from before there were others, and logits that the code of that time computed."""


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_without_the_newer_options_computes_what_it_was_trained_as(name: str) -> None:
    options, logits = RECORDS[name]
    sizes = {"vocab_size": 11, "d_model": WIDTH, "n_layers": N_BLOCKS, "tie_embeddings": False}
    depth = {"kind": "depth_attention", "impl": "fused", **options}
    config: Any = DecoderConfig.from_record({**sizes, "blocks": ((ATTENTION, FEED_FORWARD),), "depth": depth})
    assert (config.depth.projections, config.depth.granularity) == ("own", "sublayer")
    model = perturb(Decoder.build(config).double())
    assert not [parameter for parameter, _ in model.ends.named_parameters()]
    torch.testing.assert_close(model(tokens())[1, 2, :3].tolist(), logits, rtol=0, atol=1e-12)
    today: Any = DecoderConfig.from_data({**sizes, "depth": depth})
    assert (today.depth.projections, today.depth.granularity) == ("shared", "block")


def own_mixers(window: int | None, mode: str = "add"):  # type: ignore[no-untyped-def]
    options = {"window": window, "n_heads": 2, "head_dim": 4, "mode": mode, "projections": "own", "granularity": "sublayer"}
    config = DepthAttentionConfig.from_data(options)
    stack = LayerStack(D, 1e-6, (1,) * G)
    mixers, ends = config.build(stack)
    built = torch.nn.ModuleList(mixers)
    initialise(built, 0)
    return ends, perturb(built.double())


def updates() -> list[Tensor]:
    return [noise((B, T, D), f"update {g}") for g in range(G)]


def read_all(window: int | None, embeddings: Tensor, given: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    ends, built = own_mixers(window)
    state, streams, views = ends.enter(embeddings)[0], [], []
    for mixer, update in zip(built, given, strict=True):
        streams.append(state.stream)
        view, carry, _ = mixer.read(state)
        views.append(view)
        state = mixer.write(state, update, view, carry)
    return streams, views


@pytest.mark.parametrize("window", [1, 2, 3, G, G + 1, None])
def test_own_matrices_read_as_local_attention_along_the_transposed_axis(window: int | None) -> None:
    embeddings = noise((B, T, D), "embeddings").requires_grad_()
    streams, views = read_all(window, embeddings, updates())
    _, built = own_mixers(window)
    q, k, v = ([], [], [])
    for mixer, x in zip(built, streams, strict=True):
        context = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * mixer.gain
        heads = list((context @ mixer.projection.T).chunk(mixer.state_read.parts, dim=-1))
        v.append(heads.pop())
        # A missing key or query meets nothing but itself, so that any value does.
        k.append(heads.pop() if heads else v[-1])
        q.append(heads.pop() if heads else v[-1])
    # Depth becomes the position, and every token a row of the batch.
    rows = [torch.stack(part, dim=2).reshape(B * T, G, 2, 4).transpose(1, 2) for part in (q, k, v)]
    y = local_attention(*rows, window=window).transpose(1, 2).reshape(B, T, G, 8)
    expected = [x + y[:, :, g] @ m.output.T for g, (m, x) in enumerate(zip(built, streams, strict=True))]
    for got, want in zip(views, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    cotangent = noise((B, T, D), "cotangent")
    found = [
        torch.autograd.grad(sum((view * cotangent).sum() for view in found), embeddings, retain_graph=True)[0]  # type: ignore[arg-type]
        for found in (views, expected)
    ]
    torch.testing.assert_close(*found, rtol=0, atol=1e-11)


@pytest.mark.parametrize("window", [1, 2, 4, None])
def test_a_sublayer_reads_exactly_its_window(window: int | None) -> None:
    """Keys and values of a state outside the window are not kept; inside, each of them changes the read."""
    ends, built = own_mixers(window)
    state = ends.enter(noise((B, T, D), "embeddings"))[0]
    for index, (mixer, update) in enumerate(zip(built, updates(), strict=True)):
        width = index + 1 if window is None else min(window, index + 1)
        assert len(state.values) == width - 1
        view, carry, _ = mixer.read(state)
        for past in range(len(state.values)):
            moved = list(state.values)
            moved[past] = moved[past] + 1
            assert (mixer.read(state._replace(values=tuple(moved)))[0] - view).abs().max() > 1e-3
        state = mixer.write(state, update, view, carry)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_heads": 4}, r"n_heads=4: must be a divisor of d_model=6.*set head_dim"),
        ({"n_heads": 2, "head_dim": 4, "output": "none"}, r"n_heads \* head_dim=8: must be d_model=6 with output='none'"),
        ({"n_heads": 2, "output": "none", "output_init": "zero"}, r"output_init='zero': must be left out with output='none'"),
        ({"n_heads": 2, "mode": "replace", "output_init": "zero"}, r"output_init='zero': must be 'scaled' with mode='replace'"),
    ],
)
def test_options_that_cannot_be_fail_at_config_time(options: dict[str, Any], message: str) -> None:
    depth = {"kind": "depth_attention", **options}
    with pytest.raises(ConfigError, match=message):
        DecoderConfig.from_data(dict(vocab_size=8, d_model=6, n_layers=1, depth=depth, blocks=(("gelu",),)))


def test_shared_matrices_are_not_built_without_the_ends_that_own_them() -> None:
    first, second = LayerStack(D, 1e-6, (2,)).sites
    config = DepthAttentionConfig(n_heads=2)
    with pytest.raises(ConfigError, match=r"projections='shared': must be 'own' for a mixer that is built alone.*DepthAxis"):
        DepthAttention.build_alone(config, first)
    assert not list(DepthAttention.build_alone(config, second).parameters())


def test_the_result_and_its_gradients_have_the_dtypes_of_values_and_of_each_input() -> None:
    q, k = (torch.randn(1, 2, 1, 4, requires_grad=True) for _ in range(2))
    v = torch.randn(1, 2, 1, 4, dtype=torch.bfloat16, requires_grad=True)
    y = depth_attention(q, [k, k], [v, v])
    assert y.dtype == torch.bfloat16
    assert [grad.dtype for grad in torch.autograd.grad(y.sum(), [q, k, v])] == [torch.float32, torch.float32, torch.bfloat16]
