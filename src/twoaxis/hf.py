"""Our models in transformers: `import twoaxis.hf` lets `AutoModelForCausalLM.from_pretrained` read folders of this library.

`import twoaxis` alone changes nothing outside itself. Where transformers has been imported before, it imports this module too;
where transformers may come later, import this one. It needs the extra `twoaxis[hf]`.
"""

# The import of these classes registers them.
from twoaxis.interop.hugging_face import (
    TwoAxisConfig,
    TwoAxisForCausalLM,
    TwoAxisModel,
    export_folder,
    from_hugging_face,
    import_folder,
    to_hugging_face,
)

__all__ = [
    "TwoAxisConfig",
    "TwoAxisForCausalLM",
    "TwoAxisModel",
    "export_folder",
    "from_hugging_face",
    "import_folder",
    "to_hugging_face",
]
