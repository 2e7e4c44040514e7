"""The plug-in that vLLM loads when it starts, so that it serves folders of this library's models without code of their own."""

import importlib
from typing import Any

ARCHITECTURE = "TwoAxisForCausalLM"
"""What `config.json` calls our models."""

BACKEND = "vllm.model_executor.models.transformers:TransformersForCausalLM"
"""vLLM's class for models that transformers defines; it builds `TwoAxisModel` through `AutoModel`."""


def register() -> None:
    """Registers our architecture with vLLM's Transformers backend; the entry point `vllm.general_plugins` names it.

    vLLM calls it in each of its processes, where it also registers our configuration and models with transformers.
    """
    importlib.import_module("twoaxis.interop.hugging_face.modeling")
    vllm: Any = importlib.import_module("vllm")
    vllm.ModelRegistry.register_model(ARCHITECTURE, BACKEND)
