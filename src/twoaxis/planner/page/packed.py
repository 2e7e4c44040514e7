"""Coefficients of many models without what they share, and back; the page runs this module as it stands.

`tables` hold the `shared` numbers, the different `rows` (sublayers without their depth operations) and `depths` (depth
operations) once each, and `packs`. A pack holds `ends`, `leaves`, `n_layers`, and for every sublayer [block, row, depth,
family]. A sublayer whose window a reader sets belongs to one of the `families`: its rows at each of the `windows`; the family
of others is -1.
"""

from typing import Any

Data = dict[str, Any]


def unpacked(tables: Data, pack: Data, window: int) -> Data:
    """The coefficients of one model, as `planner.coefficients` gives them, with this window.

    Args:
        tables: what all models are made of.
        pack: the model.
        window: of the sublayers whose window can be set, one of the `windows`.
    """
    model = copied(tables["shared"])
    model["n_layers"] = pack["n_layers"]
    model["ends"] = pack["ends"]
    model["leaves"] = pack["leaves"]
    model["sublayers"] = []
    for entry in pack["sublayers"]:
        row = entry[1]
        if entry[3] >= 0:
            row = tables["families"][entry[3]][place_of(tables["windows"], window)]
        sublayer = copied(tables["rows"][row])
        sublayer["block"] = entry[0]
        sublayer["depth"] = tables["depths"][entry[2]]
        model["sublayers"].append(sublayer)
    return model


def copied(table: Data) -> Data:
    """A table with the same entries."""
    found = {}
    for name in table:
        found[name] = table[name]
    return found


def place_of(values: list, value: float) -> int:
    """Where a value stands in a list; -1 where it does not.

    Example:
        >>> place_of([4, 8, 16], 8), place_of([4, 8, 16], 9)
        (1, -1)
    """
    for index in range(len(values)):
        if values[index] == value:
            return index
    return -1
