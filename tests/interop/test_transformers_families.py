"""Families of transformers: files that it writes are read, and its other families are not taken for one of ours."""

import re
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs transformers")

from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from twoaxis.core.errors import ConfigError
from twoaxis.planner.model.hugging_face import FAMILIES, read_hugging_face

KNOWN = sorted(set(FAMILIES) & set(CONFIG_MAPPING))
SIZES: dict[str, dict[str, Any]] = {"deepseek_v2": {"num_experts_per_tok": 6}, "deepseek_v3": {}}


@pytest.mark.parametrize("kind", KNOWN)
def test_a_file_that_transformers_writes_is_read(kind: str) -> None:
    """Catches a key of a family that this library does not know to be harmless, such as one of a newer release."""
    data = CONFIG_MAPPING[kind](**SIZES.get(kind, {})).to_dict()
    named = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    assert named in FAMILIES[kind].architectures
    assert read_hugging_face({**data, "architectures": [named]}, kind).vocab_size == data["vocab_size"]


def test_no_family_is_taken_for_a_misspelt_one() -> None:
    """Catches a suggestion that sends the reader of one family to another."""
    others = [name for name in CONFIG_MAPPING if name not in FAMILIES and name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    assert len(others) > 100
    for name in others:
        with pytest.raises(ConfigError, match=rf"^model_type='{re.escape(name)}': must be a causal language model") as caught:
            read_hugging_face({"model_type": name}, "model")
        assert "did you mean" not in str(caught.value), caught.value
