"""Compiled generation: the tokens of the eager path, by one program for prompts of any lengths."""

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch

from twoaxis.depth import ResidualConfig
from twoaxis.model import Decoder
from twoaxis.model.block import RMSNorm
from twoaxis.model.generate import generate
from twoaxis.model.static_cache import _PROGRAMS, ROOM_TOKENS, StaticSteps
from twoaxis.testing.toy import toy_decoder

PROMPTS = [[[1, 2, 3, 4, 5, 6, 7], [3, 1]], [[5], [4, 4, 4]]]

MODEL: dict[str, Any] = {
    "vocab_size": 64,
    "d_model": 32,
    "n_layers": 1,
    "max_seq_len": 64,
    "depth": {"kind": "deep_delta", "preset": "ddl_tc"},
    "blocks": [["attention", "short_conv", {"kind": "attention", "window": 4, "sink": "learned"}, "ngram_embedding", "swiglu"]],
}


@pytest.mark.compile
def test_compiled_steps_choose_the_tokens_of_eager_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    # All of compilation but the kernels, which take minutes; `benchmarks.decode` compares tokens of these.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    model = Decoder.build(MODEL).double()
    for prompts in PROMPTS:
        assert generate(model, prompts, 20, compile=True) == generate(model, prompts, 20)
    assert len(_PROGRAMS[model]) == 1
    assert all(parameter.requires_grad and not parameter.is_inference() for parameter in model.parameters())


@pytest.mark.compile
def test_any_number_of_programs_is_compiled_and_none_keeps_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    # More than the 8 versions of one function that torch.compile keeps.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = Decoder.build({"vocab_size": 16, "d_model": 8, "n_layers": 1, "max_seq_len": 64, "blocks": [["attention"]]})
    for rows in range(1, 10):
        generate(model, [[1, 2]] * rows, 4, compile=True)
    assert len(_PROGRAMS[model]) == 9
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


@pytest.mark.compile
def test_a_compiled_step_notices_what_changes_in_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = toy_decoder(ResidualConfig(), max_seq_len=64)
    before = generate(model, [[1, 2]], 8, compile=True)
    norms = [module for module in model.modules() if isinstance(module, RMSNorm)]
    for norm in norms:
        norm.scale = -3.0
    after = generate(model, [[1, 2]], 8, compile=True)
    assert after == generate(model, [[1, 2]], 8) != before
    model.float()
    assert generate(model, [[1, 2]], 8, compile=True) == generate(model, [[1, 2]], 8)


def test_a_ring_has_room_for_a_multiple_of_tokens_and_no_more_than_the_model() -> None:
    tokens = torch.tensor([[1, 2, 3]])
    for longest, room in ((4096, ROOM_TOKENS), (100, 100)):
        model = toy_decoder(ResidualConfig(), max_seq_len=longest)
        with torch.no_grad():
            _, cache = model(tokens, None, model.new_cache())
        assert (
            max(leaf.shape[2] for leaf in StaticSteps(model, cache, 1, 40, compile=False).rows._leaves if leaf.ndim == 4)
            == room
        )
