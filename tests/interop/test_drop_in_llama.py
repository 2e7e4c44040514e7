"""Our modules in a Llama of transformers: the example `examples/drop_in/llama.py`."""

from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="without transformers there is no Llama to drop a module into")

from transformers import LlamaConfig, LlamaForCausalLM

from twoaxis.sequence import ShortSWA, ShortSWAConfig

from ..scripts import ROOT, load_script
from .test_drop_in import ours

ADDED = ["attention_residuals", "deep_delta", "short_swa"]
TOKENS = torch.tensor([[1, 7, 3, 9, 2, 11, 4, 0], [5, 5, 0, 8, 6, 4, 3, 12]])


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load_script(ROOT / "examples" / "drop_in" / "llama.py")


def plain() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 13, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 64}
    config = LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, eos_token_id=None)
    model = LlamaForCausalLM(config).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def add(example: ModuleType, name: str, model: Any) -> Any:
    if name == "short_swa":
        example.add_short_swa(model, window=3)
    else:
        example.add_depth(model, {"attention_residuals": example.ATTENTION_RESIDUALS, "deep_delta": example.DEEP_DELTA}[name])
    return model


@torch.no_grad()
def moved(example: ModuleType, name: str) -> Any:
    """The model with what is new away from where it starts."""
    model = add(example, name, plain())
    for parameter in ours(model).values():
        parameter += 0.3 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("name", ADDED)
def test_the_model_is_unchanged_and_every_new_parameter_learns(example: ModuleType, name: str) -> None:
    before, model = plain(), add(example, name, plain())
    torch.testing.assert_close(model(TOKENS).logits, before(TOKENS).logits, rtol=0, atol=1e-6)
    new = ours(model)
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert model.state_dict().keys() - before.state_dict().keys() >= new.keys() and new
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # The second step, since a weight that starts at zero holds back what lies behind it.
    for _ in range(2):
        optimizer.zero_grad()
        model(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
    assert not [name for name, p in new.items() if p.grad is None or not p.grad.any()]


@pytest.mark.parametrize("name", ADDED)
def test_it_looks_only_back(example: ModuleType, name: str) -> None:
    model, changed = moved(example, name), TOKENS.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 13
    before, after = model(TOKENS).logits, model(changed).logits
    assert torch.equal(before[:, :5], after[:, :5]) and not torch.equal(before[:, 6], after[:, 6])
    assert (before - plain()(TOKENS).logits).abs().max() > 1e-2


@pytest.mark.parametrize("name", ADDED)
def test_recomputing_layers_gives_the_same_gradients(example: ModuleType, name: str) -> None:
    model = moved(example, name).train()
    gradients = []
    for layer in (None, *model.model.layers[:1]):
        if layer is not None:
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable()
        model.zero_grad()
        model(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
@pytest.mark.parametrize("name", ADDED)
def test_generation_equals_the_full_pass(example: ModuleType, name: str, options: dict) -> None:
    model = moved(example, name)
    made = model.generate(TOKENS, max_new_tokens=6, do_sample=False, **options)
    uncached = model.generate(TOKENS, max_new_tokens=6, do_sample=False, use_cache=False, **options)
    assert torch.equal(made, uncached)
    if not options:
        assert torch.equal(model(made).logits[:, 7:-1].argmax(-1), made[:, 8:])


@pytest.mark.parametrize("name", ADDED)
def test_padding_on_the_left_changes_nothing(example: ModuleType, name: str) -> None:
    model = moved(example, name)
    padded = torch.cat((torch.zeros(2, 3, dtype=torch.long), TOKENS), dim=1)
    mask = torch.ones_like(padded)
    mask[0, :3] = 0
    alone = model(TOKENS[:1]).logits
    torch.testing.assert_close(model(padded, attention_mask=mask).logits[:1, 3:], alone)
    made = model.generate(padded, attention_mask=mask, max_new_tokens=4, do_sample=False)
    assert torch.equal(made[:1, 3:], model.generate(TOKENS[:1], max_new_tokens=4, do_sample=False))


@pytest.mark.parametrize("second", ADDED)
@pytest.mark.parametrize("first", ADDED)
def test_a_changed_model_is_refused_and_keeps_what_it_has(example: ModuleType, first: str, second: str) -> None:
    model = moved(example, first)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"layers\[0\]=\w+: must be LlamaDecoderLayer; change a plain model"):
        add(example, second, model)
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("name", ADDED)
def test_only_what_is_new_is_initialised(example: ModuleType, name: str) -> None:
    model = plain()
    model.model.layers[1].mlp.extra = ShortSWA(ShortSWAConfig(n_heads=2), 16)
    with torch.no_grad():
        for parameter in ours(model).values():
            parameter.fill_(7.0)
    trained = ours(model)
    add(example, name, model)
    assert trained and all((parameter == 7.0).all() for parameter in trained.values())
    assert all(parameter.isfinite().all() for parameter in ours(model).values())


def test_short_swa_refuses_a_cache_that_has_no_room_for_it(example: ModuleType) -> None:
    model = moved(example, "short_swa")
    for call in (lambda: model(TOKENS, use_cache=True), lambda: model.generate(TOKENS, max_new_tokens=2, use_cache=True)):
        with pytest.raises(
            ValueError, match="use_cache=True: must be False, since the cache of Llama has no room for ShortSWA"
        ):
            call()
    assert model(TOKENS).logits.shape == (2, 8, 13)
