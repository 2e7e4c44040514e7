"""Parts of pages: whatever a name or a sentence holds is text, and a part without content is none."""

import pytest

from twoaxis.display.html import Number, Reason, alternatives, breakable, bullets, code, details, paragraph, section, table

EVIL = "</script><b title=\"x\" class='y'>&amp;"
SAFE = {"<b", "</script", 'title="x"'}


@pytest.mark.parametrize(
    "part",
    [
        table(
            EVIL,
            (EVIL, EVIL),
            [(EVIL, Number(EVIL, 1.5)), (EVIL, Reason(EVIL)), (EVIL, EVIL), (EVIL, None)],
            groups=[(EVIL, 2)],
        ),
        section("name", EVIL, paragraph(EVIL, "note")),
        details(EVIL, bullets([EVIL]), code(EVIL), name="name"),
        alternatives(EVIL, [(EVIL, paragraph(EVIL))]),
        section("name", "title", EVIL),
        breakable(EVIL),
    ],
    ids=["table", "section", "details", "alternatives", "a part that is text", "name"],
)
def test_every_text_is_escaped(part: str) -> None:
    assert "&lt;" in part and not [markup for markup in SAFE if markup in part]


@pytest.mark.parametrize("part", [section("name", "title", ""), details("more", ""), paragraph(""), bullets([])])
def test_a_part_without_content_is_none(part: str) -> None:
    assert not part.strip()


def test_cells_sort_by_value_and_say_what_is_missing() -> None:
    text = table("caption", ("arm", "loss", "why"), [("a_long_name~b", Number("1.50", 1.5), None)], text=("why",))
    assert '<th scope="row" class="text">a<wbr>_long<wbr>_name<wbr>~b</th><td>1.50</td>' in text
    assert '<td data-value="1500">1.50 k</td>' in table("caption", ("arm", "loss"), [("a", Number("1.50 k", 1500.0))])
    assert '<td class="text"><span class="missing">—</span></td>' in text
