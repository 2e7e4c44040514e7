"""Depth attention is causal short-window attention with depth as the position: outputs, gradients and window."""

import pytest
import torch
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.core.parameters import initialise
from twoaxis.core.site import Stack
from twoaxis.depth import DepthAttentionConfig
from twoaxis.model import DecoderConfig
from twoaxis.ops.local_attention import local_attention
from twoaxis.testing.toy import noise, perturb

D, G, B, T = 6, 7, 2, 3


def mixers(window: int | None, mode: str = "add"):  # type: ignore[no-untyped-def]
    config = DepthAttentionConfig.from_data({"window": window, "n_heads": 2, "head_dim": 4, "mode": mode})
    stack = Stack(D, 1e-6, (1,) * G)
    built = torch.nn.ModuleList(config.build(site) for site in stack.sites)
    initialise(built, 0)
    return config.build_ends(stack), perturb(built.double())


def updates() -> list[Tensor]:
    return [noise((B, T, D), f"update {g}") for g in range(G)]


def read_all(window: int | None, embeddings: Tensor, given: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    ends, built = mixers(window)
    state, streams, views = ends.enter(embeddings), [], []
    for mixer, update in zip(built, given, strict=True):
        streams.append(state.stream)
        view, carry = mixer.read(state)
        views.append(view)
        state = mixer.write(state, update, view, carry)
    return streams, views


@pytest.mark.parametrize("window", [1, 2, 3, G, G + 1, None])
def test_equals_local_attention_along_the_transposed_axis(window: int | None) -> None:
    embeddings = noise((B, T, D), "embeddings").requires_grad_()
    streams, views = read_all(window, embeddings, updates())
    _, built = mixers(window)
    q, k, v = ([], [], [])
    for mixer, x in zip(built, streams, strict=True):
        context = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * mixer.gain
        heads = list((context @ mixer.projection.T).chunk(1 + mixer.asks + mixer.is_asked, dim=-1))
        v.append(heads.pop())
        # A missing key or query meets nothing but itself, so that any value does.
        k.append(heads.pop() if mixer.is_asked else v[-1])
        q.append(heads.pop() if mixer.asks else v[-1])
    # Depth becomes the position, and every token a row of the batch.
    rows = [torch.stack(part, dim=2).reshape(B * T, G, 2, 4).transpose(1, 2) for part in (q, k, v)]
    y = local_attention(*rows, window=window).transpose(1, 2).reshape(B, T, G, 8)
    expected = [x + y[:, :, g] @ m.output.T for g, (m, x) in enumerate(zip(built, streams, strict=True))]
    for got, want in zip(views, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    cotangent = noise((B, T, D), "cotangent")
    gradients = [
        torch.autograd.grad(sum((view * cotangent).sum() for view in found), embeddings, retain_graph=True)[0]  # type: ignore[arg-type]
        for found in (views, expected)
    ]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-11)


@pytest.mark.parametrize("window", [1, 2, 4, None])
def test_a_sublayer_reads_exactly_its_window(window: int | None) -> None:
    """Keys and values of a state outside the window are not kept; inside, each of them changes the read."""
    ends, built = mixers(window)
    state = ends.enter(noise((B, T, D), "embeddings"))
    for index, (mixer, update) in enumerate(zip(built, updates(), strict=True)):
        width = index + 1 if window is None else min(window, index + 1)
        assert len(state.values) == width - 1
        view, carry = mixer.read(state)
        for past in range(len(state.values)):
            moved = list(state.values)
            moved[past] = moved[past] + 1
            assert (mixer.read(state._replace(values=tuple(moved)))[0] - view).abs().max() > 1e-3
        state = mixer.write(state, update, view, carry)


def test_window_of_one_reads_only_itself() -> None:
    _, views = read_all(1, noise((B, T, D), "embeddings"), updates())
    _, built = mixers(1)
    streams, _ = read_all(1, noise((B, T, D), "embeddings"), updates())
    for mixer, x, view in zip(built, streams, views, strict=True):
        context = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * mixer.gain
        torch.testing.assert_close(view, x + context @ mixer.projection.T @ mixer.output.T, rtol=0, atol=1e-12)


def test_heads_that_do_not_divide_fail_at_config_time() -> None:
    with pytest.raises(ConfigError, match=r"n_heads=4: must be a divisor of d_model=6.*set head_dim"):
        DecoderConfig.from_data(dict(vocab_size=8, d_model=6, n_layers=1, depth="depth_attention", blocks=(("gelu",),)))
