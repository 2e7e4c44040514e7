"""Errors a user can cause: one line that says what, got, allowed, remedy."""

import os
import re
from collections.abc import Iterable

LONG_NAME = 5
"""Letters from which on two slips are still the same name."""


class TwoAxisError(Exception):
    """Base of every error a user can cause; the command line prints it and exits 2.

    Args:
        message: what, got, allowed, remedy; made one line, since it may quote libraries and files.
    """

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
    """Words one error: `what=got: must be allowed; remedy`.

    Example:
        >>> problem("n_heads", 7, "a multiple of n_kv_heads=2", "set n_heads to 6 or 8")
        'n_heads=7: must be a multiple of n_kv_heads=2; set n_heads to 6 or 8'
    """
    return f"{what}={got!r}: must be {allowed}; {remedy}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns the remedy for an unknown name: the known one of which it is a slip of the keyboard, else the whole list.

    Something else that merely looks alike is no remedy: whoever asks for it wants that.

    Example:
        >>> nearest("residul", ["residual", "deep_delta"])
        "did you mean 'residual'?"
        >>> nearest("gru", ["gelu", "relu2"])
        'choose one of gelu, relu2'
    """
    names = sorted(known)
    close = sorted((slips, one) for one in names if (slips := _slips(_plain(name), _plain(one))) is not None)
    return f"did you mean {close[0][1]!r}?" if close else f"choose one of {', '.join(names)}"


def _plain(name: str) -> str:
    """Without what is easily left out or mistaken: capitals and separators."""
    return re.sub(r"[-_ ]", "", name).lower()


def _slips(name: str, known: str) -> int | None:
    """How many letters were missed, doubled, exchanged or mistaken, or stand behind the other; None for another name."""
    if min(len(name), len(known)) >= 3 and (name.startswith(known) or known.startswith(name)):
        return abs(len(name) - len(known))
    # The same letters, in whatever order.
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
    """What the operating system has refused, in its words; None for an error of another kind.

    Example:
        >>> system_reason(OSError(28, "No space left on device")), system_reason(ValueError("seven"))
        ('No space left on device', None)
    """
    if isinstance(error, OSError):
        return error.strerror or str(error)
    # Libraries in Rust, safetensors and tokenizers among them, raise errors of their own around those of the system.
    number = None if isinstance(error, TwoAxisError) else re.search(r"\(os error (\d+)\)", str(error))
    return os.strerror(int(number[1])) if number else None
