"""How transformers learns of this library's classes: through its Auto classes, once.

`import twoaxis` has this called as soon as transformers is imported too, in either order: sorted imports put
`import twoaxis` before `from transformers import AutoModelForCausalLM`, others the other way round.
"""

import functools


@functools.cache
def register_config() -> None:
    """Tells `AutoConfig` of the model type; the models follow when the first configuration is made."""
    from transformers.models.auto.configuration_auto import AutoConfig

    from twoaxis.interop.hugging_face.configuration import TwoAxisConfig
    from twoaxis.model.config_names import MODEL_TYPE

    AutoConfig.register(MODEL_TYPE, TwoAxisConfig)


@functools.cache
def register_models() -> None:
    """Tells `AutoModel` and `AutoModelForCausalLM` of the models."""
    from transformers import AutoModel, AutoModelForCausalLM

    from twoaxis.interop.hugging_face.configuration import TwoAxisConfig
    from twoaxis.interop.hugging_face.modeling import TwoAxisForCausalLM, TwoAxisModel

    AutoModel.register(TwoAxisConfig, TwoAxisModel)
    AutoModelForCausalLM.register(TwoAxisConfig, TwoAxisForCausalLM)
