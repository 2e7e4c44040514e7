"""Llama-like models in GGUF files, read with the library gguf.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3.

Letters: H heads, K key width.
"""

import struct
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from twoaxis.checkpoints.layouts import state_map
from twoaxis.checkpoints.published_config import LENGTH, decoder_config
from twoaxis.checkpoints.published_folder import Pretrained, build_model
from twoaxis.core.errors import CheckpointError, ConfigError, problem
from twoaxis.model.config_json import refuse_unread
from twoaxis.planner.model.hugging_face.fields import Fields
from twoaxis.sequence import AttentionConfig

NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_output": "self_attn.o_proj",
    **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
    **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
}
"""Modules of a layer in the Hugging Face layout, by their name in the file."""

ENDS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

NEEDED = (
    "llama.attention.head_count",
    "llama.attention.layer_norm_rms_epsilon",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.merges",
    "tokenizer.ggml.eos_token_id",
)
"""Required keys; missing sizes are errors of the configuration."""

SCALING, KNOWN_SCALING = "llama.rope.scaling.", ("type", "factor", "original_context_length", "finetuned")
"""Keys of rope scaling; others would override the defaults of their kind."""

READ = ("attention.value_length", "rope.dimension_count", "rope.scale_linear", "tensor_data_layout")
"""Architecture keys that are read and have no key in a `config.json`, and an obsolete one."""

UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5
TOKEN_TYPES = {1: "normal", UNKNOWN: "unknown", CONTROL: "control", USER_DEFINED: "user-defined", UNUSED: "unused", 6: "byte"}
"""The types of tokens: unknown and control tokens are special, user-defined ones match before byte pairs, unused ones fill gaps
between ids, and byte tokens are normal ones in a byte-level vocabulary."""

PRE_TOKENIZERS = ("gpt-2", "smollm")
"""Pre-tokenizers of byte-pair encoding; the second one splits digits first."""


def read_gguf(path: Path) -> Pretrained:
    """Reads a file of architecture llama with any quantisation; weights become float32.

    Raises:
        ConfigError: the library is missing, or the model is not supported.
        CheckpointError: a file that cannot be read, or that lacks keys or tensors.
    """
    try:
        import gguf
    except ImportError:
        raise ConfigError(f"{path}: needs the library gguf; install twoaxis[gguf]") from None
    try:
        check_metadata(path)
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (OSError, ValueError, LookupError) as error:
        raise CheckpointError(f"{path}: is no whole GGUF file ({error}); fetch it again") from None
    if fields.get("general.architecture") != "llama":
        raise ConfigError(problem("general.architecture", fields.get("general.architecture"), "'llama'", "choose another file"))
    begin = ("tokenizer.ggml.bos_token_id",) if fields.get("tokenizer.ggml.add_bos_token") else ()
    if missing := [name for name in (*NEEDED, *begin) if name not in fields]:
        raise CheckpointError(f"{path}: lacks {', '.join(missing)}: must have all of them; fetch another file")
    names = {layout_name(tensor.name) for tensor in reader.tensors}
    # Before dequantisation, which takes time.
    config, tokenizer = decoder_config(llama_table(fields, tied="lm_head.weight" not in names)), tokenizer_json(fields)
    end = fields["tokenizer.ggml.tokens"][_token(fields, "tokenizer.ggml.eos_token_id")]
    tensors: dict[str, Tensor] = {}
    for tensor in reader.tensors:
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            allowed = "a type that the library gguf converts to float32"
            raise ConfigError(problem(tensor.name, tensor.tensor_type.name, allowed, "choose another file")) from None
        if (name := layout_name(tensor.name)) in tensors:
            raise CheckpointError(f"{path}: has {name!r} under two names; must have one of each; fetch another file")
        tensors[name] = torch.from_numpy(values.copy()).float()
    # Before the rows of heads are reordered, which assumes their shapes.
    state_map("llama", config).check(tensors)
    for layer, (attention, _) in enumerate(config.layers):
        assert isinstance(attention, AttentionConfig)
        for name in (f"model.layers.{layer}.self_attn.{x}_proj.weight" for x in "qk"):
            tensors[name] = rotated_by_halves(tensors[name], attention.key_width(config.d_model))
    return Pretrained(build_model(config, "llama", tensors), tokenizer, end)


