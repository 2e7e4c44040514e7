"""Our models as models of transformers: values, folders, registration, masks, hidden states."""

import json
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra twoaxis[hf]")

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from twoaxis import ConfigError, Decoder, DecoderConfig, TokenLayout
from twoaxis.interop.hugging_face import TwoAxisConfig, TwoAxisForCausalLM, TwoAxisModel, from_hugging_face, to_hugging_face
from twoaxis.interop.hugging_face.modeling import CACHE

from ...fresh import run_fresh
from ..hf_models import MODELS, assert_same, small_decoder

TOKENS = torch.tensor([[1, 7, 3, 9, 2, 11], [5, 5, 0, 8, 6, 4]])


# A matrix of its own behind the last norm is stored the same in every model.
@pytest.mark.parametrize(("name", "tie"), [*((name, True) for name in MODELS), ("plain", False), ("tables", False)])
def test_saved_and_loaded_it_gives_the_decoders_logits(name, tie, tmp_path):
    decoder = small_decoder(name, tie_embeddings=tie)
    to_hugging_face(decoder).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert isinstance(model, TwoAxisForCausalLM) and (model.lm_head.weight is model.model.decoder.embedding.weight) == tie
    assert_same(model(TOKENS).logits, decoder(TOKENS))
    back = from_hugging_face(model)
    assert back.config == decoder.config
    assert set(back.state_dict()) == set(decoder.state_dict())
    assert all(torch.equal(value, decoder.state_dict()[name]) for name, value in back.state_dict().items())
    assert_same(back(TOKENS), decoder(TOKENS))
    base = AutoModel.from_pretrained(tmp_path, dtype="auto")
    assert isinstance(base, TwoAxisModel)
    hidden, _ = decoder.hidden(decoder.embed(TOKENS), tokens=TOKENS)
    assert_same(base(TOKENS).last_hidden_state, hidden)


@pytest.mark.parametrize("name", MODELS)
def test_embeddings_may_be_given_in_the_place_of_tokens(name):
    model = to_hugging_face(small_decoder(name))
    embeddings = model.get_input_embeddings()(TOKENS)
    if kind := {"tables": "per_layer_embedding", "ngrams": "ngram_embedding"}.get(name):
        with pytest.raises(ConfigError, match=rf"^{kind}: the layout has no token ids: must have them; pass input ids"):
            model(inputs_embeds=embeddings)
        return
    assert_same(model(inputs_embeds=embeddings).logits, model(TOKENS).logits)


@pytest.mark.parametrize("name", MODELS)
def test_configuration_survives_a_file(name, tmp_path):
    decoder = small_decoder(name).config
    config = TwoAxisConfig.from_decoder(decoder, eos_token_id=3)
    config.save_pretrained(tmp_path)
    read = AutoConfig.from_pretrained(tmp_path)
    assert read.decoder_config == decoder and read.to_diff_dict() == config.to_diff_dict()
    assert len(read.layer_types) == read.num_hidden_layers == 2


def test_layer_types_say_what_a_block_remembers():
    blocks = [["path_attention"], ["gated_delta_net"], ["short_conv"], ["path_attention", "gated_delta_net"], ["short_swa"]]
    described = ["full_attention", "linear_attention", "conv", "hybrid", "sliding_attention"]
    assert TwoAxisConfig(blocks=blocks, num_hidden_layers=5).layer_types == described


def test_a_new_model_starts_where_a_decoder_does():
    config = small_decoder("states").config
    model = AutoModelForCausalLM.from_config(TwoAxisConfig.from_decoder(config, init_seed=5)).eval()
    assert torch.equal(model(TOKENS).logits, Decoder.build(config, seed=5)(TOKENS))


def test_missing_weights_start_where_a_decoder_does(tmp_path):
    decoder = Decoder.build(small_decoder("views").config, seed=0)
    model = to_hugging_face(decoder)
    state = {name: value for name, value in model.state_dict().items() if "decoder.blocks.1" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    assert_same(TwoAxisForCausalLM.from_pretrained(tmp_path)(TOKENS).logits, decoder(TOKENS))


def test_buffers_that_no_file_holds_are_restored(tmp_path, monkeypatch):
    decoder = small_decoder("plain").float()
    model = to_hugging_face(decoder)
    for module in (decoder, model.model.decoder):
        module.register_buffer("table", torch.arange(4.0), persistent=False)
    monkeypatch.setattr(Decoder, "__init__", _with_table(Decoder.__init__))
    model.save_pretrained(tmp_path)
    loaded = TwoAxisForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.model.decoder.get_buffer("table"), torch.arange(4.0))


