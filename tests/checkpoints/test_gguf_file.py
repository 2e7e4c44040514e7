"""What a GGUF file says, in words that our decoder knows."""

import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken

from twoaxis.checkpoints.gguf_file import layout_name, llama_table, rotated_by_halves, tokenizer_json
from twoaxis.checkpoints.published_config import decoder_config
from twoaxis.checkpoints.published_folder import read_pretrained
from twoaxis.core.errors import CheckpointError, ConfigError
from twoaxis.data.tokenizer import SubwordTokenizer
from twoaxis.ops.rope import LinearScaling, YarnScaling

from .gguf_files import write_gguf
from .hf_folder import byte_tokenizer, write_folder

FIELDS = {
    "general.architecture": "llama",
    "llama.embedding_length": 32,
    "llama.block_count": 2,
    "llama.attention.head_count": 4,
    "llama.feed_forward_length": 40,
    "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "llama.vocab_size": 64,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["<|end|>", "1", "2", "a", "b", "ab", "12"],
    "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 1, 1],
    "tokenizer.ggml.merges": ["a b", "1 2"],
}


def test_without_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"needs the library gguf; install twoaxis\[gguf\]"):
        read_pretrained(tmp_path / "model.gguf")


def test_pairs_of_channels_become_halves() -> None:
    """The converter writes row i of the first half and row i of the second one side by side."""
    ours = torch.arange(2 * 6 * 3).view(12, 3)
    theirs = ours.view(2, 2, 3, 3).transpose(1, 2).reshape(12, 3)
    assert not torch.equal(theirs, ours)
    assert torch.equal(rotated_by_halves(theirs, head_dim=6), ours)


@pytest.mark.parametrize(
    ("name", "tensor", "error", "message"),
    [
        ("blk.0", np.zeros(1, dtype=np.float32), CheckpointError, r"1 unexpected \(blk.0\)"),
        ("model.norm.weight", np.zeros(32, dtype=np.float32), CheckpointError, "'model.norm.weight' under two names"),
        ("output.weight", np.zeros((258, 32)), ConfigError, "output.weight='F64': must be a type that the library gguf"),
    ],
)
def test_tensors_that_are_none_of_a_llama(
    name: str, tensor: Any, error: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = pytest.importorskip("gguf", reason="needs the extra twoaxis[gguf]")
    write = gguf.GGUFWriter.write_header_to_file

    def with_another(writer: Any) -> None:
        writer.add_tensor(name, tensor)
        write(writer)

    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", with_another)
    write_folder(tmp_path / "hf", vocab_size=258)
    write_gguf(tmp_path / "model.gguf", tmp_path / "hf")
    with pytest.raises(error, match=message):
        read_pretrained(tmp_path / "model.gguf")


def test_names() -> None:
    assert layout_name("blk.3.attn_q.weight") == "model.layers.3.self_attn.q_proj.weight"
    assert layout_name("blk.0.ffn_norm.weight") == "model.layers.0.post_attention_layernorm.weight"
    assert layout_name("token_embd.weight") == "model.embed_tokens.weight"
    assert layout_name("rope_freqs.weight") == "rope_freqs.weight"
    assert layout_name("blk.0.weird") == "model.layers.0.weird"


def test_the_configuration() -> None:
    data = llama_table(FIELDS, tied=True)
    assert (data["model_type"], data["rms_norm_eps"], data["tie_word_embeddings"]) == ("llama", 1e-5, True)


def test_scaled_angles() -> None:
    sizes = {"llama.context_length": 64, "llama.rope.freq_base": 1e4}
    scaled = {"type": "yarn", "factor": 4.0, "original_context_length": 16}
    fields = {**FIELDS, **sizes, **{f"llama.rope.scaling.{name}": value for name, value in scaled.items()}}
    attention: Any = decoder_config(llama_table(fields, tied=True)).blocks[0][0]
    assert attention.rope_scaling == YarnScaling(factor=4.0, original_max_seq_len=16)
    plain: Any = decoder_config(llama_table({**FIELDS, **sizes, "llama.rope.scaling.type": "none"}, tied=True)).blocks[0][0]
    assert plain.rope_scaling is None
    other = {**fields, "llama.rope.scaling.attn_factor": 0.5}
    with pytest.raises(ConfigError, match=r"llama.rope.scaling.attn_factor=0.5: must be one of type, factor,"):
        llama_table(other, tied=True)
    older: Any = decoder_config(llama_table({**FIELDS, **sizes, "llama.rope.scale_linear": 2.0}, tied=True)).blocks[0][0]
    assert older.rope_scaling == LinearScaling(factor=2.0)


def test_widths_of_heads() -> None:
    sizes = {"llama.context_length": 64, "llama.attention.key_length": 16, "llama.attention.value_length": 16}
    attention: Any = decoder_config(llama_table({**FIELDS, **sizes}, tied=True)).blocks[0][0]
    assert attention.head_dim == 16
    with pytest.raises(ConfigError, match=r"llama.attention.value_length=16: must be the width of a head, 8"):
        llama_table({**FIELDS, "llama.attention.value_length": 16}, tied=True)
    with pytest.raises(ConfigError, match=r"llama.rope.dimension_count=4: must be the width of a head, 8"):
        llama_table({**FIELDS, "llama.rope.dimension_count": 4}, tied=True)


def test_texts_begin_as_the_file_says() -> None:
    fields = {**FIELDS, "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 0}
    assert SubwordTokenizer(tokenizer_json(fields)).begin_of_document == (0,)
    assert SubwordTokenizer(tokenizer_json({**fields, "tokenizer.ggml.add_bos_token": False})).begin_of_document == ()


@pytest.mark.parametrize("tied", [True, False])
def test_a_file_of_the_library_says_what_the_folder_says(tied: bool, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs the extra twoaxis[gguf]")
    expected = write_folder(tmp_path / "hf", vocab_size=258, tie_word_embeddings=tied)
    write_gguf(tmp_path / "model.gguf", tmp_path / "hf")
    found = read_pretrained(tmp_path / "model.gguf")
    assert found.end_of_document == "<|end|>" and found.tokenizer is not None
    tokens = torch.tensor([SubwordTokenizer(found.tokenizer).encode("about 12 cabs")])
    torch.testing.assert_close(found.model(tokens), expected.eval()(tokens), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.add_bos_token": 1}, "lacks tokenizer.ggml.bos_token_id: must have all of them"),
        ({"tokenizer.ggml.merges": None}, "lacks tokenizer.ggml.merges: must have all of them"),
        ({"llama.embedding_length": None}, "hidden_size is missing"),
        ({"llama.block_count": 4}, "9 missing"),
        ({"llama.attention.head_count": 0}, "head_count=0: must be a whole number >= 1"),
        ({"llama.attention.head_count": [4, 4, 4]}, r"head_count=\[4, 4, 4\]: must be a whole number >= 1"),
        ({"llama.embedding_length": "wide"}, "embedding_length='wide': must be a whole number >= 1"),
        ({"llama.attention.layer_norm_rms_epsilon": "x"}, "layer_norm_rms_epsilon='x': must be a number > 0"),
        ({"tokenizer.ggml.eos_token_id": 258}, "eos_token_id=258: must be a whole number from 0 to 257"),
        ({"tokenizer.ggml.add_bos_token": 1, "tokenizer.ggml.bos_token_id": 258}, "bos_token_id=258: must be a whole number"),
        ({"tokenizer.ggml.token_type": 3}, "tokenizer.ggml.token_type: must be an array of whole numbers"),
        ({"tokenizer.ggml.merges": [1, 2]}, "tokenizer.ggml.merges: must be an array of texts"),
        ({"tokenizer.ggml.tokens": "ab"}, "tokenizer.ggml.tokens: must be an array of texts"),
    ],
)
def test_what_a_file_lacks_or_has_of_another_kind_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs the extra twoaxis[gguf]")
    write_folder(tmp_path / "hf", vocab_size=258)
    write_gguf(tmp_path / "model.gguf", tmp_path / "hf", **changes)
    with pytest.raises((CheckpointError, ConfigError), match=message):
        read_pretrained(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 62) + bytes(13), "it ends within its metadata"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<QBIIQ", 1, 97, 9, 8, 1 << 40), "it ends within its metadata"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<QBIIQ", 1, 97, 9, 4, 1 << 40), "or counts more than it holds"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<QBI", 1, 97, 1 << 30), "a tensor of 1073741824 dimensions"),
        (b"GGUF" + struct.pack("<I", 9) + bytes(16), "version 9, must be one of"),
        (b"PAR1" + bytes(60), "it begins with b'PAR1', must begin with b'GGUF'"),
    ],
)
def test_what_counts_more_than_there_is_takes_no_memory(content: bytes, message: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs the extra twoaxis[gguf]")
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=f"is no whole GGUF file .*{message}"):
        read_pretrained(tmp_path / "model.gguf")


