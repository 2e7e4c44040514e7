from typing import Any

import pytest
import torch
from torch import Tensor

from twoaxis import DEPTH, LOCAL, SEQUENCE, Decoder, TokenLayout
from twoaxis.core.layout import PADDING
from twoaxis.sequence import ShortSWA, ShortSWAConfig
from twoaxis.testing.toy import toy_decoder, toy_tokens

from .build import MODELS, NAMES, decoder, same, tokens

LENGTHS = (5, 6)
DOCUMENTS = torch.tensor([[0] * LENGTHS[0] + [1] * LENGTHS[1]])
LAYOUT = TokenLayout.packed(DOCUMENTS)


@pytest.fixture(params=MODELS, ids=NAMES)
def model(request: pytest.FixtureRequest) -> Decoder:
    return decoder(**request.param)


def test_a_packed_document_sees_only_itself(model: Decoder) -> None:
    # Case A06: restarting the positions alone does not isolate documents.
    text = tokens(1, 11)
    packed = model(text, LAYOUT)
    replaced = text.clone()
    replaced[:, :5] = tokens(1, 5, seed=1)
    assert torch.equal(model(replaced, LAYOUT)[:, 5:], packed[:, 5:])
    same(packed[:, :5], model(text[:, :5]))
    same(packed[:, 5:], model(text[:, 5:]))


def test_no_gradient_crosses_documents(model: Decoder) -> None:
    embeddings = model.embed(tokens(1, 11)).detach().requires_grad_()
    hidden, _ = model.hidden(embeddings, LAYOUT)
    (gradient,) = torch.autograd.grad(hidden[:, 5:].square().sum(), embeddings)
    assert not gradient[:, :5].any()
    assert gradient[:, 5:].any(-1).all()


def test_positions_alone_do_not_isolate() -> None:
    model, text = decoder(), tokens(1, 11)
    replaced = text.clone()
    replaced[:, :5] = tokens(1, 5, seed=1)
    positions_only = TokenLayout(LAYOUT.positions)
    assert not torch.equal(model(replaced, positions_only)[:, 5:], model(text, positions_only)[:, 5:])


def test_a_document_that_returns_is_another_document_only_in_position() -> None:
    model, text = decoder(), tokens(1, 6)
    documents = torch.tensor([[0, 0, 1, 1, 0, 0]])
    packed = TokenLayout.packed(documents)
    before = model(text, packed)
    text[0, 2] = (text[0, 2] + 1) % 19
    assert torch.equal(model(text, packed)[:, 4:], before[:, 4:])


@pytest.mark.parametrize("padding", [0, 1, 6])
def test_left_padding_changes_nothing(model: Decoder, padding: int) -> None:
    # Case A05: also with an all-padding prefix longer than the window.
    lengths, longest = (3, 7), 7 + padding
    rows = [tokens(1, length, seed=length) for length in lengths]
    for pad in (0, 5):
        batch = torch.full((2, longest), pad)
        for row, text in zip(batch, rows, strict=True):
            row[-text.shape[1] :] = text[0]
        logits = model(batch, TokenLayout.left_padded(torch.tensor(lengths), longest))
        assert logits.isfinite().all()
        for row, text in zip(logits, rows, strict=True):
            same(row[None, -text.shape[1] :], model(text))


@pytest.mark.parametrize("row", [*DEPTH, *SEQUENCE, *LOCAL], ids=lambda row: row.kind)
def test_no_number_at_padding_reaches_real_tokens_or_weights(row: Any) -> None:
    # Caught: a weight of zero times NaN or infinity is NaN.
    config = row.example(next(iter(row.examples)))
    engines = ["fused", "reference"] if "impl" in type(config).model_fields else [None]
    for engine in engines:
        model = toy_decoder(config if engine is None else config.replace(impl=engine))
        text, layout = toy_tokens(tokens=6), TokenLayout.left_padded(torch.tensor([4, 6]), 6)
        embeddings = model.embed(text).detach()
        found = []
        for token, values in enumerate(((1.0, 1.0), (torch.nan, torch.inf))):
            given, ids = embeddings.clone(), text.clone()
            given[0, :2], ids[0, :2] = torch.tensor(values).unsqueeze(-1), token
            hidden, _ = model.hidden(given.requires_grad_(), layout, tokens=ids)
            loss = hidden[0, 2:].square().sum() + hidden[1].square().sum()
            grads = torch.autograd.grad(loss, [given, *model.parameters()], allow_unused=True)
            cached, cache = model.hidden(given.detach()[:, :3], layout.part(0, 3), model.new_cache(), tokens=ids[:, :3])
            step, _ = model.hidden(given.detach()[:, 3:], layout.part(3, 6), cache, tokens=ids[:, 3:])
            assert not grads[0][0, :2].any()
            found.append([hidden[0, 2:], hidden[1], cached[0, 2:], step, *(grad for grad in grads if grad is not None)])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_short_swa_of_a_host_is_finite_whatever_stands_at_padding() -> None:
    module, x = ShortSWA(ShortSWAConfig(n_heads=2, window=3), 8), torch.randn(1, 5, 8)
    layout = TokenLayout.left_padded(torch.tensor([3]), 5)
    expected, _ = module(x[:, 2:])
    x[:, :2] = torch.nan
    update, _ = module(x, layout)
    torch.testing.assert_close(update[:, 2:], expected)
    update[:, 2:].sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in module.parameters())


def test_a_row_of_padding_is_finite(model: Decoder) -> None:
    layout = TokenLayout.left_padded(torch.tensor([0, 4]), 4)
    assert layout.documents is not None and (layout.documents[0] == PADDING).all()
    logits: Tensor = model(tokens(2, 4), layout)
    total, _ = model.loss(tokens(2, 4), tokens(2, 4), layout)
    total.backward()
    assert logits.isfinite().all()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
