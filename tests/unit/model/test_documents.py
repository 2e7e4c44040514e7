import pytest
import torch
from torch import Tensor

from twoaxis import Decoder, TokenLayout
from twoaxis.core.layout import PADDING

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


def test_a_row_of_padding_is_finite(model: Decoder) -> None:
    layout = TokenLayout.left_padded(torch.tensor([0, 4]), 4)
    assert layout.documents is not None and (layout.documents[0] == PADDING).all()
    logits: Tensor = model(tokens(2, 4), layout)
    total, _ = model.loss(tokens(2, 4), tokens(2, 4), layout)
    total.backward()
    assert logits.isfinite().all()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
