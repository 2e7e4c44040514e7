"""Keeps pytest from importing what needs an extra that is absent, to look for examples there."""

import importlib.util

SOURCE, TESTS = "src/twoaxis/interop", "tests/interop"
NEEDS = {
    "transformers": (f"{SOURCE}/hugging_face", f"{TESTS}/engines/outside_engine.py"),
    "lm_eval": (f"{SOURCE}/evaluate/language_model.py",),
    "torchtitan": (f"{SOURCE}/torchtitan.py", f"{SOURCE}/engines/torchtitan.py"),
    **dict.fromkeys(("fastapi", "prometheus_client"), (f"{SOURCE}/serve/http", f"{TESTS}/serve/server.py")),
}

collect_ignore = [path for library, paths in NEEDS.items() if importlib.util.find_spec(library) is None for path in paths]
