"""Decoders and tokenizers as those of transformers, decoders back, and folders that `from_pretrained` loads.

A conversion shares the parameters, without copies. Folders hold no code of their own; `import twoaxis.hf` comes before.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, processors
from torch import nn
from transformers import PreTrainedTokenizerFast

from twoaxis.checkpoints.decoder_folder import DEFINITION_FILE
from twoaxis.checkpoints.published_folder import GENERATION_CONFIG, generation_defaults, write_source_files
from twoaxis.core.errors import DataError, problem
from twoaxis.core.files import new_folder
from twoaxis.data.tokenizer import ByteTokenizer, SubwordTokenizer, Tokenizer
from twoaxis.interop.engines import number_attentions
from twoaxis.interop.hugging_face.configuration import TwoAxisConfig
from twoaxis.interop.hugging_face.modeling import TwoAxisForCausalLM
from twoaxis.model import Decoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def to_hugging_face(decoder: Decoder, **fields: Any) -> TwoAxisForCausalLM:
    """The model of transformers with the parameters of this decoder; training one trains the other.

    Args:
        decoder: the model.
        fields: of `TwoAxisConfig` beyond those of the decoder, such as `eos_token_id`.

    Example:
        >>> from twoaxis import DecoderConfig
        >>> decoder = Decoder.build(DecoderConfig(vocab_size=16, d_model=8, n_layers=1))
        >>> model, tokens = to_hugging_face(decoder), torch.tensor([[1, 2, 3]])
        >>> torch.equal(model(tokens).logits, decoder(tokens))
        True
    """
    with torch.device("meta"):
        model = TwoAxisForCausalLM(TwoAxisConfig.from_decoder(decoder.config, **fields))
    _move_children(decoder, model.model.decoder)
    number_attentions(model.model.decoder)
    model.lm_head.weight = cast(nn.Parameter, decoder.head_weight)
    return model.train(decoder.training)


def from_hugging_face(model: TwoAxisForCausalLM) -> Decoder:
    """The decoder with the parameters of this model of transformers; training one trains the other."""
    with torch.device("meta"):
        decoder = Decoder(model.config.decoder_config)
    _move_children(model.model.decoder, decoder)
    if decoder.head is not None:
        decoder.head.weight = cast(nn.Parameter, model.lm_head.weight)
    return decoder.train(model.training)


def _move_children(source: Decoder, target: Decoder) -> None:
    for name, child in source.named_children():
        if name != "head":
            setattr(target, name, child)


def to_fast_tokenizer(tokenizer: Tokenizer, max_tokens: int | None = None) -> "PreTrainedTokenizerBase":
    """The tokenizer of transformers that gives the same ids for any text, after the begin marker, if any.

    Text that spells a marker stays text, as in training. The end marker is also the padding, which masks hide; the byte
    tokenizer has neither, so batches of prompts need a padding token of the caller's choice.

    Args:
        tokenizer: of bytes, or from a `tokenizer.json`.
        max_tokens: the longest text that the model takes.

    Raises:
        DataError: another kind of tokenizer.

    Example:
        >>> to_fast_tokenizer(ByteTokenizer())("Hé").input_ids
        [72, 195, 169]
    """
    if isinstance(tokenizer, ByteTokenizer):
        engine, begin, end = _byte_engine(), None, None
    elif isinstance(tokenizer, SubwordTokenizer):
        content = json.loads(tokenizer.definition)
        engine, end = tokenizers.Tokenizer.from_str(json.dumps(content["tokenizer"])), content["end_of_document"]
        marks = [(engine.id_to_token(token), token) for token in tokenizer.begin_of_document]
        begin = marks[0][0] if marks else None
        if engine.num_special_tokens_to_add(is_pair=False) != len(marks):
            # Tokens that a post-processor adds after a text would end every prompt.
            pieces = [name for name, _ in marks]
            engine.post_processor = processors.TemplateProcessing(single=[*pieces, "$A"], special_tokens=marks)
    else:
        allowed = "the byte tokenizer or one from a tokenizer.json"
        raise DataError(problem("tokenizer", type(tokenizer).__name__, allowed, "export the model without a tokenizer"))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=engine,
        bos_token=begin,
        eos_token=end,
        pad_token=end,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **({} if max_tokens is None else {"model_max_length": max_tokens}),
    )
    return cast("PreTrainedTokenizerBase", fast)


def _byte_engine() -> tokenizers.Tokenizer:
    """A byte-level vocabulary without merges, in which the id of a byte is its value."""
    engine = tokenizers.Tokenizer(models.BPE(vocab={name: byte for byte, name in enumerate(_byte_names())}, merges=[]))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    engine.decoder = decoders.ByteLevel()
    return engine


def _byte_names() -> list[str]:
    """The names of the bytes in byte-level tokenizers: the character itself if it is visible, else the next from U+0100 on."""
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    others = (name for name in sorted(alphabet) if ord(name) > 255)
    return [chr(byte) if chr(byte) in alphabet else next(others) for byte in range(256)]


CODE_FILE = "modeling_twoaxis.py"
"""Code for programs that do not import twoaxis, but run the code of a folder that the user trusts."""

CODE = """# Needs `pip install twoaxis[hf]`; there is no other code in this folder.
from twoaxis.interop.hugging_face import TwoAxisConfig, TwoAxisForCausalLM, TwoAxisModel
"""

AUTO_MAP = {"AutoConfig": "TwoAxisConfig", "AutoModel": "TwoAxisModel", "AutoModelForCausalLM": "TwoAxisForCausalLM"}


def export_folder(
    model: Decoder,
    folder: Path | str,
    tokenizer: Tokenizer | None = None,
    source_files: Mapping[str, bytes] | None = None,
    *,
    code: bool = False,
) -> Path:
    """Writes configuration, weights (safetensors) and tokenizer for transformers; the folder appears whole or not at all.

    Args:
        model: the decoder.
        folder: must not exist, or be empty.
        tokenizer: its end marker becomes the token at which `generate` stops.
        source_files: files of the model that this one began as: special tokens, chat template, tokens that end an answer; they
            replace ours.
        code: whether the folder names code that imports this library, for programs that need code there.

    Raises:
        DataError: the folder holds something, or cannot be written.
    """
    source_files = source_files or {}
    end = None if tokenizer is None else tokenizer.end_of_document
    begin = tokenizer.begin_of_document[0] if tokenizer is not None and tokenizer.begin_of_document else None
    with new_folder(Path(folder)) as draft:
        fields: dict[str, Any] = {"auto_map": _auto_map()} if code else {}
        exported = to_hugging_face(model, bos_token_id=begin, eos_token_id=end, pad_token_id=end, **fields)
        exported.generation_config.update(**generation_defaults(source_files))
        exported.save_pretrained(draft)
        if code:
            (draft / CODE_FILE).write_text(CODE, encoding="utf-8")
        if tokenizer is not None:
            to_fast_tokenizer(tokenizer, model.config.max_seq_len).save_pretrained(draft)
            (draft / DEFINITION_FILE).write_text(tokenizer.definition, encoding="utf-8")
            write_source_files({name: text for name, text in source_files.items() if name != GENERATION_CONFIG}, draft)
    return Path(folder)


def _auto_map() -> dict[str, str]:
    return {auto: f"{CODE_FILE.removesuffix('.py')}.{name}" for auto, name in AUTO_MAP.items()}