def _with_table(init: Any) -> Any:
    def extended(self: Decoder, config: DecoderConfig) -> None:
        init(self, config)
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    return extended


def test_a_vocabulary_can_grow():
    model = to_hugging_face(small_decoder("plain"))
    before = model(TOKENS).logits
    model.resize_token_embeddings(44, mean_resizing=False)
    grown = model(TOKENS).logits
    assert grown.shape[-1] == 44 and torch.equal(grown[..., :40], before)
    assert model(torch.tensor([[43, 1]])).logits.isfinite().all()
    assert from_hugging_face(model).config.vocab_size == 44


@pytest.mark.parametrize("depth", ["value_embedding", "per_layer_embedding"])
def test_a_vocabulary_with_tables_cannot_grow(depth):
    """Its new tokens had no row, which an index error told at the first of them, or at the next loading."""
    model = to_hugging_face(Decoder.build(DecoderConfig(vocab_size=40, d_model=16, n_layers=2, depth=depth)))
    with pytest.raises(ConfigError, match=r"^vocab_size=44: must be 40, since blocks\.\d.*table has a row for each token"):
        model.resize_token_embeddings(44, mean_resizing=False)
    assert model(TOKENS).logits.shape[-1] == from_hugging_face(model).config.vocab_size == 40


IMPORTS = {
    "twoaxis.hf first": "import twoaxis.hf\nfrom transformers import AutoModelForCausalLM",
    "transformers first": "from transformers import AutoModelForCausalLM\nimport twoaxis\n"
    "assert 'transformers.modeling_utils' not in sys.modules",
}


@pytest.mark.parametrize("order", IMPORTS)
def test_a_folder_loads_in_a_fresh_process(order, tmp_path):
    decoder = small_decoder("states")
    to_hugging_face(decoder).save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.py")) and "auto_map" not in json.loads((tmp_path / "config.json").read_text())
    code = (
        f"import sys, torch\n{IMPORTS[order]}\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}, dtype='auto')\n"
        f"print(model(torch.tensor({TOKENS.tolist()})).logits.sum().item())"
    )
    done = run_fresh(code)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(decoder(TOKENS).sum().item(), rel=1e-12)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_padding_changes_nothing(name, side):
    model = to_hugging_face(small_decoder(name))
    row, pad = [3, 1, 4, 1], [9, 9]
    first = [*pad, *row] if side == "left" else [*row, *pad]
    mask = [0] * 2 + [1] * 4 if side == "left" else [1] * 4 + [0] * 2
    ids, mask = torch.tensor([first, [2, 7, 1, 8, 2, 8]]), torch.tensor([mask, [1] * 6])
    logits = model(ids, attention_mask=mask).logits
    kept = logits[0, 2:] if side == "left" else logits[0, :4]
    torch.testing.assert_close(kept, model(torch.tensor([row])).logits[0], rtol=1e-9, atol=1e-9)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    torch.testing.assert_close(model(ids, attention_mask=mask, position_ids=positions).logits, logits, rtol=0, atol=0)


def test_position_ids_pack_documents():
    decoder = small_decoder("states")
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    packed = decoder(TOKENS[:1], TokenLayout.packed(torch.tensor([[0, 0, 0, 1, 1, 1]])))
    assert torch.equal(to_hugging_face(decoder)(TOKENS[:1], position_ids=positions).logits, packed)


