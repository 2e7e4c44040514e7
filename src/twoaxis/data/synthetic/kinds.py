"""The synthetic tasks: copying, associative recall, multi-hop lookup, early features late in depth, switched n-grams."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from twoaxis.core.errors import ConfigError, problem
from twoaxis.data.synthetic import CUE, DIGITS, FILLER, LOWER, UPPER, KeyedRandom, SyntheticConfig

BEGIN = "|"
"""Precedes the symbols and their copy."""


class CopyConfig(SyntheticConfig):
    """Symbols with random blanks between them, then the symbols in order without the blanks.

    Text:     `|a..c.b|=a=c=b`: the symbols are all different
    Answer:   the first symbol after the one copied last
    Source:   Mamba, arXiv:2312.00752, section 4.1.1 (selective copying); with n_blanks=0 it is induction,
              arXiv:2209.11895
    Deviates: a cue precedes every symbol of the copy, and no symbol occurs twice, so that the last copied symbol determines
              the next
    Needs:    attention that finds the symbol before the blanks, then attention that matches it; a short window does both
              where gaps are short

    Args:
        n_symbols: symbols to copy.
        n_blanks: blanks between and around them, at random positions.
        n_letters: symbols to draw from.

    Raises:
        ConfigError: more symbols than letters.

    Example:
        >>> CopyConfig(n_symbols=3, n_blanks=3).sample(KeyedRandom(0))
        '|..ld.u|=l=d=u'
    """

    bounds: ClassVar = {"n_symbols": ("n_letters", "copy fewer")}

    kind: Literal["copy"] = "copy"
    n_symbols: int = Field(default=6, ge=1)
    n_blanks: int = Field(default=6, ge=0)
    n_letters: int = Field(default=26, ge=1, le=26)

    @property
    def sample_length(self) -> int:
        """Symbols, blanks, two marks, and two tokens per copied symbol."""
        return 3 * self.n_symbols + self.n_blanks + 2

    def sample(self, random: KeyedRandom) -> str:
        """Draws the symbols and their positions."""
        symbols = [LOWER[number] for number in random.permutation(self.n_letters)[: self.n_symbols]]
        positions = sorted(random.permutation(self.n_symbols + self.n_blanks)[: self.n_symbols].tolist())
        text = [FILLER] * (self.n_symbols + self.n_blanks)
        for position, symbol in zip(positions, symbols, strict=True):
            text[position] = symbol
        return BEGIN + "".join(text) + BEGIN + "".join(CUE + symbol for symbol in symbols)


class MqarConfig(SyntheticConfig):
    """Pairs of a key and a value, then keys as queries for their values.

    Text:     `aQcXbQ..c=Xa=Q`: keys are lower case and all different, values are upper case
    Answer:   the value that followed the key in the pairs
    Source:   Zoology: Measuring and Improving Recall in Efficient Language Models, arXiv:2312.04927
    Deviates: a cue follows each queried key; queries come in random order after a gap of fixed length, not at distances
              drawn from a power law
    Needs:    attention that matches a key with the token before each value: two layers of attention, or one layer after a
              mixer that sees the last token

    Args:
        n_pairs: pairs of a sample.
        n_queries: pairs that are queried, each once.
        n_keys: keys to draw from.
        n_values: values to draw from.
        gap: fillers between pairs and queries.

    Raises:
        ConfigError: more queries than pairs, or more pairs than keys.

    Example:
        >>> MqarConfig(n_pairs=3, n_queries=2, gap=2).sample(KeyedRandom(0))
        'lWdNuT..u=Tl=W'
    """

    bounds: ClassVar = {"n_queries": ("n_pairs", "ask for fewer"), "n_pairs": ("n_keys", "use fewer pairs")}

    kind: Literal["mqar"] = "mqar"
    n_pairs: int = Field(default=8, ge=1)
    n_queries: int = Field(default=4, ge=1)
    n_keys: int = Field(default=26, ge=1, le=26)
    n_values: int = Field(default=26, ge=1, le=26)
    gap: int = Field(default=0, ge=0)

    @property
    def sample_length(self) -> int:
        """Pairs, gap, and three tokens per query."""
        return 2 * self.n_pairs + self.gap + 3 * self.n_queries

    def sample(self, random: KeyedRandom) -> str:
        """Draws keys, values and queries."""
        keys = [LOWER[number] for number in random.permutation(self.n_keys)[: self.n_pairs]]
        values = [UPPER[number] for number in random.integers(self.n_values, self.n_pairs)]
        queries = random.permutation(self.n_pairs)[: self.n_queries]
        pairs = "".join(key + value for key, value in zip(keys, values, strict=True))
        return pairs + FILLER * self.gap + "".join(keys[index] + CUE + values[index] for index in queries)


class MultiHopConfig(SyntheticConfig):
    """The edges of one directed cycle, then questions for the k-th successor of a node.

    Text:     `bcabca2a=c1b=c`: each edge is two nodes; a question is the hops, the node and the cue
    Answer:   the node reached
    Source:   Physics of Language Models: Part 4.1, arXiv:2512.17351, task Depo
    Deviates: nodes are one token each, every count of hops up to the largest is equally likely, and there is no padding
    Needs:    as many lookups in sequence as hops, hence depth; k hops need about log2(k) lookups if lookups are composed

    Args:
        n_nodes: nodes of the cycle.
        n_names: letters to draw their names from.
        max_hops: most hops of a question.
        n_queries: questions of a sample.

    Raises:
        ConfigError: more nodes than names, or as many hops as nodes.

    Example:
        >>> MultiHopConfig(n_nodes=4, n_queries=2).sample(KeyedRandom(0))
        'nlunduld1l=d2n=d'
    """

    bounds: ClassVar = {"n_nodes": ("n_names", "use fewer nodes")}

    kind: Literal["multi_hop"] = "multi_hop"
    n_nodes: int = Field(default=6, ge=2)
    n_names: int = Field(default=26, ge=2, le=26)
    max_hops: int = Field(default=2, ge=1, le=9)
    n_queries: int = Field(default=3, ge=1)

    @model_validator(mode="after")
    def _ends_before_its_start(self) -> Self:
        if self.max_hops >= self.n_nodes:
            allowed = f"below n_nodes={self.n_nodes}, where the cycle closes"
            raise ConfigError(problem("max_hops", self.max_hops, allowed, "use more nodes or fewer hops"))
        return self

    @property
    def sample_length(self) -> int:
        """Two tokens per edge and four per question."""
        return 2 * self.n_nodes + 4 * self.n_queries

    def sample(self, random: KeyedRandom) -> str:
        """Draws the cycle, the order of its edges, and the questions."""
        n = self.n_nodes
        cycle = [LOWER[number] for number in random.permutation(self.n_names)[:n]]
        edges = "".join(cycle[index] + cycle[(index + 1) % n] for index in random.permutation(n))
        starts, hops = random.integers(n, self.n_queries).tolist(), random.integers(self.max_hops, self.n_queries).tolist()
        queries = ((start, hop + 1) for start, hop in zip(starts, hops, strict=True))
        return edges + "".join(DIGITS[k] + cycle[start] + CUE + cycle[(start + k) % n] for start, k in queries)


KEEP, TAKE = "-", "+"
"""The marks of an entry that keeps its key, and of one that takes its value."""


class EarlyFeatureConfig(SyntheticConfig):
    """Entries of a key, a mark and a value, then keys; the mark decides whether the key or the value is the answer.

    Text:     `a+bc-dr+fRfCcAb`: keys and values are lower case, a queried key is upper case and its own cue
    Answer:   the value where the mark is `+`, the key where it is `-`
    Source:   no published task
    Needs:    a lookup, then a choice between the embedding of the token and the output of the lookup; a single stream must
              hold both apart until the mark is found, a depth mixer that selects among earlier outputs need not

    Args:
        n_letters: letters to draw from.
        n_entries: entries of a sample, all with different keys.
        n_queries: entries that are queried, each once.

    Raises:
        ConfigError: more queries than entries, or more entries than letters.

    Example:
        >>> EarlyFeatureConfig(n_entries=3, n_queries=2).sample(KeyedRandom(0))
        'l-wd-nu+tLlUt'
    """

    bounds: ClassVar = {"n_queries": ("n_entries", "ask for fewer"), "n_entries": ("n_letters", "use fewer entries")}

    kind: Literal["early_feature"] = "early_feature"
    n_letters: int = Field(default=26, ge=2, le=26)
    n_entries: int = Field(default=6, ge=1)
    n_queries: int = Field(default=6, ge=1)

    @property
    def answer_cues(self) -> str:
        """The capitals."""
        return UPPER[: self.n_letters]

    @property
    def sample_length(self) -> int:
        """Three tokens per entry and two per query."""
        return 3 * self.n_entries + 2 * self.n_queries

    def sample(self, random: KeyedRandom) -> str:
        """Draws the entries and the queries."""
        keys = random.permutation(self.n_letters)[: self.n_entries].tolist()
        values, marks = (random.integers(limit, self.n_entries).tolist() for limit in (self.n_letters, 2))
        entries = list(zip(keys, marks, values, strict=True))
        queries = [entries[index] for index in random.permutation(self.n_entries)[: self.n_queries]]
        text = "".join(LOWER[key] + (KEEP, TAKE)[mark] + LOWER[value] for key, mark, value in entries)
        return text + "".join(UPPER[key] + LOWER[value if mark else key] for key, mark, value in queries)


class SwitchingNgramConfig(SyntheticConfig):
    """Runs of random letters, each with a final switch that selects which of the last letters is repeated.

    Equation: after switch m and the cue, the next token is the letter m + 1 positions before the switch
    Text:     `gbhc1=h`: a run, a switch from 0, the cue, and the answer; letters repeat
    Answer:   one of the last n_switches letters, each as often as the others
    Source:   no published task; adaptive local mixing, which arXiv:2603.16039 recommends ShortSWA for, in its smallest form
    Needs:    two local steps, the first of which may be fixed: move the switch to the cue, then read at the position that it
              selects. One attention does one of them; a convolution, a shift or a short window before it does the first

    Args:
        n_letters: letters to draw from.
        n_switches: switches, and the letters they select from.
        delay: fillers between the switch and the cue.
        run: letters before every switch.
        n_answers: runs of a sample.

    Raises:
        ConfigError: runs with fewer letters than switches.

    Example:
        >>> SwitchingNgramConfig(n_switches=5, run=5, delay=1, n_answers=2).sample(KeyedRandom(0))
        'hbafd0.=dghfhf4.=g'
    """

    kind: Literal["switching_ngram"] = "switching_ngram"
    n_letters: int = Field(default=8, ge=2, le=26)
    n_switches: int = Field(default=6, ge=1, le=10)
    delay: int = Field(default=0, ge=0)
    run: int = Field(default=8, ge=1)
    n_answers: int = Field(default=6, ge=1)

    @model_validator(mode="after")
    def _reaches(self) -> Self:
        if self.run < self.n_switches:
            allowed = f"at least n_switches={self.n_switches}, so that every switch has a letter"
            raise ConfigError(problem("run", self.run, allowed, "use longer runs or fewer switches"))
        return self

    @property
    def sample_length(self) -> int:
        """Runs with a switch, its delay, a cue and an answer each."""
        return self.n_answers * (self.run + self.delay + 3)

    def sample(self, random: KeyedRandom) -> str:
        """Draws runs and switches."""
        letters = random.integers(self.n_letters, self.n_answers * self.run).reshape(self.n_answers, self.run)
        switches = random.integers(self.n_switches, self.n_answers)
        parts = []
        for run, switch in zip(letters.tolist(), switches.tolist(), strict=True):
            text = "".join(LOWER[number] for number in run)
            parts.append(text + DIGITS[switch] + FILLER * self.delay + CUE + text[-1 - switch])
        return "".join(parts)
