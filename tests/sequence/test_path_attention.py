import pytest
import torch

from twoaxis.core.errors import ConfigError
from twoaxis.core.layout import TokenLayout
from twoaxis.model.cache import join_rows, keep_rows
from twoaxis.sequence import PathAttentionConfig
from twoaxis.testing.decoding import decode_mixer
from twoaxis.testing.toy import TOKENS, toy_context, toy_decoder, toy_mixer, toy_tokens

LAYOUT = TokenLayout.contiguous(TOKENS)


def test_directions_have_length_one_and_strengths_reach_from_zero_to_two() -> None:
    mixer = toy_mixer(PathAttentionConfig(n_heads=2, w_rank=3, w_eps=1e-20, forget_gate="inside_scale"))
    with torch.no_grad():
        mixer.gates.mul_(10)
    w, _ = mixer._directions(toy_context(), LAYOUT, mixer.new_cache().directions)
    torch.testing.assert_close(w.square().sum(-1), torch.ones(2, 2, TOKENS, dtype=w.dtype), rtol=0, atol=1e-12)
    beta, forget_log = mixer._gates(toy_context())
    assert 0 < beta.min() < 0.1 and 1.9 < beta.max() < 2
    assert forget_log is not None and forget_log.max() < 0 and forget_log.shape == (2, 2, TOKENS)


def test_without_reflections_it_is_attention_without_positions() -> None:
    mixer = toy_mixer(PathAttentionConfig(n_heads=4, n_kv_heads=2))
    with torch.no_grad():
        mixer.gate_bias.fill_(-1e3)
    q, k, v = mixer._heads(toy_context())
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    expected = y.transpose(1, 2).flatten(2) @ mixer.output.weight.T
    torch.testing.assert_close(mixer(toy_context(), LAYOUT)[0], expected)


@pytest.mark.parametrize("chunks", [(1,) * TOKENS, (4, 5)])
def test_queries_and_keys_are_normalised_in_decoding_too(chunks: tuple[int, ...]) -> None:
    # The reference normalises them in training only, so that its cached output is another one.
    mixer = toy_mixer(PathAttentionConfig(n_heads=2, qk_norm="per_head"))
    full, _ = mixer(toy_context(), LAYOUT)
    with torch.no_grad():
        torch.testing.assert_close(decode_mixer(mixer, toy_context(), chunks), full)
        mixer.qkv.weight[:16] *= 100
        torch.testing.assert_close(decode_mixer(mixer, toy_context(), chunks), full, rtol=1e-4, atol=1e-4)


def test_a_row_that_returns_to_a_document_begins_anew() -> None:
    mixer = toy_mixer(PathAttentionConfig(n_heads=2, forget_gate="inside_scale"))
    documents, x = torch.tensor([[0, 0, 0, 1, 1, 0, 0, 0, 0]]), toy_context(batch=1)
    layout = TokenLayout.packed(documents)
    whole, _ = mixer(x, layout)
    for start, stop in ((0, 3), (3, 5), (5, 9)):
        alone, _ = mixer(x[:, start:stop], TokenLayout.contiguous(stop - start))
        torch.testing.assert_close(whole[:, start:stop], alone)
    for cut in (2, 3, 6):
        with torch.no_grad():
            first, cache = mixer(x[:, :cut], layout.part(0, cut), mixer.new_cache())
            second, _ = mixer(x[:, cut:], layout.part(cut, 9).after(documents[:, :cut]), cache)
        torch.testing.assert_close(torch.cat((first, second), dim=1), whole)


@pytest.mark.parametrize("forget_gate", ["none", "inside_scale"])
def test_rows_of_different_lengths_join_and_leave_a_batch(forget_gate: str) -> None:
    model = toy_decoder(PathAttentionConfig.from_data({"n_heads": 2, "forget_gate": forget_gate}))
    prompts = [toy_tokens(batch=1, tokens=n, seed=n) for n in (7, 3, 5)]
    following = toy_tokens(batch=3, tokens=4, seed=9)
    expected = [model(torch.cat((prompt, following[row : row + 1]), dim=1))[:, -4:] for row, prompt in enumerate(prompts)]
    with torch.no_grad():
        cache = join_rows([model(prompt, None, model.new_cache())[1] for prompt in prompts])
        rows = [0, 1, 2]
        for step in range(4):
            logits, cache = model(following[rows, step : step + 1], None, cache)
            for at, row in enumerate(rows):
                torch.testing.assert_close(logits[at : at + 1], expected[row][:, step : step + 1])
            if step == 1:
                # The longest leaves, and with it columns that are padding in all others.
                rows = [2, 1]
                cache = keep_rows(cache, torch.tensor(rows))
    held = cache.sublayers[0][0].mixer.keys
    assert held.length == 5 + 4


def test_a_cache_in_half_precision_holds_keys_in_float32() -> None:
    mixer = toy_mixer(PathAttentionConfig(n_heads=2), dtype=torch.bfloat16)
    with torch.no_grad():
        _, cache = mixer(toy_context().bfloat16(), LAYOUT, mixer.new_cache())
    keys, values = cache.keys.past()
    assert keys.dtype == torch.float32 and values.dtype == torch.bfloat16
    assert cache.keys.live_bytes == keys.nbytes + values.nbytes


def test_sizes_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="n_heads=3: must be a divisor of d_model=8, or given with a head_dim; set head_dim"):
        PathAttentionConfig(n_heads=3).check(8)
    with pytest.raises(ConfigError, match="n_kv_heads=3: must be a divisor of n_heads=4; use n_kv_heads=1"):
        PathAttentionConfig(n_heads=4, n_kv_heads=3)
    with pytest.raises(ConfigError, match="w_rank=8: must be left out with w_map='full'; set w_map='low_rank'"):
        PathAttentionConfig(w_map="full", w_rank=8)