@pytest.mark.parametrize("name", MODELS)
def test_a_mask_of_ones_changes_no_meaning_of_position_ids(name):
    # Caught: with any mask, position ids that restart no longer told documents apart.
    decoder, text, positions = small_decoder(name), TOKENS[:, :5], torch.tensor([[0, 1, 0, 1, 2]])
    model, mask = to_hugging_face(decoder), torch.ones(2, 5)
    packed = decoder(text, TokenLayout.packed(torch.tensor([[0, 0, 1, 1, 1]] * 2)))
    for options in ({}, {"attention_mask": mask}, {"attention_mask": mask, "use_cache": True}):
        found = model(text, position_ids=positions, **options)
        assert torch.equal(found.logits, packed)
    following, _ = decoder(TOKENS[:, 5:], cache=decoder(TOKENS[:, 2:5], cache=decoder.new_cache())[1])
    for options in ({}, {"attention_mask": torch.ones(2, 6), "position_ids": torch.tensor([[3]])}):
        again = model(text, position_ids=positions, attention_mask=mask, use_cache=True)
        step = model(TOKENS[:, 5:], **options, **{CACHE: again[CACHE]}).logits
        torch.testing.assert_close(step, following, rtol=1e-9, atol=1e-9)
    model.train()
    changed = text.clone()
    changed[:, 0] = (changed[:, 0] + 1) % 40
    trained = [model(ids, position_ids=positions, attention_mask=mask).logits for ids in (text, changed)]
    assert torch.equal(trained[0][:, 2:], trained[1][:, 2:]) and not torch.equal(trained[0][:, 1], trained[1][:, 1])


def test_position_ids_pack_documents_behind_padding_too():
    decoder = small_decoder("states")
    positions, mask = torch.tensor([[1, 0, 1, 0, 1, 2]]), torch.tensor([[0, 1, 1, 1, 1, 1]] * 2)
    documents = torch.tensor([[-1, 0, 0, 1, 1, 1]] * 2)
    expected = decoder(TOKENS, TokenLayout(torch.tensor([[0, 0, 1, 0, 1, 2]]), documents))
    found = to_hugging_face(decoder)(TOKENS, position_ids=positions, attention_mask=mask).logits
    torch.testing.assert_close(found[:, 1:], expected[:, 1:], rtol=0, atol=0)


