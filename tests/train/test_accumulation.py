"""A18 and A19: every valid token of the batch weighs the same, however the batch is cut; none at all is no NaN."""

import pytest
import torch
from torch import Tensor

from twoaxis import Decoder, DecoderConfig, TokenLayout
from twoaxis.data import Batch
from twoaxis.ops.cross_entropy import IGNORE
from twoaxis.train.optim import OptimizerConfig, build_optimizer, parameter_groups
from twoaxis.train.parallel.placement import Placement
from twoaxis.train.step import accumulate_gradients, clip_gradients, take_step

ROWS, LENGTH, VOCABULARY = 6, 5, 13


@pytest.fixture
def model() -> Decoder:
    blocks = [[{"kind": "attention", "n_heads": 2}, "swiglu"]]
    return Decoder.build(DecoderConfig.from_data(dict(vocab_size=VOCABULARY, d_model=8, n_layers=1, blocks=blocks))).double()


@pytest.fixture
def batch() -> Batch:
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1))
    targets = tokens[:, 1:].clone()
    # Unequal numbers of valid targets, and two rows with none.
    targets[0, 1:] = IGNORE
    targets[1, :3] = IGNORE
    targets[2] = targets[3] = IGNORE
    documents = torch.tensor([[0, 0, 1, 1, 1]]).repeat(ROWS, 1)
    return Batch(tokens[:, :-1].clone(), targets, documents)


def token_loss(model: Decoder, batch: Batch) -> Tensor:
    layout = None if batch.documents is None else TokenLayout.packed(batch.documents)
    return model.loss(batch.tokens, batch.targets, layout)[0]


def gradients(model: Decoder, batch: Batch, rows: int) -> tuple[dict[str, Tensor], float, int]:
    model.zero_grad(set_to_none=True)
    loss, tokens = accumulate_gradients(lambda part: token_loss(model, part), batch, rows)
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found, loss.item(), tokens


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
def test_any_cut_gives_the_gradient_of_the_whole_batch(model: Decoder, batch: Batch, rows: int) -> None:
    whole, loss, tokens = gradients(model, batch, ROWS)
    cut, cut_loss, cut_tokens = gradients(model, batch, rows)
    assert (cut_tokens, tokens) == (batch.n_targets, batch.n_targets)
    assert cut_loss == pytest.approx(loss, rel=1e-12)
    for name, gradient in whole.items():
        torch.testing.assert_close(cut[name], gradient, rtol=1e-9, atol=1e-12)


def test_the_loss_is_the_mean_over_valid_tokens(model: Decoder, batch: Batch) -> None:
    _, loss, _ = gradients(model, batch, 2)
    assert batch.documents is not None
    logits = model(batch.tokens, TokenLayout.packed(batch.documents))
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE)
    assert loss == pytest.approx(expected.item(), rel=1e-12)


def test_a_masked_micro_batch_changes_nothing(model: Decoder, batch: Batch) -> None:
    assert batch.documents is not None
    good = Batch(batch.tokens[4:], batch.targets[4:], batch.documents[4:])
    both = Batch(batch.tokens[2:], batch.targets[2:], batch.documents[2:])
    alone, loss, _ = gradients(model, good, 2)
    beside, loss_beside, _ = gradients(model, both, 2)
    assert loss_beside == loss
    for name, gradient in alone.items():
        torch.testing.assert_close(beside[name], gradient, rtol=1e-12, atol=1e-15)


def test_a_batch_without_targets_has_loss_zero_and_finite_gradients(model: Decoder, batch: Batch) -> None:
    empty = batch._replace(targets=torch.full_like(batch.targets, IGNORE))
    found, loss, tokens = gradients(model, empty, 2)
    assert (loss, tokens) == (0.0, 0)
    assert len(found) == len(list(model.parameters()))
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in found.values())


def test_clipping_keeps_the_direction_and_reports_the_norm_before(model: Decoder, batch: Batch) -> None:
    before, _, _ = gradients(model, batch, ROWS)
    norm = torch.sqrt(torch.stack([gradient.square().sum() for gradient in before.values()]).sum())
    limit = norm.item() / 3
    assert clip_gradients(model.parameters(), limit).item() == pytest.approx(norm.item(), rel=1e-9)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, before[name] / 3, rtol=1e-4, atol=1e-12)
    assert clip_gradients(model.parameters(), 1e9).item() == pytest.approx(limit, rel=1e-4)


def test_a_step_moves_the_parameters_and_leaves_no_gradient(model: Decoder, batch: Batch) -> None:
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    config = OptimizerConfig(lr=0.01)
    optimizer = build_optimizer(parameter_groups(model, config), config)
    outcome = take_step(
        Placement(), lambda part: token_loss(model, part), optimizer, batch, rows=4, multiplier=0.5, clip_norm=1.0
    )
    assert outcome.tokens == batch.n_targets and outcome.loss > 0 and outcome.grad_norm > 0
    assert {group["lr"] for group in optimizer.param_groups} == {0.005}
    assert all(not torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
