"""Models of this library inside Hugging Face transformers: configuration, models, caches, tokenizers, folders.

Importing it needs the extra `twoaxis[hf]`.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from twoaxis.core.errors import ConfigError

if TYPE_CHECKING:
    from twoaxis.interop.hugging_face.configuration import TwoAxisConfig
    from twoaxis.interop.hugging_face.conversion import (
        export_folder,
        from_hugging_face,
        to_fast_tokenizer,
        to_hugging_face,
    )
    from twoaxis.interop.hugging_face.generation_cache import TwoAxisCache
    from twoaxis.interop.hugging_face.modeling import TwoAxisForCausalLM, TwoAxisModel

if importlib.util.find_spec("transformers") is None:
    raise ConfigError("transformers is not installed: must be there for Hugging Face folders; pip install 'twoaxis[hf]'")

_MODULES = {
    "TwoAxisCache": "generation_cache",
    "TwoAxisConfig": "configuration",
    "TwoAxisForCausalLM": "modeling",
    "TwoAxisModel": "modeling",
    "export_folder": "conversion",
    "from_hugging_face": "conversion",
    "to_fast_tokenizer": "conversion",
    "to_hugging_face": "conversion",
}


def __getattr__(name: str) -> Any:
    # Each module on first use: transformers may still be in the middle of its own import.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


__all__ = [
    "TwoAxisCache",
    "TwoAxisConfig",
    "TwoAxisForCausalLM",
    "TwoAxisModel",
    "export_folder",
    "from_hugging_face",
    "to_fast_tokenizer",
    "to_hugging_face",
]
