"""Keeps pytest from importing what needs an extra that is absent, to look for examples there."""

import gc
import importlib.util

SOURCE, TESTS = "src/twoaxis/interop", "tests/interop"
NEEDS = {
    "transformers": (f"{SOURCE}/hugging_face", f"{TESTS}/engines/outside_engine.py"),
    "lm_eval": (f"{SOURCE}/evaluate/language_model.py",),
    "torchtitan": (f"{SOURCE}/torchtitan.py", f"{SOURCE}/engines/torchtitan.py"),
    **dict.fromkeys(("fastapi", "prometheus_client"), (f"{SOURCE}/serve/http", f"{TESTS}/serve/server.py")),
    "triton": ("tests/ops/gpu/cubin.py",),
}

collect_ignore = [path for library, paths in NEEDS.items() if importlib.util.find_spec(library) is None for path in paths]

# Kernels have no examples, and Triton takes long to load.
collect_ignore_glob = ["src/twoaxis/ops/gpu/*_kernels.py"]

# Collection makes much and drops little; `pytest_collection_finish` switches the search for garbage on again.
gc.disable()
