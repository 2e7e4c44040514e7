"""The sections of a mixer's docstring, for everything that tables or prints them."""

import inspect
import re

_SECTION = re.compile(r"^([A-Z][a-z]+):\s*")


def sections(documented: type) -> dict[str, str]:
    """Returns each `Name: text` section of a class docstring in one line, and its first sentence as `Summary`.

    Example:
        >>> class Halving:
        ...     '''Halves what it reads.
        ...
        ...     Equation: y = x / 2
        ...     Cost:     flops D
        ...               per token
        ...     '''
        >>> sections(Halving)
        {'Summary': 'Halves what it reads.', 'Equation': 'y = x / 2', 'Cost': 'flops D per token'}
    """
    found: dict[str, list[str]] = {"Summary": []}
    current = "Summary"
    for line in inspect.cleandoc(documented.__doc__ or "").splitlines():
        if heading := _SECTION.match(line):
            current = heading[1]
            found[current] = [line[heading.end() :]]
        elif line.strip():
            found[current].append(line.strip())
    return {name: " ".join(" ".join(lines).split()) for name, lines in found.items()}
