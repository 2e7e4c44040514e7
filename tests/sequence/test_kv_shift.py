import torch

from twoaxis.core.layout import TokenLayout
from twoaxis.core.parameters import initialise
from twoaxis.sequence import AttentionConfig, KVShiftConfig
from twoaxis.testing.toy import TOKENS, toy_context, toy_mixer, toy_site


def test_identity_shift_is_plain_attention() -> None:
    shifted = KVShiftConfig(n_heads=2, shift_init="identity").build(toy_site()).double()
    plain = AttentionConfig(n_heads=2).build(toy_site()).double()
    for mixer in (shifted, plain):
        initialise(mixer, 0)
    layout = TokenLayout.contiguous(TOKENS)
    y, _ = shifted(toy_context(), layout)
    expected, _ = plain(toy_context(), layout)
    assert torch.equal(y, expected)
    y.sum().backward()
    assert shifted.shift.grad is not None and (shifted.shift.grad.abs().amin(dim=1) > 0).all()


def test_published_pairs_sum_to_one_and_differ() -> None:
    mixer = KVShiftConfig(n_heads=4).build(toy_site())
    initialise(mixer, 0)
    assert mixer.shift.shape == (8, 2)
    assert torch.allclose(mixer.shift.sum(dim=-1), torch.ones(8))
    assert ((mixer.shift > 0) & (mixer.shift < 1)).all() and len(mixer.shift[:, 0].unique()) == 8


def test_queries_are_not_shifted() -> None:
    mixer = toy_mixer(KVShiftConfig(n_heads=2))
    layout = TokenLayout.contiguous(TOKENS)
    q, k, v, *_ = mixer.project(toy_context(), layout)[0]
    with torch.no_grad():
        mixer.shift.copy_(torch.tensor([0.0, 1.0]).expand_as(mixer.shift))
    plain = mixer.project(toy_context(), layout)[0]
    assert torch.equal(q, plain.q)
    assert not torch.allclose(k, plain.k) and not torch.allclose(v, plain.v)


def test_gates_are_between_zero_and_one_and_follow_the_token() -> None:
    mixer = toy_mixer(KVShiftConfig(n_heads=2, form="token"))
    previous, current = mixer._weights(toy_context())
    assert torch.equal(previous + current, torch.ones_like(previous))
    assert previous.std(dim=1).min() > 0 and previous.min() > 0 and previous.max() < 1
