"""User errors: one line with what, got, allowed, remedy."""

import os
import re
from collections.abc import Iterable

LONG_NAME = 5
"""Letters from which on a name may have two typing errors."""


class TwoAxisError(Exception):
    """Base of all user errors; the command line prints it and exits with 2.

    Args:
        message: what, got, allowed, remedy; joined to one line, since it may quote libraries and files.

    Attributes:
        on_all_ranks: whether all processes of a run raise it, so that the first one says it for all.
    """

    on_all_ranks = False

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(line.strip() for line in message.splitlines()))


class ConfigError(TwoAxisError, ValueError):
    """A configuration that cannot be built."""


class DataError(TwoAxisError, ValueError):
    """Text, tokens or shards that cannot be used."""


class CheckpointError(TwoAxisError):
    """A checkpoint that cannot be read, or that belongs to another run."""


class StudyError(TwoAxisError, ValueError):
    """A study that cannot be planned, run or reported."""


def problem(what: str, got: object, allowed: str, remedy: str) -> str:
    """Formats an error message: `what=got: must be allowed; remedy`.

    Example:
        >>> problem("n_heads", 7, "a multiple of n_kv_heads=2", "set n_heads to 6 or 8")
        'n_heads=7: must be a multiple of n_kv_heads=2; set n_heads to 6 or 8'
    """
    return f"{what}={got!r}: must be {allowed}; {remedy}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns the remedy for an unknown name: the known name that it misspells, else all known names.

    Another name that is merely similar is not suggested.

    Example:
        >>> nearest("residul", ["residual", "deep_delta"])
        "did you mean 'residual'?"
        >>> nearest("gru", ["gelu", "relu2"])
        'choose one of gelu, relu2'
    """
    names = sorted(known)
    close = sorted((errors, one) for one in names if (errors := _typing_errors(_plain(name), _plain(one))) is not None)
    return f"did you mean {close[0][1]!r}?" if close else f"choose one of {', '.join(names)}"


def _plain(name: str) -> str:
    """The name in lower case without separators."""
    return re.sub(r"[-_ ]", "", name).lower()


def _typing_errors(name: str, known: str) -> int | None:
    """The edit distance with transpositions, or the letters after a common beginning; None for another name."""
    if min(len(name), len(known)) >= 3 and (name.startswith(known) or known.startswith(name)):
        return abs(len(name) - len(known))
    # The same letters in another order.
    if sorted(name) == sorted(known):
        return 0
    if abs(len(name) - len(known)) > 2:
        return None
    above, row = [], list(range(len(known) + 1))
    for i, letter in enumerate(name, 1):
        before, above, row = above, row, [i]
        for j, other in enumerate(known, 1):
            row.append(min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (letter != other)))
            if i > 1 and j > 1 and letter == known[j - 2] and name[i - 2] == other:
                row[j] = min(row[j], before[j - 2] + 1)
    return row[-1] if row[-1] <= (2 if len(known) >= LONG_NAME else min(1, len(name))) else None


def system_reason(error: BaseException) -> str | None:
    """The message of the operating system; None for other errors.

    Example:
        >>> system_reason(OSError(28, "No space left on device")), system_reason(ValueError("seven"))
        ('No space left on device', None)
    """
    if isinstance(error, OSError):
        return error.strerror or str(error)
    # Rust libraries such as safetensors and tokenizers wrap errors of the system.
    number = None if isinstance(error, TwoAxisError) else re.search(r"\(os error (\d+)\)", str(error))
    return os.strerror(int(number[1])) if number else None
