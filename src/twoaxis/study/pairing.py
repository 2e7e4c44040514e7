"""Whether runs that are compared really are pairs: same data in the same order, same initial values where shared."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from twoaxis.core.parameters import Init, declarations
from twoaxis.model import Decoder, DecoderConfig
from twoaxis.study.folder import Place, RunRecord
from twoaxis.study.plan import StudyPlan
from twoaxis.train.recipe import TrainConfig
from twoaxis.train.run_folder import first_difference

ORDER_OF_DATA = ("seed", "batch_size", "data")
"""Keys of a recipe that, with the tokens themselves, fix the order in which they are read."""


@dataclass(frozen=True)
class Pair:
    """The verification of one run against the control of the same seed.

    Attributes:
        place: the run.
        shared: parameters that both have, with the same name, shape and declared initial value.
        equal: how many of them started at the same values.
        problems: what breaks the pairing, one sentence each; none in a pair.
    """

    place: Place
    shared: int
    equal: int
    problems: tuple[str, ...]


def verify_pairs(plan: StudyPlan, records: Mapping[Place, RunRecord]) -> list[Pair]:
    """Verifies every finished run against the finished control of its seed, from what both recorded; trials are no pairs."""
    found = []
    for arm in plan.of_role("treatment", "companion", "rung"):
        for seed in arm.seeds:
            run, control = records[Place(arm.name, seed)], records[Place(plan.control.name, seed)]
            if run.status == control.status == "finished":
                found.append(_verify(run, control))
    return found


def _verify(run: RunRecord, control: RunRecord) -> Pair:
    problems = []
    if not all((record.data and record.parameters and record.recipe) for record in (run, control)):
        problems.append("the run or its control recorded no recipe, no data or no initial values")
        return Pair(run.place, 0, 0, tuple(problems))
    if difference := first_difference(control.data, run.data):
        problems.append(f"other tokens than the control's: {difference[0]} differs")
    for key in ORDER_OF_DATA:
        if difference := first_difference(control.recipe.get(key), run.recipe.get(key), key):
            problems.append(f"another order of the data than the control's: {difference[0]} differs")
    starts = [_initial_values(record) for record in (run, control)]
    shared = [name for name, start in starts[0].items() if starts[1].get(name) == start]
    different = [name for name in shared if name not in run.parameters or run.parameters[name] != control.parameters.get(name)]
    if different:
        problems.append(
            f"{len(different)} of {len(shared)} shared parameters start at other values than the control's, "
            f"{different[0]} for example"
        )
    return Pair(run.place, len(shared), len(shared) - len(different), tuple(problems))


def initial_values(config: DecoderConfig) -> dict[str, tuple[tuple[int, ...], Init]]:
    """Shape and declared initial value of every parameter by name; no memory is used for the values."""
    with torch.device("meta"):
        model = Decoder(config)
    return {name: (tuple(parameter.shape), declaration.init) for name, parameter, declaration in declarations(model)}


def _initial_values(record: RunRecord) -> dict[str, tuple[tuple[int, ...], Init]]:
    recipe = TrainConfig.from_record(record.recipe)
    return initial_values(recipe.decoder(record.data["tokenizer"]["vocab_size"]))
