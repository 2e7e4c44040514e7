from twoaxis import CheckpointError, ConfigError, DataError, StudyError, TwoAxisError
from twoaxis.core.errors import nearest, problem


def test_every_error_is_ours_and_wrong_values_are_value_errors() -> None:
    assert all(issubclass(error, TwoAxisError) for error in (CheckpointError, ConfigError, DataError, StudyError))
    assert all(issubclass(error, ValueError) for error in (ConfigError, DataError, StudyError))


def test_words() -> None:
    assert problem("a", "b", "c", "d") == "a='b': must be c; d"
    assert nearest("attentoin", ["attention", "gelu"]) == "did you mean 'attention'?"
    assert nearest("x", ["gelu", "attention"]) == "choose one of attention, gelu"
