"""Solvers of the synthetic tasks that read nothing but the text, and lookups that must not be enough."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

from twoaxis.data.synthetic import SyntheticConfig
from twoaxis.data.synthetic.kinds import CopyConfig, EarlyFeatureConfig, MqarConfig, MultiHopConfig, SwitchingNgramConfig

LONGEST_CONTEXT = 4
"""Characters of the longest n-gram that the lookup knows."""

Guess = Callable[[str], str]
"""From the text up to a cue, the cue included, to the answer."""


def mqar(before: str, task: MqarConfig) -> str:
    pairs = before[: 2 * task.n_pairs]
    return dict(zip(pairs[::2], pairs[1::2], strict=True))[before[-2]]


def copy(before: str, task: CopyConfig) -> str:
    _, shown, copied = before.split("|")
    return shown.replace(".", "")[copied.count("=") - 1]


def switching_ngram(before: str, task: SwitchingNgramConfig) -> str:
    upto = before.rstrip("=.")
    return upto[-2 - int(upto[-1])]


def early_feature(before: str, task: EarlyFeatureConfig) -> str:
    key = before[-1].lower()
    entry = re.match(rf"(?:...)*?{key}(.)(.)", before)
    assert entry
    return entry[2] if entry[1] == "+" else key


def multi_hop(before: str, task: MultiHopConfig) -> str:
    edges = dict(zip(before[: 2 * task.n_nodes : 2], before[1 : 2 * task.n_nodes : 2], strict=True))
    node = before[-2]
    for _ in range(int(before[-3])):
        node = edges[node]
    return node


SOLVERS: dict[str, Callable[..., str]] = {
    solver.__name__: solver for solver in (mqar, copy, switching_ngram, early_feature, multi_hop)
}


def answers(text: str, task: SyntheticConfig) -> list[tuple[str, str]]:
    """The text up to each cue, and the character after it."""
    return [(text[: at + 1], text[at + 1]) for at in range(len(text) - 1) if text[at] in task.answer_cues]


def accuracy(texts: Iterable[str], task: SyntheticConfig, guess: Guess) -> float:
    found = [guess(before) == answer for text in texts for before, answer in answers(text, task)]
    return sum(found) / len(found)


def ngram(texts: Iterable[str], task: SyntheticConfig) -> Guess:
    """The most frequent answer after the longest context that came in training."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for text in texts:
        for before, answer in answers(text, task):
            for length in range(LONGEST_CONTEXT + 1):
                counts[before[len(before) - length :]][answer] += 1
    best = {context: max(sorted(found), key=found.__getitem__) for context, found in counts.items()}

    def guess(before: str) -> str:
        contexts = (before[len(before) - length :] for length in range(LONGEST_CONTEXT, -1, -1))
        return next(best[context] for context in contexts if context in best)

    return guess


def last_match(before: str) -> str:
    """What followed the last earlier occurrence of the longest possible context: an n-gram within the sample."""
    for length in range(LONGEST_CONTEXT, 0, -1):
        at = before.rfind(before[-length:], 0, len(before) - 1)
        if at >= 0 and len(before) >= length:
            return before[at + length]
    return before[-1]


def last_match_of_key(before: str) -> str:
    """What last followed the character before the cue, which is one hop of a lookup."""
    at = before.rfind(before[-2], 0, len(before) - 2)
    return before[at + 1] if at >= 0 else before[-1]
