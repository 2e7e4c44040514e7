"""Folders that `from_pretrained` loads after `import twoaxis.hf`, without code of their own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twoaxis.checkpoints.decoder_folder import DEFINITION_FILE
from twoaxis.checkpoints.published_folder import GENERATION_CONFIG, generation_defaults, write_source_files
from twoaxis.core.files import new_folder
from twoaxis.data.tokenizer import Tokenizer
from twoaxis.interop.hugging_face.conversion import to_fast_tokenizer, to_hugging_face
from twoaxis.model import Decoder

CODE_FILE = "modeling_twoaxis.py"
"""Code for programs that import no twoaxis themselves, and run code of a folder where the user trusts it."""

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
        source_files: files of the model that this one began as, about special tokens, chats and what ends an answer; they take
            the place of ours.
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
