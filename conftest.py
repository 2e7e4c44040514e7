"""Keeps pytest from importing what needs an extra that is absent, to look for examples there."""

import importlib.util

INTEROP = "src/twoaxis/interop"
NEEDS = {
    "transformers": f"{INTEROP}/hugging_face",
    "lm_eval": f"{INTEROP}/evaluation/language_model.py",
    "torchtitan": f"{INTEROP}/torchtitan",
    "fastapi": f"{INTEROP}/serving/http",
}

collect_ignore = [path for library, path in NEEDS.items() if importlib.util.find_spec(library) is None]
