"""The HTTP server; importing it needs the extra `twoaxis[serve]`."""

import importlib.util

from twoaxis.core.errors import ConfigError

for _library in ("fastapi", "uvicorn", "prometheus_client"):
    if importlib.util.find_spec(_library) is None:
        raise ConfigError(f"{_library} is not installed: must be there to serve; pip install 'twoaxis[serve]'")
