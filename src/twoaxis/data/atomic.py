"""Files that appear whole or not at all; see `twoaxis.core.atomic`."""

from twoaxis.core.atomic import replacing, write_once

__all__ = ["replacing", "write_once"]
