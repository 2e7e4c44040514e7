"""Which models other engines can run, and the page that says so; needs no engine and no transformers."""

import sys
import tomllib
from types import ModuleType
from typing import Any

import pytest
import torch

from twoaxis import DEPTH, SEQUENCE, ConfigError, Decoder, DecoderConfig
from twoaxis.core.layout import TokenLayout
from twoaxis.interop import vllm
from twoaxis.interop.engines import COUNT, HEADS, HISTORY, KEYS, SINK, WINDOWS, check_engine, obstacles

from ...scripts import DOCS, ROOT, load_script

FEED_FORWARD: dict[str, Any] = {"kind": "swiglu", "input_local": "canon"}
SWA: dict[str, Any] = {"kind": "short_swa", "n_heads": 2, "n_kv_heads": 2, "window": 3}


def config(*blocks: list[Any], **changes: Any) -> DecoderConfig:
    return DecoderConfig.from_data({"vocab_size": 11, "d_model": 8, "n_layers": len(blocks), "blocks": list(blocks), **changes})


def attention(**options: Any) -> dict[str, Any]:
    return {"kind": "attention", "n_heads": 2, **options}


REFUSED = [
    (config([attention()], depth={"kind": "deep_delta", "value_channels": 2, "compressor": "time"}), HISTORY, "'deep_delta'"),
    (config([attention(), "gated_delta_net"]), HISTORY, "'gated_delta_net' in block 0"),
    (config(["short_conv", attention()]), HISTORY, "'short_conv' in block 0"),
    (config([{"kind": "kv_shift", "n_heads": 2}]), HISTORY, "'kv_shift' in block 0"),
    (config([attention(input_local="canon")]), HISTORY, "'attention' in block 0"),
    (config([attention(projected_local={"kind": "canon", "kernel": 2})]), HISTORY, "'attention' in block 0"),
    (config([attention(), FEED_FORWARD]), HISTORY, "'swiglu' in block 0"),
    (config([attention()], [attention()], depth="mixture_of_depths_attention"), KEYS, "in block 1"),
    (config([attention(update_local="canon")]), HISTORY, "'attention' in block 0"),
    (config([attention()], embedding_local="canon"), HISTORY, "embedding_local"),
    (config([attention(sink="learned")]), SINK, "'attention' in block 0"),
    (config([SWA, attention()]), COUNT, "2 attentions in block 0"),
    (config([attention()], ["swiglu"]), COUNT, "0 attentions in block 1"),
    (config([attention()], [attention(n_heads=4)]), HEADS, "4 heads and 4 kv-heads of 2 of 'attention' in block 1"),
    (config([attention()], [attention(n_kv_heads=1)]), HEADS, "2 heads and 1 kv-heads of 4"),
    (config([SWA], [attention()], [attention(window=5)]), WINDOWS, "window=5 of 'attention' in block 2, others window=3"),
]


