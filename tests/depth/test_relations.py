"""Special cases equal the methods that contain them, and only with the parameters or options that the page names."""

import pytest

from relations import RELATIONS, Relation, relation_words


@pytest.mark.parametrize("relation", RELATIONS, ids=relation_words)
def test_the_special_case_is_the_general_method(relation: Relation) -> None:
    assert relation.difference() <= relation.up_to
    if relation.values:
        assert relation.difference(set_values=False) > 100 * relation.up_to
