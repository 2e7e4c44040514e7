"""Without transformers, families that are read as plain data are planned, and all others are refused in one line."""

import sys
from pathlib import Path

import pytest

from twoaxis.core.errors import ConfigError
from twoaxis.planner.model import read_model
from twoaxis.planner.model.hugging_face import read_hugging_face

EXAMPLES = Path(__file__).parents[2] / "examples" / "models"


def test_other_families_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert read_model(EXAMPLES / "llama-3-8b.json").n_layers == 32 and read_model("moe-1t").n_layers == 61
    with pytest.raises(ConfigError, match=r"^model_type='gemma': must be built by transformers.*pip install 'twoaxis\[hf\]'"):
        read_hugging_face({"model_type": "gemma"}, "model")