def test_digits_are_cut_apart_first() -> None:
    tokenizer = SubwordTokenizer(tokenizer_json(FIELDS), "<|end|>")
    assert tokenizer.encode("ab12") == [5, 1, 2]
    plain = SubwordTokenizer(tokenizer_json({**FIELDS, "tokenizer.ggml.pre": "gpt-2"}), "<|end|>")
    assert plain.encode("ab12") == [5, 6]
    assert tokenizer.end_of_document == 0


def test_types_of_tokens_mean_what_they_do_in_a_tokenizer_json() -> None:
    """A user-defined token could once not be reached: its text was cut into pieces."""
    engine = byte_tokenizer("<|end|>", "<unk>")
    engine.add_tokens([AddedToken("<tool_call>", special=False, normalized=False), "  "])
    vocabulary = [token for token, _ in sorted(engine.get_vocab().items(), key=lambda pair: pair[1])]
    types = {"<|end|>": 3, "<unk>": 2, "<tool_call>": 4, "  ": 4}
    tokens = [*vocabulary, "[PAD260]", "<0x41>"]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*(types.get(token, 1) for token in vocabulary), 5, 6],
        "tokenizer.ggml.merges": [],
    }
    theirs, ours = SubwordTokenizer(engine.to_str()), SubwordTokenizer(tokenizer_json(fields))
    text = "a<tool_call>b  c<|end|>[PAD260]<0x41><unk> <tool_call"
    assert ours.encode(text) == theirs.encode(text)
    assert tokens.index("<tool_call>") in ours.encode(text) and tokens.index("  ") in ours.encode(text)
    assert ours.encode_special(text) == theirs.encode_special(text)
    assert ours.special_tokens == theirs.special_tokens
    for tokens_of in (theirs.encode(text), theirs.encode_special(text)):
        assert ours.decode(tokens_of) == theirs.decode(tokens_of)
    # An unused id is none that a tokenizer.json has.
    assert ours.decode([tokens.index("[PAD260]")]) == ""
    with pytest.raises(ConfigError, match=r"token_type=9: must be one of 1 \(normal\), 2 \(unknown\), 3 \(control\), 4 "):
        tokenizer_json({**fields, "tokenizer.ggml.token_type": [9] * len(tokens)})
    with pytest.raises(ConfigError, match="token_type='1 types': must be as many as tokens, 262"):
        tokenizer_json({**fields, "tokenizer.ggml.token_type": [1]})


def test_another_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be gpt2 with one of gpt-2, smollm"):
        tokenizer_json({**FIELDS, "tokenizer.ggml.pre": "llama-bpe"})
