"""Every field of every configuration that a user writes, with everything it is not: one line, exit status 2, and no run.

From the recipe and the design of a study the walk goes down through every row of every table. What a field is is read off its
annotation, so a new field or row needs nothing here.
"""

import copy
import importlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, cast, get_args, get_origin

import annotated_types
import pytest
from pydantic.fields import FieldInfo

from twoaxis.cli import main
from twoaxis.cli.study import study
from twoaxis.cli.train import train
from twoaxis.core.config import Config
from twoaxis.core.registry import Table
from twoaxis.data import CORPORA, TOKENIZERS, CorpusConfig, TokenizerConfig
from twoaxis.depth import DEPTH, DepthConfig
from twoaxis.feed_forward import FEED_FORWARD, FeedForwardConfig
from twoaxis.local import LOCAL, LocalConfig
from twoaxis.model import DecoderConfig
from twoaxis.ops.rope import ROPE_SCALING, RopeScaling
from twoaxis.sequence import SEQUENCE, SequenceConfig
from twoaxis.study import StudyConfig
from twoaxis.train import TrainConfig
from twoaxis.train.schedule import SCHEDULES, ScheduleConfig

TABLES: dict[type, Table[Any]] = {
    DepthConfig: DEPTH,
    SequenceConfig: SEQUENCE,
    FeedForwardConfig: FEED_FORWARD,
    LocalConfig: LOCAL,
    RopeScaling: ROPE_SCALING,
    ScheduleConfig: SCHEDULES,
    CorpusConfig: CORPORA,
    TokenizerConfig: TOKENIZERS,
}
INF, NAN = math.inf, math.nan
VALUES: tuple[Any, ...] = (
    None,
    True,
    3,
    "3",
    "no such",
    2.5,
    NAN,
    INF,
    -INF,
    10**30,
    [],
    [True],
    [NAN],
    ["x"],
    {},
    {"no such": 1},
)

RECIPE = {
    "model": {"d_model": 32, "n_layers": 2, "max_seq_len": 4096, "blocks": [[{"kind": "attention"}, {"kind": "swiglu"}]]},
    "data": {"corpus": {"kind": "text", "path": "none.txt"}, "tokenizer": "byte", "seq_len": 8},
    "optimizer": {"groups": [{"pattern": "*.x", "lr_scale": 1.0}]},
    "anneal": [{"pattern": "*.x", "steps": 2}],
    "schedule": "cosine",
    "steps": 3,
}
STUDY = {
    "question": "Which?",
    "control": "plain",
    "arms": {"plain": {}, "delta": {"model": {"depth": "deep_delta"}}, "more": {"optimizer": {"lr": 0.1}}},
    "base": RECIPE,
    "replicates": [0, 1],
    "budget": {"steps": 3},
    "match": {"on": "flops"},
    "contrasts": [{"arm": "delta", "against": "more"}],
    "tuning": {"lr": [0.1, 0.2], "arms": {"delta": [0.1, 0.3]}},
    "decision": {"smallest_effect": 0.1},
}
SHORT_FORMS: dict[str, tuple[type, ...]] = {
    "replicates": (int,),
    "controls": (bool,),
    "controls_match": (),
    "match": (str,),
    "by": (str,),
    "arms": (dict,),
    "vocab_size": (NoneType,),
}
"""Fields that are also given in another form, by which they are left alone here."""


class Case(NamedTuple):
    """A wrong value at its place."""

    path: tuple[str | int, ...]
    value: Any


def unwrapped(annotation: Any, metadata: tuple[Any, ...] = ()) -> tuple[Any, list[Any]]:
    """An annotation without `Annotated`, and its constraints."""
    found = list(metadata)
    while get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        found += [inner for one in more for inner in (one.metadata if isinstance(one, FieldInfo) else [one])]
    return annotation, found


