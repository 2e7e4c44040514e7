"""Builds the model of a `config.json` on the meta device, where it has shapes and no memory; no code but transformers' runs."""

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from importlib import import_module
from io import StringIO
from typing import Any, Literal, NamedTuple

import torch

from twoaxis.core.errors import ConfigError, nearest, problem
from twoaxis.model.config_json import SHOWN, refuse_architectures, refuse_unread

MOST_LAYERS = 10_000
"""More than any model has, and few enough to build."""

LEFT_OUT = ("model_type", "auto_map", "architectures", "quantization_config", "compression_config", "source")
"""Keys that are read here, or never followed, before transformers sees the file."""

WITHOUT_COST = frozenset(
    {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings"}
    | {"rope_interleave", "topk_method", "scoring_func", "num_nextn_predict_layers", "qk_head_dim", "use_mamba_kernels"}
)
"""Keys that transformers may store without a field of their own, and that change no count."""

TABLE = "describe its shape in TOML, as in examples/models"


class Built(NamedTuple):
    """A model on the meta device.

    Attributes:
        model: the language model with its head.
        config: as transformers understood it.
        notes: what of the file is not counted, one line each.
    """

    model: Any
    config: Any
    notes: tuple[str, ...]


def build(data: Mapping[str, Any]) -> Built:
    """Builds a published causal language model without downloads, remote code or memory.

    Args:
        data: the contents of its `config.json`.

    Raises:
        ConfigError: in one line: transformers is missing, does not know the model, or cannot build it.
    """
    kind = data.get("model_type")
    transformers, without_init = _transformers(kind)
    types = import_module("transformers.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if not isinstance(kind, str) or kind not in types:
        others = import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING_NAMES
        raise _unknown(kind, types, others, transformers.__version__)
    names = types[kind]
    refuse_architectures(data, (names,) if isinstance(names, str) else tuple(names))
    for key, value in data.items():
        if key.endswith(("layer", "layers")) and isinstance(value, int) and not -1 <= value <= MOST_LAYERS:
            raise ConfigError(problem(key, value, f"a whole number up to {MOST_LAYERS}", "correct it in the file"))
    keys = {key: value for key, value in data.items() if key not in LEFT_OUT and not key.startswith("_")}
    with quietly(f"model_type={kind!r}: transformers cannot build it"):
        config = transformers.AutoConfig.for_model(kind, **keys)
    _refuse_missing(keys, config)
    with quietly(f"model_type={kind!r}: transformers cannot build it"), torch.device("meta"), without_init():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    model.tie_weights()
    notes = list(_unread(keys, model, config))
    if data.get("quantization_config"):
        notes.append("quantization_config: weights are counted in the precision of the plan, not as they are stored")
    if data.get("num_nextn_predict_layers"):
        notes.append("num_nextn_predict_layers: layers that predict further tokens are not counted")
    return Built(model.eval(), config, tuple(notes))


def _transformers(kind: Any) -> tuple[Any, Any]:
    try:
        return import_module("transformers"), import_module("transformers.initialization").no_init_weights
    except ImportError:
        remedy = f"install it: pip install 'twoaxis[hf]', or {TABLE}"
        raise ConfigError(f"model_type={kind!r}: must be built by transformers, which is not installed; {remedy}") from None


def _unknown(kind: Any, types: Mapping[str, Any], others: Mapping[str, Any], version: str) -> ConfigError:
    remedy = f"install a newer transformers, or {TABLE}"
    if isinstance(kind, str) and kind not in others:
        # Versions and additions make another family.
        shape = re.sub(r"[^\d_]", "", kind)
        suggestion = nearest(kind, [one for one in types if re.sub(r"[^\d_]", "", one) == shape])
        remedy = suggestion if suggestion.startswith("did you mean") else remedy
    return ConfigError(problem("model_type", kind, f"a causal language model that transformers {version} knows", remedy))


def _refuse_missing(keys: Mapping[str, Any], config: Any) -> None:
    """Refuses a file without a size for which transformers would take that of some model."""
    for size in ("vocab_size", "hidden_size", "num_hidden_layers"):
        names = {size, config.attribute_map.get(size)} | {name for name, own in config.attribute_map.items() if own == size}
        stated = any("layer" in key for key in keys) if size == "num_hidden_layers" else names & set(keys)
        if not stated:
            what = f"model_type={config.model_type!r}: {size} is missing"
            raise ConfigError(f"{what}: a model of this family has no size without it; add it to the file")


def _unread(keys: Mapping[str, Any], model: Any, config: Any) -> Iterator[str]:
    """Says what transformers keeps without a use: the source of the model names the keys that it reads."""
    declared = set(type(config).__dataclass_fields__) | set(config.attribute_map)
    source = "".join(inspect.getsource(sys.modules[type(each).__module__]) for each in (model, config))
    for key, value in keys.items():
        if key in vars(config) and key not in declared and not re.search(rf"\b{re.escape(key)}\b", source):
            try:
                refuse_unread({key: value}, WITHOUT_COST)
            except ConfigError:
                shown = "a table" if isinstance(value, Mapping) else repr(value)[:SHOWN]
                yield f"{key}={shown}: is not read by transformers, and may change the model"


class quietly(ExitStack):
    """Keeps transformers' warnings off the terminal, and turns its errors into one line."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    def __enter__(self) -> "quietly":
        super().__enter__()
        logging = import_module("transformers.utils.logging")
        self.callback(logging.set_verbosity, logging.get_verbosity())
        logging.set_verbosity_error()
        self.enter_context(redirect_stderr(StringIO()))
        self.enter_context(redirect_stdout(StringIO()))
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Literal[False]:
        super().__exit__(None, None, None)
        if isinstance(error, Exception) and not isinstance(error, ConfigError):
            said = " ".join(str(error).split()) or type(error).__name__
            raise ConfigError(f"{self._what} ({said[:300]}); correct the file") from None
        return False
