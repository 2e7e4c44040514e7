"""Generation options of a task."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from twoaxis.core.errors import ConfigError, nearest, problem
from twoaxis.model import Sampling

MAX_NEW_TOKENS = 256
"""New tokens where a task does not say how many; at most half of what the model takes."""

LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""What tasks call the most new tokens; the first one given counts."""

KNOWN = ("until", *LENGTHS, "do_sample", "temperature", "top_k", "top_p", "seed")


class Continuation(NamedTuple):
    """The options in the `generation_kwargs` of a task.

    Attributes:
        until: the text ends before whichever of these is complete first, as in `StopStringMatcher`, and before special tokens
            that they name.
        max_new_tokens: at most.
        sampling: greedy by default.
    """

    until: tuple[str, ...]
    max_new_tokens: int
    sampling: Sampling

    @staticmethod
    def read(kwargs: Mapping[str, Any], max_seq_len: int) -> "Continuation":
        """Reads the keyword arguments of a request.

        Raises:
            ConfigError: an unknown one, or more new tokens than the model takes.

        Example:
            >>> Continuation.read({"until": ["."], "max_gen_toks": 4, "do_sample": False}, 64)
            Continuation(until=('.',), max_new_tokens=4, sampling=Sampling(temperature=0.0, top_k=None, top_p=1.0, seed=0))
        """
        for name in kwargs:
            if name not in KNOWN:
                raise ConfigError(f"generation_kwargs: has no {name!r}; {nearest(name, KNOWN)}")
        # What is null is as if it were left out.
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        until = kwargs.get("until") or ()
        until = (until,) if isinstance(until, str) else tuple(until)
        given = [int(kwargs[name]) for name in LENGTHS if name in kwargs]
        new_tokens = given[0] if given else min(MAX_NEW_TOKENS, max_seq_len // 2)
        if not 0 <= new_tokens < max_seq_len:
            allowed = f"in 0..{max_seq_len - 1}, to leave room for a context in max_seq_len={max_seq_len}"
            raise ConfigError(problem("max_gen_toks", new_tokens, allowed, "lower it in the generation_kwargs of the task"))
        sampled = kwargs.get("do_sample")
        temperature = 0.0 if sampled is False else kwargs.get("temperature", 1.0 if sampled else 0.0)
        options = {name: kwargs[name] for name in ("top_k", "top_p", "seed") if name in kwargs}
        sampling = Sampling.from_data({"temperature": temperature, **options})
        return Continuation(tuple(text for text in until if text), new_tokens, sampling)