def fits(annotation: Any, value: Any, metadata: tuple[Any, ...] = ()) -> bool:
    """Whether a value is of this type, as a reader of the documentation would say; tables are looked into elsewhere."""
    kind, constraints = unwrapped(annotation, metadata)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(fits(one, value, tuple(constraints)) for one in arguments)
    if kind is Any:
        return True
    if kind in (int, float):
        number = type(value) in (int, float) and (math.isfinite(value) or any("allow_inf" in repr(one) for one in constraints))
        whole = type(value) is int or (type(value) is float and value.is_integer())
        return number and (kind is float or (whole and abs(value) < 2**63))
    if kind in (bool, str, NoneType):
        return type(value) is kind
    if kind is Path:
        return type(value) is str
    if origin is Literal:
        return any(type(one) is type(value) and one == value for one in arguments)
    if origin is tuple or origin is list:
        if not isinstance(value, list):
            return False
        each = arguments[:1] * len(value) if arguments[-1] is ... or origin is list else arguments
        return len(each) == len(value) and all(fits(one, item) for one, item in zip(each, value, strict=True))
    if origin is dict:
        return isinstance(value, dict) and all(fits(arguments[1], item) for item in value.values())
    if isinstance(kind, type) and issubclass(kind, Config):
        return isinstance(value, dict) and "no such" not in value and kind not in TABLES
    raise AssertionError(f"unknown annotation {kind}")


def beyond_bounds(annotation: Any, metadata: tuple[Any, ...] = ()) -> Iterator[Any]:
    """Numbers just outside the bounds of a field, and texts and lists that are too short."""
    kind, constraints = unwrapped(annotation, metadata)
    for one in get_args(kind) if get_origin(kind) in (Union, UnionType) else ():
        yield from beyond_bounds(one)
    for one in constraints:
        if isinstance(one, annotated_types.Ge):
            yield cast(Any, one.ge) - 1
        elif isinstance(one, annotated_types.Gt):
            yield one.gt
        elif isinstance(one, annotated_types.Le):
            yield cast(Any, one.le) + 1
        elif isinstance(one, annotated_types.Lt):
            yield one.lt
        elif isinstance(one, annotated_types.MinLen) and kind is str:
            yield ""


def wrong(annotation: Any, metadata: tuple[Any, ...], path: tuple[str | int, ...]) -> Iterator[Case]:
    """The wrong values of one place."""
    skipped = SHORT_FORMS.get(str(path[-1]), ())
    for value in (*VALUES, *beyond_bounds(annotation, metadata)):
        if not fits(annotation, value, metadata) and type(value) not in skipped:
            yield Case(path, value)
    outside = [value for value in beyond_bounds(annotation, metadata) if fits(annotation, value, metadata)]
    yield from (Case(path, value) for value in outside)


def nested(annotation: Any) -> Iterator[type[Config]]:
    """The configurations that an annotation names."""
    kind, _ = unwrapped(annotation)
    if isinstance(kind, type) and issubclass(kind, Config):
        yield kind
    for one in get_args(kind):
        yield from nested(one)


def walk(config: type[Config], data: Any, path: tuple[str | int, ...]) -> Iterator[tuple[Any, Case]]:
    """Every wrong value under a configuration, with the data that it is put into, relative to `path`.

    Args:
        config: at this place.
        data: of the place, to go down into what it shows.
        path: of the place.
    """
    for name, info in config.model_fields.items():
        here = (*path, name)
        if name != "kind":
            yield from ((data, case) for case in wrong(info.annotation, tuple(info.metadata), here))
        below = data.get(name) if isinstance(data, dict) else None
        for one in set(nested(info.annotation)) - TABLES.keys():
            listed = isinstance(below, list)
            for number, item in enumerate(below if listed else [below] if below is not None else []):
                yield from walk(one, item, (*here, number) if listed else here)


def put(data: Any, path: tuple[str | int, ...], value: Any) -> Any:
    """A copy of the data with a value in its place."""
    copied = copy.deepcopy(data)
    place = copied
    for key in path[:-1]:
        if isinstance(place, dict) and not isinstance(place.get(str(key)), dict | list):
            place[str(key)] = {"kind": place[str(key)]} if isinstance(place.get(str(key)), str) else {}
        place = place[key]  # type: ignore[index]
    place[path[-1]] = value  # type: ignore[index]
    return copied


