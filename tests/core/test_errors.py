import pytest

from twoaxis import CheckpointError, ConfigError, DataError, StudyError, TwoAxisError
from twoaxis.core.errors import nearest, problem


def test_every_error_is_ours_and_wrong_values_are_value_errors() -> None:
    assert all(issubclass(error, TwoAxisError) for error in (CheckpointError, ConfigError, DataError, StudyError))
    assert all(issubclass(error, ValueError) for error in (ConfigError, DataError, StudyError))


def test_words() -> None:
    assert problem("a", "b", "c", "d") == "a='b': must be c; d"
    assert nearest("attentoin", ["attention", "gelu"]) == "did you mean 'attention'?"
    assert nearest("x", ["gelu", "attention"]) == "choose one of attention, gelu"


@pytest.mark.parametrize(
    ("name", "known", "found"),
    [
        ("residul", ["residual", "residual_scalars"], "residual"),
        ("mch", ["mhc", "mudd"], "mhc"),
        ("plane", ["plain"], "plain"),
        ("betainit", ["beta_init"], "beta_init"),
        ("gb", ["GB", "MB"], "GB"),
        ("short", ["shortcut", "both"], "shortcut"),
        ("blocks", ["off", "block"], "block"),
        ("1b1f", ["1f1b", "gpipe"], "1f1b"),
    ],
)
def test_a_slip_is_answered_with_the_name_that_was_meant(name: str, known: list[str], found: str) -> None:
    assert nearest(name, known) == f"did you mean {found!r}?"


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("n_heads", ["n_layers", "depth"]),
        ("fp8", ["fp16", "fp32"]),
        ("gemma", ["llama"]),
        ("mixture", ["mixtral"]),
        ("", ["a"]),
    ],
)
def test_something_else_that_looks_alike_is_no_remedy(name: str, known: list[str]) -> None:
    """Catches suggestions by likeness alone, which send the reader to another thing."""
    assert nearest(name, known) == f"choose one of {', '.join(sorted(known))}"
