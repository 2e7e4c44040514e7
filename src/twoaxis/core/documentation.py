"""The sections of a mixer's docstring, for tables and printing."""

import inspect
import re

_SECTION = re.compile(r"^([A-Z][a-z]+):\s*")


def sections(documented: type) -> dict[str, str]:
    r"""Returns each `Name: text` section of a class docstring, line by line, and the text before them as `Summary`.

    Example:
        >>> class Halving:
        ...     '''Halves what it reads.
        ...
        ...     Equation: y = x / 2
        ...     Cost:     flops D
        ...               per token
        ...     '''
        >>> sections(Halving)
        {'Summary': 'Halves what it reads.', 'Equation': 'y = x / 2', 'Cost': 'flops D\nper token'}
    """
    found: dict[str, list[str]] = {"Summary": []}
    current = "Summary"
    for line in inspect.cleandoc(documented.__doc__ or "").splitlines():
        if heading := _SECTION.match(line):
            current = heading[1]
            found[current] = [line[heading.end() :]]
        elif line.strip():
            found[current].append(line.strip())
    return {name: "\n".join(line for line in lines if line) for name, lines in found.items()}


def source(documented: type) -> str:
    """The first clause of the `Source` section of a mixer, in one line.

    Example:
        >>> class Halving:
        ...     '''Halves what it reads.
        ...
        ...     Source: Zeno, Paradoxes; checked with a ruler
        ...     '''
        >>> source(Halving)
        'Zeno, Paradoxes'
    """
    return " ".join(sections(documented).get("Source", "").split()).partition(";")[0]