def rows() -> Iterator[tuple[str, dict[str, Any], type[Config], tuple[str | int, ...]]]:
    """Every row of every table: its name, a recipe with its first example, its configuration, and where it stands."""
    seat: dict[type, tuple[str | int, ...]] = {
        DepthConfig: ("model", "depth"),
        SequenceConfig: ("model", "blocks", 0, 0),
        FeedForwardConfig: ("model", "blocks", 0, 1),
        LocalConfig: ("model", "blocks", 0, 0, "input_local"),
        RopeScaling: ("model", "blocks", 0, 0, "rope_scaling"),
        ScheduleConfig: ("schedule",),
        CorpusConfig: ("data", "corpus"),
        TokenizerConfig: ("data", "tokenizer"),
    }
    for base, table in TABLES.items():
        for row in table:
            first = next(iter(row.examples))
            data = {"kind": row.kind, **row.examples[first]}
            recipe = put(RECIPE, seat[base], data)
            recipe["data"]["seq_len"] = getattr(row.example(first), "sample_length", 8)
            yield f"{table.what} {row.kind}", recipe, row.config, seat[base]


def parsed(words: list[str], **_: Any) -> int:
    """What the words of `complaint` come to once they are parsed; `main` turns what is raised into a line and a status."""
    return train(Path(words[1])) if words[0] == "train" else study(Path(words[1]), dry_run=True)


@pytest.fixture
def began(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[object]:
    """What came as far as a run or a plan, which then does not begin."""
    found: list[object] = []

    def begin(config: object, *_: object, **__: object) -> Any:
        found.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr("twoaxis.train.train", begin)
    monkeypatch.setattr("twoaxis.study.planning.plan_study", begin)
    # Else every call would build all verbs anew and parse the same few words, which takes most of its time.
    monkeypatch.setattr(importlib.import_module("twoaxis.cli.app"), "app", parsed)
    monkeypatch.chdir(tmp_path)
    return found


def complaint(verb: str, data: Any, began: list[object], capsys: pytest.CaptureFixture[str]) -> str:
    """What the command line says of data; "" where a run or a plan would begin."""
    # To make a file anew takes as long as to read it and find the fault.
    with open("given.json", "r+" if Path("given.json").exists() else "w") as file:
        file.write(json.dumps(data))
        file.truncate()
    began.clear()
    status = main(["train", "given.json"] if verb == "train" else ["study", "given.json", "--dry-run"])
    captured = capsys.readouterr()
    if began:
        return ""
    assert (status, captured.out) == (2, "") and captured.err.count("\n") == 1 and captured.err.startswith("twoaxis: ")
    return captured.err


def swept(verb: str, cases: Iterator[tuple[Any, Case]], data: Any, began: list[object], capsys: Any) -> int:
    """Feeds every case, and returns how many there were."""
    count, accepted = 0, []
    for _, case in cases:
        said = complaint(verb, put(data, case.path, case.value), began, capsys)
        count += 1
        if not said:
            accepted.append(case)
        elif not any(str(key) in said for key in case.path):
            accepted.append((case, said))
    assert not accepted, f"{len(accepted)} of {count}: {accepted[:20]}"
    return count


def test_every_field_of_a_recipe(began: list[object], capsys: pytest.CaptureFixture[str]) -> None:
    assert complaint("train", RECIPE, began, capsys) == ""
    count = swept("train", walk(TrainConfig, RECIPE, ()), RECIPE, began, capsys)
    count += swept("train", walk(DecoderConfig, RECIPE["model"], ("model",)), RECIPE, began, capsys)
    for name, data, config, path in rows():
        assert complaint("train", data, began, capsys) == "", name
        inner: Any = data
        for key in path:
            inner = inner[key]
        count += swept("train", walk(config, inner, path), data, began, capsys)
    print(f"{count} wrong values")
    assert count > 2000


def test_every_field_of_a_study(began: list[object], capsys: pytest.CaptureFixture[str]) -> None:
    assert complaint("study", STUDY, began, capsys) == ""
    assert swept("study", walk(StudyConfig, STUDY, ()), STUDY, began, capsys) > 200


@pytest.mark.parametrize("clip_norm", [None, INF])
def test_an_infinite_norm_does_not_clip(clip_norm: float | None) -> None:
    """It once ended a run with a trace, when its recipe was written down."""
    config = TrainConfig.from_data({**RECIPE, "optimizer": {"clip_norm": clip_norm}})
    assert config.optimizer.clip_norm is None and json.dumps(config.to_data(), allow_nan=False)


def test_a_whole_number_may_be_written_with_a_point() -> None:
    config = TrainConfig.from_data({**RECIPE, "steps": 1e3})
    assert (config.steps, type(config.steps)) == (1000, int)
