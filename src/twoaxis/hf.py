"""Registers our models with transformers: `import twoaxis.hf` lets `AutoModelForCausalLM.from_pretrained` read our folders.

`import twoaxis` does the same where transformers is imported already, and else changes nothing outside itself. Needs the extra
`twoaxis[hf]`.
"""

# Importing these classes registers them.
from twoaxis.interop.hugging_face import (
    TwoAxisConfig,
    TwoAxisForCausalLM,
    TwoAxisModel,
    export_folder,
    from_hugging_face,
    to_hugging_face,
)

__all__ = [
    "TwoAxisConfig",
    "TwoAxisForCausalLM",
    "TwoAxisModel",
    "export_folder",
    "from_hugging_face",
    "to_hugging_face",
]