@pytest.mark.parametrize(
    ("refused", "reason", "where"), REFUSED, ids=[f"{where} {reason[:20]}" for _, reason, where in REFUSED]
)
def test_refusal_says_what_and_why(refused: DecoderConfig, reason: str, where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_engine(refused)
    line = str(caught.value)
    assert where in line and reason in line and "\n" not in line
    assert [found.reason for found in obstacles(Decoder(refused))] == [reason]


def test_all_refusals_are_counted() -> None:
    with pytest.raises(ConfigError, match=r"\(and 3 more\)$"):
        check_engine(config(["short_conv"], ["gated_delta_net"]))


def test_full_attention_and_one_window_can_run() -> None:
    check_engine(config([SWA], [attention(), "swiglu"], ["swiglu", attention(window=3)]))


def test_attention_of_a_layout_takes_the_place_of_ours() -> None:
    decoder = Decoder.build(config([attention(), "swiglu"]))
    seen = []

    def attend(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen.append((module.config.kind, tuple(q.shape), tuple(k.shape), tuple(v.shape)))
        return torch.zeros(1, 5, 8)

    positions = torch.tensor([[0, 1, 2, 0, 1]])
    hidden, cache = decoder.hidden(torch.randn(1, 5, 8), TokenLayout(positions, attend=attend))
    assert seen == [("attention", (1, 2, 5, 4), (1, 2, 5, 4), (1, 2, 5, 4))] and hidden.shape == (1, 5, 8) and cache is None


def test_vllm_learns_the_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[Any] = []
    fake: Any = ModuleType("vllm")
    fake.ModelRegistry = type("ModelRegistry", (), {"register_model": staticmethod(lambda *names: registered.append(names))})
    monkeypatch.setitem(sys.modules, "vllm", fake)
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"]
    module, _, function = points["twoaxis"].partition(":")
    assert (module, function) == (vllm.__name__, "register")
    getattr(vllm, function)()
    backend = "vllm.model_executor.models.transformers:TransformersForCausalLM"
    assert registered == [("TwoAxisForCausalLM", backend)]


@pytest.fixture(scope="module")
def docs() -> ModuleType:
    return load_script(DOCS / "engines.py")


def test_page_is_up_to_date(docs: ModuleType) -> None:
    assert docs.PAGE.read_text(encoding="utf-8") == docs.page(), "run `make docs`"


def cells(docs: ModuleType) -> dict[tuple[str, str], str]:
    """What the page says, by the labels of row and column."""
    table = [line for line in docs.PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    columns = rows[0][1:]
    return {(row[0], column): cell for row in rows[1:] for column, cell in zip(columns, row[1:], strict=False)}


def test_every_tick_is_a_run_that_vllm_has_made(docs: ModuleType) -> None:
    said = cells(docs)
    for row in docs.rows():
        for column in docs.columns():
            found = [run["result"] for run in docs.ran(row, column)]
            ticked = said[row.label, column.label] == docs.TICK
            assert ticked == (bool(found) and set(found) == {"equal"}), (row.label, column.label, found)


def test_runs_are_of_variants_that_exist_and_can_run(docs: ModuleType) -> None:
    runs = docs.kept("vllm")["runs"]
    assert len({tuple(run[name] for name in ("depth", "variant", "sequence", "sequence_variant")) for run in runs}) > 40
    for run in runs:
        depth, sequence = (
            DEPTH[run["depth"]].example(run["variant"]),
            SEQUENCE[run["sequence"]].example(run["sequence_variant"]),
        )
        assert docs.answer(depth, sequence) == (), run
        assert run["result"] != "equal" or run["distinct_tokens"] > 10, "greedy tokens that repeat prove little"


def test_what_was_not_run_or_failed_has_no_tick(docs: ModuleType) -> None:
    failed, equal = {"result": "refused", "reason": "no"}, {"result": "equal"}
    assert [docs.written((), runs, ["no"]) for runs in ([], [failed], [equal, failed], [equal])] == ["not run", "a", "a", "✓"]


def test_torchtitan_is_said_to_equal_our_trainer_only_where_it_does(docs: ModuleType) -> None:
    kept = docs.kept("torchtitan")
    for run in kept["runs"]:
        names = ("loss_difference", "norm_difference", "weight_difference")
        near = "losses" in run and len(run["losses"]) == kept["steps"] and all(run[n] <= kept[f"allowed_{n}"] for n in names)
        assert (run["result"] == "equal") == near == docs.titan_row(run).endswith("✓ |"), run


REFUSING = [
    ("attention", "sink"),
    ("attention", "canon"),
    *((kind, None) for kind in ("short_conv", "kv_shift", "path_attention", "gated_delta_net")),
]


@pytest.mark.parametrize(("kind", "variant"), REFUSING, ids=[kind + (f"-{name}" if name else "") for kind, name in REFUSING])
def test_every_pair_without_a_tick_is_refused(kind: str, variant: str | None, docs: ModuleType) -> None:
    row = SEQUENCE[kind]
    sequence = row.example(variant or next(iter(row.examples)))
    for depth in DEPTH:
        example = depth.example(next(iter(depth.examples)))
        reasons = docs.answer(example, sequence)
        assert reasons
        if reasons != (docs.UNBUILT,):
            with pytest.raises(ConfigError, match="cannot run in another engine, since"):
                check_engine(docs.pair(example, sequence))
