from typing import Any

import pytest
import torch
from torch import Tensor

from twoaxis.core.parameters import initialise
from twoaxis.core.site import Stack
from twoaxis.depth import ElcBertConfig
from twoaxis.ops.norm import layer_norm
from twoaxis.testing import cost, gradient, state
from twoaxis.testing.check import Check
from twoaxis.testing.toy import ATTENTION, FEED_FORWARD, toy_decoder, toy_tokens

VARIANTS = ("base", "zero", "normalized", "weighted_output")


def logits(variant: Any, block: int) -> Tensor:
    mixer: Any = ElcBertConfig(variant=variant).build(Stack(2, 1e-6, (2,) * 12).sites[2 * block])
    initialise(mixer, 0)
    return mixer.combination.logits.detach()


@pytest.mark.parametrize("block", [1, 2, 11])
def test_initial_weights(block: int) -> None:
    n = block + 1
    for variant in ("zero", "normalized", "weighted_output"):
        torch.testing.assert_close(logits(variant, block).softmax(0), torch.full((n,), 1 / n))
    newest = float(torch.e / (torch.e + n - 1))
    assert float(logits("base", block).softmax(0)[-1]) == pytest.approx(newest)


def test_published_initial_weights_of_the_newest() -> None:
    found = [round(float(logits("base", n - 1).softmax(0)[-1]), 3) for n in (2, 6, 12)]
    assert found == [0.731, 0.352, 0.198]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("sublayers", [1, 2, 3])
def test_blocks_of_any_length_are_the_equation(variant: Any, sublayers: int) -> None:
    """Written out over lists of all outputs, which nothing drops."""
    config = ElcBertConfig(variant=variant)
    model = toy_decoder(config, blocks=((ATTENTION, FEED_FORWARD, ATTENTION)[:sublayers],))
    parts: Any = [[sublayer.depth for sublayer in block.sublayers] for block in model.blocks]  # type: ignore[union-attr]
    ends: Any = model.ends
    embeddings = model.embed(toy_tokens())
    weight = torch.linspace(-1, 1, 64, dtype=torch.float64).reshape(8, 8)

    current, outputs = ends.enter(embeddings), [embeddings]
    for block in parts:
        w = block[0].combination.logits.softmax(0) if block[0].combination else torch.ones(1, dtype=torch.float64)
        U = sum(a * h for a, h in zip(w, outputs, strict=True))
        A: Any = 0
        for place, mixer in enumerate(block):
            view, carry = mixer.read(current)
            expected = A if place and variant == "base" else U + A
            torch.testing.assert_close(view, expected)
            f = torch.tanh(expected @ weight)
            current = mixer.write(current, torch.tanh(view @ weight), view, carry)
            A = A + f
        outputs.append(
            A if variant != "normalized" else (A - A.mean(-1, True)) / (A.var(-1, False, keepdim=True) + 1e-7).sqrt()
        )
    w = ends.combination.logits.softmax(0) if ends.combination else torch.eye(len(outputs), dtype=torch.float64)[-1]
    torch.testing.assert_close(ends.leave(current), sum(a * h for a, h in zip(w, outputs, strict=True)))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("sublayers", [1, 3])
@pytest.mark.parametrize(
    "check",
    [cost.depth_saved_bytes_are_exact, state.state_floats_are_exact, gradient.gradients_reach_parameters],
    ids=lambda check: check.name,
)
def test_blocks_of_any_length_keep_their_promises(
    variant: Any, sublayers: int, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = ((ATTENTION, FEED_FORWARD, ATTENTION)[:sublayers],)
    for module in (cost, state, gradient):
        monkeypatch.setattr(module, "toy_decoder", lambda config, **kw: toy_decoder(config, **{**kw, "blocks": blocks}))
    check.run(ElcBertConfig(variant=variant))


def test_one_source_has_no_logit() -> None:
    for config in (ElcBertConfig(), ElcBertConfig(variant="weighted_output")):
        assert not list(config.build(Stack(2, 1e-6, (2, 2)).sites[0]).parameters())


def test_the_sources_are_dropped_once_the_last_block_has_read_them() -> None:
    stack = Stack(1, 1e-6, (2,) * 3)
    assert [ElcBertConfig(variant="base").state_floats(stack, i) for i in range(7)] == [1, 2, 2, 3, 3, 1, 1]
    assert [ElcBertConfig(variant="weighted_output").state_floats(stack, i) for i in range(7)] == [1, 3, 2, 4, 3, 5, 4]


def test_normalised_outputs_have_mean_0_and_variance_1() -> None:
    y = layer_norm(torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0)), 1e-7)
    torch.testing.assert_close(y.mean(-1), torch.zeros(2, 3), atol=1e-6, rtol=0)
    torch.testing.assert_close(y.var(-1, unbiased=False), torch.ones(2, 3), atol=1e-5, rtol=0)
