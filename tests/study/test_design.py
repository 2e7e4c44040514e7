"""A study is checked before anything runs, and every error says what to change in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twoaxis.core.errors import ConfigError, StudyError, TwoAxisError
from twoaxis.study import StudyConfig, read_study
from twoaxis.study.design import overlay
from twoaxis.study.planning import plan_study
from twoaxis.study.report.text_tables import plan_rows

ROOT = Path(__file__).parents[2]


def _set(path: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    def change(data: dict[str, Any]) -> None:
        *parents, last = path.split("/")
        for part in parents:
            data = data[part]
        data[last] = value

    return change


MISTAKES = {
    "control misspelt": (_set("control", "plane"), r"control='plane'.*did you mean 'plain'"),
    "no arms": (_set("arms", {}), r"control='plain'.*add it to \[arms\]"),
    "one arm": (_set("arms", {"plain": {}}), "at least one more"),
    "equal arms": (_set("arms/again", {}), "'plain' and 'again'.*same recipe"),
    "arm named like a path": (_set("arms", {"plain": {}, "../x": {}}), "names a folder"),
    "arms differ in case only": (_set("arms/Plain", {"model": {"n_layers": 2}}), "case is ignored"),
    "one replicate": (_set("replicates", 1), r"at least 2 different ones"),
    "no replicate": (_set("replicates", []), r"at least 2 different ones"),
    "repeated seed": (_set("replicates", [3, 3]), r"at least 2 different ones"),
    "negative seed": (_set("replicates", [-1, 0]), r"at least 2 different ones"),
    "unknown key": (_set("questions", "?"), "unknown key 'questions'.*did you mean 'question'"),
    "unknown key of the budget": (_set("budget/step", 5), "unknown key 'step'.*did you mean 'steps'"),
    "two budgets": (_set("budget", {"steps": 1, "tokens": 1}), "exactly one"),
    "no budget": (_set("budget", {}), "exactly one"),
    "no effect size": (_set("decision", {}), "smallest_effect is missing"),
    "effect of zero": (_set("decision/smallest_effect", 0), "smallest_effect"),
    "alpha of one": (_set("decision/alpha", 1.0), "alpha"),
    "unknown key in an arm": (_set("arms/delta", {"modal": {}}), "arm 'delta'.*unknown key 'modal'.*did you mean 'model'"),
    "unknown mixer in an arm": (_set("arms/delta", ["model.depth=deep_dleta"]), "arm 'delta'.*did you mean 'deep_delta'"),
    "an override without value": (_set("arms/delta", ["model.depth"]), "arm 'delta'.*key=value"),
    "steps in an arm": (_set("arms/delta", ["steps=5"]), "arm 'delta': steps=5.*budget"),
    "seed in an arm": (_set("arms/delta", ["seed=5"]), "arm 'delta': seed=5.*replicates"),
    "batch of its own": (_set("arms/delta", ["batch_size=2"]), "arm 'delta': batch_size=2.*equal the control's 4"),
    "tokens of its own": (_set("arms/delta", ["data.seq_len=8"]), "arm 'delta': data.seq_len=8.*equal the control's 16"),
    "contrast with an unknown arm": (
        _set("contrasts", [{"arm": "delta", "against": "locally"}]),
        r"contrasts: against='locally'.*did you mean 'local'",
    ),
    "contrast with the control": (_set("contrasts", [{"arm": "delta", "against": "plain"}]), "other than the control"),
    "contrast of an arm with itself": (_set("contrasts", [{"arm": "delta", "against": "delta"}]), "two different arms"),
    "the same contrast twice": (
        _set("contrasts", [{"arm": "delta", "against": "local"}, {"arm": "local", "against": "delta"}]),
        "each pair once",
    ),
    "base file missing": (_set("base", "nowhere.toml"), "nowhere.toml.*check the path"),
    "base without a model": (_set("base", {}), "model is missing"),
}


@pytest.mark.parametrize(("change", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_one_line(study_data: dict[str, Any], change: Callable[..., None], message: str) -> None:
    change(study_data)
    with pytest.raises((ConfigError, StudyError), match=message) as caught:
        StudyConfig.from_data(study_data)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["question", "control", "arms", "base", "replicates", "budget", "decision"])
def test_missing_keys(study_data: dict[str, Any], key: str) -> None:
    del study_data[key]
    with pytest.raises(ConfigError, match=f"{key} is missing"):
        StudyConfig.from_data(study_data)


def test_survives_a_round_trip(study: StudyConfig) -> None:
    assert StudyConfig.from_data(study.to_data()) == study


def test_recipe_of_a_run(study: StudyConfig) -> None:
    recipe = study.recipe("local", seed=2)
    assert (recipe.steps, recipe.seed, recipe.batch_size) == (6, 2, 4)
    assert [sublayer["kind"] for sublayer in recipe.model["blocks"][0]] == ["short_swa", "attention", "swiglu"]


def test_budget_in_tokens_is_rounded_up_to_steps(study_data: dict[str, Any]) -> None:
    study = StudyConfig.from_data(study_data | {"budget": {"tokens": 4 * 16 * 5 + 1}})
    assert study.recipe("plain", 0).steps == 6
    assert plan_study(study).control.tokens == 6 * 64


def test_a_changed_kind_drops_the_keys_of_the_old_one() -> None:
    base = {"depth": {"kind": "deep_delta", "beta_init": 0.5}}
    assert overlay(base, {"depth": {"kind": "residual"}}) == {"depth": {"kind": "residual"}}
    assert overlay(base, {"depth": "residual"}) == {"depth": "residual"}
    assert overlay({"depth": "deep_delta"}, {"depth": {"beta_init": 0.5}}) == base
    assert base == {"depth": {"kind": "deep_delta", "beta_init": 0.5}}


def test_overrides_reach_everything(tmp_path: Path, study_data: dict[str, Any]) -> None:
    (tmp_path / "base.json").write_text(json.dumps(study_data["base"]))
    (tmp_path / "study.json").write_text(json.dumps(study_data | {"base": "base.json"}))
    study = read_study(tmp_path / "study.json", ["replicates=4", "budget.steps=9", "base.batch_size=2"])
    assert (study.replicates, study.recipe("plain", 0).steps, study.recipe("plain", 0).batch_size) == ((0, 1, 2, 3), 9, 2)


def test_base_path_is_relative_to_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "base.toml").write_text("[model]\nd_model = 16\nn_layers = 1\n")
    (tmp_path / "study.toml").write_text(
        'question = "?"\ncontrol = "a"\nbase = "base.toml"\nreplicates = 2\n[budget]\nsteps = 1\n'
        '[decision]\nsmallest_effect = 0.1\n[arms.a]\n[arms.b]\nmodel.depth = "deep_delta"\n'
    )
    monkeypatch.chdir(Path(tmp_path.root))
    assert read_study(tmp_path / "study.toml").base["model"] == {"d_model": 16, "n_layers": 1}


@pytest.mark.parametrize(("text", "message"), [("= 1", "is not toml"), ("[arms.a]\n[arms.a]", "is not toml")])
def test_unreadable_files(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "study.toml").write_text(text)
    with pytest.raises(StudyError, match=message):
        read_study(tmp_path / "study.toml")
    with pytest.raises(StudyError, match="check the path"):
        read_study(tmp_path / "none.toml")


def test_plan(study: StudyConfig) -> None:
    plan = plan_study(study)
    assert (plan.runs, plan.control.steps, plan.control.tokens, plan.tokens) == (9, 6, 384, 9 * 384)
    assert [row[0] for row in plan_rows(plan)] == ["plain", "delta", "local"]
    assert plan.arms[1].parameters - plan.arms[0].parameters == 2 * (2 * 16 + 1)
    assert all(arm.training_flops_per_token > 0 for arm in plan.arms)


DESIGNS = sorted(path for path in (ROOT / "studies").rglob("*.toml") if path.name != "designs.toml")


SIZES = {
    "depth_retrieval.toml": {"wider": 203},
    "first.toml": {"short_conv": 173, "short_swa": 106},
    "fork.toml": {"short_swa": 106, "both": 102, "wider": 138},
    "second_size.toml": {"short_swa": 170, "both": 166, "wider": 211},
    "shortcut.toml": {"short_swa": 106},
    "gpu/fork.toml": {"short_swa": 709, "both": 704},
    "gpu/shortcut.toml": {"short_swa": 709},
    "local.toml": {
        **{"short_swa_8": 106, "short_swa_16": 101, "short_conv": 173, "canon": 161, "dynamic_conv": 104, "kv_shift": 175},
        **{"ngram_table": 167, "ngram_table_params": 103},
    },
}
"""The sizes that a scan of all candidates finds, by study and arm."""


@pytest.mark.parametrize("path", DESIGNS, ids=lambda path: path.stem)
def test_shipped_studies_can_be_planned(path: Path) -> None:
    try:
        plan = plan_study(read_study(path))
    except TwoAxisError as error:
        pytest.fail(str(error))
    assert plan.runs >= 4
    name = path.relative_to(ROOT / "studies").as_posix()
    if not name.startswith("superseded/"):
        arms = plan.of_role("control", "treatment", "companion")
        sizes = {arm.name: one.after for arm in arms for one in arm.changes if one.path != "steps"}
        assert sizes == SIZES.get(name, {})
