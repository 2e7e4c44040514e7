"""Errors a user can cause: one line that says what, got, allowed, remedy."""

import difflib
from collections.abc import Iterable


class TwoAxisError(Exception):
    """Base of every error a user can cause; the command line prints it in one line and exits 2."""


class ConfigError(TwoAxisError, ValueError):
    """A configuration that cannot be built."""


class DataError(TwoAxisError, ValueError):
    """Text, tokens or shards that cannot be used."""


class CheckpointError(TwoAxisError):
    """A checkpoint that cannot be read, or that belongs to another run."""


class StudyError(TwoAxisError, ValueError):
    """A study that cannot be planned, run or reported."""


def problem(what: str, got: object, allowed: str, remedy: str) -> str:
    """Words one error: `what=got: must be allowed; remedy`.

    Example:
        >>> problem("n_heads", 7, "a multiple of n_kv_heads=2", "set n_heads to 6 or 8")
        'n_heads=7: must be a multiple of n_kv_heads=2; set n_heads to 6 or 8'
    """
    return f"{what}={got!r}: must be {allowed}; {remedy}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns the remedy for an unknown name: the nearest known one, else the whole list.

    Example:
        >>> nearest("residul", ["residual", "deep_delta"])
        "did you mean 'residual'?"
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(names)}"
