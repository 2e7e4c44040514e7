"""Floor 7: the command line, one file per verb."""

from twoaxis.cli.app import main

__all__ = ["main"]
