import copy
import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from twoaxis import ConfigError, DataError, Decoder, DecoderConfig, TokenLayout
from twoaxis.model.block import Sublayer
from twoaxis.ops.cross_entropy import IGNORE

from .build import DEPTHS, FULL, SHORT, VOCABULARY, WINDOW, decoder, same, tokens


@pytest.mark.parametrize("bad", [-1, VOCABULARY, 2**40])
def test_token_outside_the_vocabulary(bad: int) -> None:
    text = tokens(2, 5)
    text[1, 3] = bad
    message = f"^token id={bad}: must be in 0..{VOCABULARY - 1}; use the model's own tokenizer$"
    with pytest.raises(DataError, match=message):
        decoder()(text)
    with pytest.raises(DataError, match=message):
        decoder().loss(text, text)


@pytest.mark.parametrize(
    ("ids", "got"),
    [
        ([[1, 2, 3]], "list"),
        ("abc", "str"),
        (None, "NoneType"),
        (torch.tensor([1, 2, 3]), r"int64 \[3\]"),
        (torch.tensor([[1.0, 2.0]]), r"float32 \[1, 2\]"),
    ],
)
def test_what_is_no_tensor_of_ids_is_refused_in_one_line(ids: Any, got: str) -> None:
    # The methods as users have them: the checks of shapes around them here would speak first.
    embed, loss = inspect.unwrap(Decoder.embed), inspect.unwrap(Decoder.loss)
    model, message = decoder(), rf"got {got}; must be a tensor of int64 \[batch, tokens\]; pass torch.tensor\("
    with pytest.raises(DataError, match=f"^tokens: {message}"):
        embed(model, ids)
    with pytest.raises(DataError, match=f"^targets: {message}"):
        loss(model, tokens(1, 3), ids)
    with pytest.raises(DataError, match=r"^shape of targets=\[1, 2\]: must be \[1, 3\], that of tokens; pass one each$"):
        loss(model, tokens(1, 3), tokens(1, 2))


def test_a_decoder_reads_plain_data_and_refuses_the_rest_in_one_line() -> None:
    data = {"vocab_size": 8, "d_model": 8, "n_layers": 1, "depth": "deep_delta"}
    assert Decoder(data).config == Decoder.build(data).config == DecoderConfig.from_data(data)
    with pytest.raises(ConfigError, match=r"^model=3: must be a table of keys and values; see"):
        Decoder(3)  # type: ignore[arg-type]


def test_text_longer_than_the_model() -> None:
    model = decoder(max_seq_len=4)
    assert model(tokens(1, 4)).shape == (1, 4, VOCABULARY)
    with pytest.raises(ConfigError, match=r"^tokens=5: must be at most max_seq_len=4; raise it or "):
        model(tokens(1, 5))
    with pytest.raises(ConfigError, match=r"^tokens=5: must be at most max_seq_len=4; raise it or "):
        model(tokens(1, 5), cache=model.new_cache())


def test_layout_of_another_length() -> None:
    with pytest.raises(ConfigError, match=r"^layout=4: must be as long as the 5 tokens; pass one position each$"):
        decoder()(tokens(1, 5), TokenLayout.contiguous(4))