def tokenizer_json(fields: dict[str, Any]) -> str:
    """The `tokenizer.json` of a file.

    Raises:
        ConfigError: no byte-level BPE, or an unsupported pre-tokenizer.
        CheckpointError: merges that do not fit the tokens.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    model, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "gpt-2")
    if model != "gpt2" or pre not in PRE_TOKENIZERS:
        allowed = f"gpt2 with one of {', '.join(PRE_TOKENIZERS)}"
        raise ConfigError(problem("tokenizer", f"{model} with {pre}", allowed, "choose another file"))
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    _check_lists(fields)
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    _check_types(tokens, types)
    used = {token: index for index, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != UNUSED}
    try:
        engine = Tokenizer(models.BPE(vocab=used, merges=merges))
    # The library raises bare exceptions.
    except Exception as error:
        raise CheckpointError(f"tokenizer.ggml.merges: do not fit its tokens ({error}); fetch the file again") from None
    cuts = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
    engine.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    engine.decoder = decoders.ByteLevel()
    added: dict[bool, list[AddedToken]] = {True: [], False: []}
    for token, kind in zip(tokens, types, strict=True):
        if kind in (UNKNOWN, CONTROL, USER_DEFINED):
            added[kind != USER_DEFINED].append(AddedToken(token, special=kind != USER_DEFINED, normalized=False))
    engine.add_special_tokens(added[True])
    engine.add_tokens(added[False])
    if fields.get("tokenizer.ggml.add_bos_token"):
        begin = _token(fields, "tokenizer.ggml.bos_token_id")
        template = [(tokens[begin], begin)]
        engine.post_processor = processors.TemplateProcessing(single=[tokens[begin], "$A"], special_tokens=template)
    return engine.to_str()


def _token(fields: dict[str, Any], name: str) -> int:
    return Fields(fields).size(name, least=0, most=len(fields["tokenizer.ggml.tokens"]) - 1)


def _check_lists(fields: dict[str, Any]) -> None:
    for name, kind in (("tokens", str), ("token_type", int), ("merges", str)):
        given = fields[f"tokenizer.ggml.{name}"]
        if not isinstance(given, list) or not all(type(one) is kind for one in given):
            allowed = "an array of texts" if kind is str else "an array of whole numbers"
            raise CheckpointError(f"tokenizer.ggml.{name}: must be {allowed}; fetch the file again")


def _check_types(tokens: list[str], types: list[int]) -> None:
    if len(tokens) != len(types):
        allowed = f"as many as tokens, {len(tokens)}"
        raise ConfigError(problem("tokenizer.ggml.token_type", f"{len(types)} types", allowed, "fetch the file again"))
    if unlike := sorted(set(types) - TOKEN_TYPES.keys()):
        allowed = f"one of {', '.join(f'{kind} ({name})' for kind, name in TOKEN_TYPES.items())}"
        raise ConfigError(problem("tokenizer.ggml.token_type", unlike[0], allowed, "choose another file"))


def llama_table(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    """The table of a `config.json`.

    Raises:
        ConfigError: values with another width than keys, or heads that are partly rotated.
    """
    given, width = Fields(fields), fields.get("llama.attention.key_length")
    for name in ("attention.value_length", "rope.dimension_count"):
        other = fields.get(f"llama.{name}")
        # A missing length is an error of the configuration.
        expected = width or given.size("llama.embedding_length", default=1) // given.size("llama.attention.head_count")
        if other is not None and other != expected:
            raise ConfigError(problem(f"llama.{name}", other, f"the width of a head, {expected}", "choose another file"))
    keys = {
        "head_dim": "attention.key_length",
        "hidden_size": "embedding_length",
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "intermediate_size": "feed_forward_length",
        "max_position_embeddings": "context_length",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
        "rope_theta": "rope.freq_base",
        "vocab_size": "vocab_size",
    }
    llama = {name.removeprefix("llama."): value for name, value in fields.items() if name.startswith("llama.")}
    refuse_unread(llama, (*keys.values(), *READ, *(name for name in llama if name.startswith("rope.scaling."))), "llama.")
    data: dict[str, Any] = {ours: fields[f"llama.{theirs}"] for ours, theirs in keys.items() if f"llama.{theirs}" in fields}
    data.setdefault("vocab_size", len(fields["tokenizer.ggml.tokens"]))
    for name in fields:
        if name.startswith(SCALING) and name.removeprefix(SCALING) not in KNOWN_SCALING:
            allowed = f"one of {', '.join(KNOWN_SCALING)} there"
            raise ConfigError(problem(name, fields[name], allowed, "choose a file with the defaults of its scaling"))
    # As in llama.cpp: a factor without a type is linear, and older files have another key for it.
    kind = fields.get("llama.rope.scaling.type", "linear")
    factor = fields.get("llama.rope.scaling.factor") or fields.get("llama.rope.scale_linear") or 1.0
    if kind not in ("none", "linear") or (kind == "linear" and factor != 1):
        data["rope_scaling"] = {"rope_type": kind, "factor": factor}
        if "llama.rope.scaling.original_context_length" in fields:
            data["rope_scaling"][LENGTH] = fields["llama.rope.scaling.original_context_length"]
    # The file has it in float32, of which this is the shortest decimal.
    data["rms_norm_eps"] = float(f"{given.number('llama.attention.layer_norm_rms_epsilon', 0.0):.6g}")
    return {"model_type": "llama", "tie_word_embeddings": tied, **data}


def layout_name(theirs: str) -> str:
    """The name in a Hugging Face folder; unknown names are unchanged, and refused later."""
    if theirs in ENDS:
        return ENDS[theirs]
    if not theirs.startswith("blk.") or theirs.count(".") < 2:
        return theirs
    _, layer, *module, what = theirs.split(".")
    return ".".join(["model.layers", layer, *(NAMES.get(word, word) for word in module), what])


def rotated_by_halves(weight: Tensor, head_dim: int) -> Tensor:
    """Reorders adjacent rotation pairs to halves, as our rotation expects."""
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


MAGIC, VERSIONS = b"GGUF", (2, 3)
SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of numbers and booleans, by type."""