def test_rows_of_a_batch_may_begin_in_a_later_call():
    # Caught: tokens behind a call of nothing but padding joined the padding.
    model = to_hugging_face(small_decoder("states"))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    cache, parts = None, []
    for start, stop in ((0, 2), (2, 4), (4, 6)):
        found = model(TOKENS[:, start:stop], attention_mask=mask[:, :stop], use_cache=True, **{CACHE: cache})
        cache = found[CACHE]
        parts.append(found.logits)
    alone = model(TOKENS[:1, 2:]).logits
    torch.testing.assert_close(torch.cat(parts, dim=1)[:1, 2:], alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_a_cache_behind_padding_on_the_right_is_refused(name):
    # Caught: the new token joined the document of the padding, and its logits ignored the prompt.
    model = to_hugging_face(small_decoder(name))
    ids, mask = torch.tensor([[4, 2, 6, 0]]), torch.tensor([[1, 1, 1, 0]])
    cache = model(ids, attention_mask=mask, use_cache=True)[CACHE]
    calls = {
        "attention_mask: row 0 has padding between real tokens": {"attention_mask": torch.tensor([[1, 1, 1, 0, 1]])},
        "attention_mask: differs at cached tokens": {"attention_mask": torch.ones(1, 5)},
        "cache: row 0 ends in padding": {},
    }
    for said, options in calls.items():
        with pytest.raises(ConfigError, match=f"^{said}.*; must .*; ") as error:
            model(torch.tensor([[8]]), **options, **{CACHE: cache})
        assert "\n" not in str(error.value)


def test_position_ids_go_on_where_the_cache_ends():
    model = to_hugging_face(small_decoder("plain"))
    cache = model(TOKENS[:, :4], position_ids=torch.arange(50, 54)[None], use_cache=True)[CACHE]
    with pytest.raises(ConfigError, match=r"^position_ids: do not go on where the cached tokens end; must count up from"):
        model(TOKENS[:, 4:], position_ids=torch.tensor([[54, 0]]), **{CACHE: cache})
    whole = model(TOKENS, position_ids=torch.arange(50, 56)[None]).logits[:, 4:]
    second = model(TOKENS[:, 4:], position_ids=torch.tensor([[54, 55]]), **{CACHE: cache}).logits
    torch.testing.assert_close(second, whole, rtol=1e-9, atol=1e-9)


def test_position_ids_may_begin_anywhere():
    decoder = small_decoder("windows")
    logits = to_hugging_face(decoder)(TOKENS, position_ids=torch.arange(50, 56)[None]).logits
    assert torch.equal(logits, decoder(TOKENS, TokenLayout.contiguous(6, start=50)))


def test_hidden_states_of_a_plain_model_are_those_of_llama():
    """A plain model is a Llama: same streams at the same places."""
    decoder: Any = small_decoder("plain", blocks=[[{"kind": "attention", "n_heads": 4}, "swiglu"]])
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 40}
    gate_up = decoder.get_parameter("blocks.0.swiglu.mixer.gate_up.weight").shape[0]
    config = LlamaConfig(**sizes, intermediate_size=gate_up // 2, tie_word_embeddings=True)
    llama: Any = LlamaForCausalLM(config).double().eval()
    with torch.no_grad():
        for index, layer in enumerate(llama.model.layers):
            attention, swiglu = (getattr(decoder.blocks[index], kind) for kind in ("attention", "swiglu"))
            q, k, v = attention.mixer.qkv.weight.chunk(3)
            for target, source in (
                (layer.self_attn.q_proj, q),
                (layer.self_attn.k_proj, k),
                (layer.self_attn.v_proj, v),
                (layer.self_attn.o_proj, attention.mixer.output.weight),
                (layer.mlp.gate_proj, swiglu.mixer.gate_up.weight.chunk(2)[0]),
                (layer.mlp.up_proj, swiglu.mixer.gate_up.weight.chunk(2)[1]),
                (layer.mlp.down_proj, swiglu.mixer.down.weight),
                (layer.input_layernorm, attention.norm.gain),
                (layer.post_attention_layernorm, swiglu.norm.gain),
            ):
                target.weight.copy_(source)
        llama.model.norm.weight.copy_(decoder.norm.gain)
        llama.model.embed_tokens.weight.copy_(decoder.embedding.weight)
    ours = to_hugging_face(decoder)(TOKENS, output_hidden_states=True).hidden_states
    theirs = llama(TOKENS, output_hidden_states=True).hidden_states
    assert len(ours) == len(theirs) == 3
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_hidden_states_are_what_blocks_read_with_and_without_a_cache(name):
    decoder: Any = small_decoder(name)
    model = to_hugging_face(decoder)
    whole = model(TOKENS, output_hidden_states=True, use_cache=False)
    assert len(whole.hidden_states) == 3
    layout = TokenLayout.contiguous(6).of(TOKENS)
    state = decoder.ends.enter(decoder.mix_embeddings(decoder.embed(TOKENS), layout)[0], layout)[0]
    for index, block in enumerate(decoder.blocks):
        read, _, _ = block.sublayers[0].depth.read(state, layout)
        assert torch.equal(whole.hidden_states[index], getattr(read, "q", read))
        state, _ = block(state, layout)
    first = model(TOKENS[:, :4], use_cache=True, output_hidden_states=True)
    second = model(TOKENS[:, 4:], output_hidden_states=True, **{CACHE: first[CACHE]})
    for parts in zip(first.hidden_states, second.hidden_states, whole.hidden_states, strict=True):
        torch.testing.assert_close(torch.cat(parts[:2], dim=1), parts[2], rtol=1e-9, atol=1e-9)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ({"attention_mask": torch.tensor([[1, 0, 1, 1, 1, 1]] * 2)}, "between real tokens"),
        ({"attention_mask": torch.ones(2, 4)}, r"shape of attention_mask=\(2, 4\): must be \[batch, 6\]"),
        ({"attention_mask": [[1] * 6] * 2}, "attention_mask='list': must be a tensor; "),
        ({"position_ids": [[0] * 6] * 2}, "position_ids='list': must be a tensor; "),
        ({"position_ids": torch.arange(5)[None]}, r"shape of position_ids=\(1, 5\): must be \(2, 6\) or \(1, 6\); "),
        ({"output_attentions": True}, "attention weights are never formed"),
        ({CACHE: object()}, "must be a TwoAxisCache"),
        ({"inputs_embeds": torch.zeros(2, 6, 16)}, "exactly one of the two"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(call, said):
    with pytest.raises(ConfigError, match=said) as error:
        to_hugging_face(small_decoder("plain"))(TOKENS, **call)
    assert "\n" not in str(error.value)


def test_too_long_a_text_is_refused():
    with pytest.raises(ConfigError, match="at most max_position_embeddings=128"):
        to_hugging_face(small_decoder("plain"))(torch.zeros(1, 129, dtype=torch.long))


def test_what_a_quantiser_writes_is_left_to_transformers(tmp_path):
    config = TwoAxisConfig.from_decoder(small_decoder("plain").config)
    config.quantization_config = {"quant_method": "torchao"}
    config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).quantization_config == {"quant_method": "torchao"}