def loss_and_gradients(model: Any, text: Tensor, **options: Any) -> list[Tensor]:
    model.zero_grad()
    total, _ = model.loss(text, text.roll(-1, 1), **options)
    total.backward()
    return [total.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.mark.parametrize("depth", DEPTHS, ids=str)
def test_recompute_is_bitwise_the_same_and_saves_less(depth: Any) -> None:
    model, text = decoder(depth=depth), tokens(2, 7)
    layout = TokenLayout.packed(torch.tensor([[0, 0, 0, 1, 1, 1, 1]] * 2))

    def saved(recompute: bool) -> tuple[list[Tensor], int]:
        storages: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            results = loss_and_gradients(model, text, layout=layout, recompute=recompute)
        return results, sum(storages.values())

    (plain, plain_bytes), (again, again_bytes) = saved(False), saved(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert again_bytes < plain_bytes


@pytest.mark.parametrize("depth", DEPTHS, ids=str)
def test_two_steps_and_accumulation(depth: Any) -> None:
    # Case A12: nothing that one call computes is needed, or kept, by the next.
    model, first, second = decoder(depth=depth), tokens(2, 6), tokens(1, 6, seed=1)
    one, other = loss_and_gradients(model, first), loss_and_gradients(model, second)
    model.zero_grad()
    for text in (first, second):
        model.loss(text, text.roll(-1, 1))[0].backward()
    for parameter, a, b in zip(model.parameters(), one[1:], other[1:], strict=True):
        assert parameter.grad is not None
        same(parameter.grad, a + b)


def test_tied_head_is_the_embedding() -> None:
    model = decoder(tie_embeddings=True)
    assert model.head_weight is model.embedding.weight
    assert not any("head" in name for name, _ in model.named_parameters())


def test_untied_head_is_a_matrix_of_its_own() -> None:
    tied, untied = decoder(tie_embeddings=True), decoder(tie_embeddings=False)
    text = tokens(2, 5)
    assert not torch.equal(untied.head_weight, untied.embedding.weight)
    state = {**tied.state_dict(), "head.weight": tied.embedding.weight}
    untied.load_state_dict(state)
    assert torch.equal(tied(text), untied(text))
    whole = loss_and_gradients(tied, text)
    loss_and_gradients(untied, text)
    assert untied.embedding.weight.grad is not None and untied.head_weight.grad is not None
    place = [name for name, _ in tied.named_parameters()].index("embedding.weight")
    same(untied.embedding.weight.grad + untied.head_weight.grad, whole[1 + place])


def sublayers(block: Any) -> list[Sublayer]:
    return block.sublayers


def names(block: Any) -> list[str]:
    return [name for name, _ in block.named_children()]


def test_patterns_repeat_across_depth() -> None:
    model = decoder(n_layers=5, blocks=[[FULL, "swiglu"], ["gelu"]])
    assert [names(block) for block in model.blocks] == [["attention", "swiglu"], ["gelu"]] * 2 + [["attention", "swiglu"]]


def test_kinds_repeated_in_a_block_are_separate_sublayers() -> None:
    model = decoder(n_layers=1, blocks=[[WINDOW, SHORT, FULL, "swiglu", SHORT, WINDOW]])
    assert names(model.blocks[0]) == [
        "attention",
        "short_swa",
        "attention_2",
        "swiglu",
        "short_swa_2",
        "attention_3",
    ]
    spans = [getattr(sublayer.mixer, "config", None) for sublayer in sublayers(model.blocks[0])]
    assert [config.span if config else "none" for config in spans] == [4, 4, None, "none", 4, 4]
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    assert len(set(pointers)) == len(pointers)
    for gradient in loss_and_gradients(model, tokens(2, 6)):
        assert gradient.abs().sum() > 0


@pytest.mark.parametrize("depth", DEPTHS, ids=str)
def test_the_explicit_contract_is_the_decoder(depth: Any) -> None:
    model, text = decoder(depth=depth), tokens(2, 6)
    layout = TokenLayout.contiguous(6)
    state = model.ends.enter(model.embed(text))[0]
    for block in model.blocks:
        for sublayer in sublayers(block):
            kept = copy.deepcopy(_tensors(state))
            views, carry, _ = sublayer.depth.read(state)
            context = sublayer.norm(views)
            update, _ = sublayer.mixer(context, layout)
            after = sublayer.depth.write(state, update, context, carry)
            # Case A10: a stored source is never written in place.
            assert all(torch.equal(a, b) for a, b in zip(_tensors(state), kept, strict=True))
            state = after
    assert torch.equal(F.linear(model.norm(model.ends.leave(state)[0]), model.head_weight), model(text))


def _tensors(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state.detach()]
    return [tensor for part in state for tensor in _tensors(part)]


@pytest.mark.parametrize("depth", DEPTHS, ids=str)
def test_causal_and_independent_of_batch_mates(depth: Any) -> None:
    model, text = decoder(depth=depth), tokens(3, 9)
    before = model(text)
    for t in range(9):
        changed = text.clone()
        changed[1, t] = (changed[1, t] + 1) % VOCABULARY
        after = model(changed)
        assert torch.equal(after[1, :t], before[1, :t])
        assert not torch.equal(after[1, t], before[1, t])
        assert torch.equal(after[[0, 2]], before[[0, 2]])


def test_loss_is_the_sum_over_valid_targets_and_their_count() -> None:
    model, text = decoder(), tokens(2, 6)
    targets = text.roll(-1, 1)
    targets[:, -1] = targets[0, 2] = IGNORE
    total, count = model.loss(text, targets)
    expected = F.cross_entropy(model(text).flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")
    same(total, expected)
    assert count.item() == 9


def test_loss_without_any_target() -> None:
    # Case A19.
    model, text = decoder(), tokens(2, 6)
    total, count = model.loss(text, torch.full_like(text, IGNORE))
    total.backward()
    assert (total.item(), count.item()) == (0.0, 0)
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize("depth", DEPTHS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtype_is_kept(depth: Any, dtype: torch.dtype) -> None:
    model = decoder(depth=depth).to(dtype)
    text = tokens(2, 6)
    assert model(text).dtype == dtype
    hidden, _ = model.hidden(model.embed(text))
    assert hidden.dtype == dtype
    exact = copy.deepcopy(model).double()(text)
    assert (model(text).double() - exact).abs().max() < 64 * torch.finfo(dtype).eps * exact.abs().max()


def test_the_default_block_is_attention_and_swiglu() -> None:
    config = DecoderConfig(vocab_size=4, d_model=8, n_layers=3)
    assert [[sublayer.kind for sublayer in block] for block in config.layers] == [["attention", "swiglu"]] * 3