STRING, ARRAY = 8, 9
MAX_DIMS, MAX_NESTED = 8, 4


def check_metadata(path: Path) -> None:
    """Checks every count and length before the tensors.

    Raises:
        ValueError: another kind of file, or a count beyond its end.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        metadata = _Metadata(file, path.stat().st_size)
        n_tensors, n_fields = metadata.begin()
        for _ in range(n_fields):
            metadata.key()
            metadata.value(metadata.number("I"))
        for _ in range(n_tensors):
            metadata.key()
            n_dims = metadata.number("I")
            if n_dims > MAX_DIMS:
                raise ValueError(f"a tensor of {n_dims} dimensions")
            # Sizes, type and offset.
            metadata.skip(8 * n_dims + 4 + 8)


class _Metadata:
    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file, self.size, self.order = file, size, "<"

    def begin(self) -> tuple[int, int]:
        """Returns the number of tensors and of fields."""
        if (magic := self.file.read(4)) != MAGIC:
            raise ValueError(f"it begins with {magic!r}, must begin with {MAGIC!r}")
        version = self.number("I")
        # A big-endian file.
        if version and version % (1 << 16) == 0:
            self.order, version = ">", version >> 24
        if version not in VERSIONS:
            raise ValueError(f"version {version}, must be one of {VERSIONS}")
        return self.number("Q"), self.number("Q")

    def number(self, form: str) -> int:
        n_bytes = struct.calcsize(f"<{form}")
        if len(content := self.file.read(n_bytes)) < n_bytes:
            raise ValueError("it ends within its metadata")
        return struct.unpack(self.order + form, content)[0]

    def skip(self, n_bytes: int) -> None:
        if n_bytes > self.size - self.file.tell():
            raise ValueError("it ends within its metadata, or counts more than it holds")
        self.file.seek(n_bytes, 1)

    def key(self) -> None:
        # The limit of the format.
        if (length := self.number("Q")) >= 1 << 16:
            raise ValueError(f"a name of {length} bytes")
        self.skip(length)

    def value(self, kind: int, nested: int = 0) -> None:
        if kind in SCALARS:
            self.skip(SCALARS[kind])
        elif kind == STRING:
            self.skip(self.number("Q"))
        elif kind == ARRAY and nested < MAX_NESTED:
            kind, count = self.number("I"), self.number("Q")
            if kind in SCALARS:
                self.skip(count * SCALARS[kind])
                return
            for _ in range(count):
                self.value(kind, nested + 1)
        else:
            raise ValueError(f"a value of type {kind}")
