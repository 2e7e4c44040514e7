"""The page of a report in a real browser, without a screen: what it loads, draws, says and lets a reader do."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from twoaxis.display import numbers as words

from ..browsing import Seen, launched_browser, looking, skip_without_browser
from .report_example import example, example_figures

skip_without_browser()


@pytest.fixture(scope="module")
def report(drawn_page: Path) -> Path:
    return drawn_page


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched_browser() as launched:
        yield launched


@pytest.fixture
def see(browser: Any, report: Path) -> Iterator[Any]:
    with looking(Seen, browser, report) as look:
        yield look


def test_the_page_asks_for_nothing_and_has_no_complaint(see: Any, report: Path) -> None:
    seen = see()
    seen.page.mouse.move(640, 600)
    seen.page.wait_for_timeout(200)
    assert seen.requests == [report.as_uri()] or seen.requests == [report.as_uri(), "data:,"]
    assert seen.complaints == []


def test_a_browser_keeps_the_page_from_asking(see: Any) -> None:
    seen = see()
    seen.page.evaluate("document.body.append(Object.assign(new Image(), { src: 'http://127.0.0.1:9/pixel.png' }))")
    seen.page.wait_for_timeout(200)
    assert any("Content Security Policy" in complaint for complaint in seen.complaints)


DRAWN = """() => [...document.querySelectorAll('figure')].map((figure) => {
  const svg = [...figure.querySelectorAll('.plot svg')].filter((one) => one.getBoundingClientRect().width > 0);
  const box = svg[0]?.getBoundingClientRect();
  const marks = svg[0] ? [...svg[0].querySelectorAll('path, line, rect, circle')].filter((one) => {
    const size = one.getBoundingClientRect();
    return size.width + size.height > 2;
  }).length : 0;
  return { id: figure.id, shown: svg.length, width: box?.width, height: box?.height, marks, letters: svg[0]
    ? Math.min(...[...svg[0].querySelectorAll('text')].filter((text) => text.textContent.trim())
      .map((text) => text.getBoundingClientRect().height)) : 0 };
})"""


def test_every_figure_is_drawn(see: Any) -> None:
    for width in (1280, 390):
        seen = see(width)
        seen.open_everything()
        drawn = seen.page.evaluate(DRAWN)
        assert {one["id"] for one in drawn} == {f"figure-{figure.name}" for figure in example_figures()}
        for one in drawn:
            assert one["shown"] == 1, f"{one['id']} is shown {one['shown']} times"
            assert one["width"] > 250 and one["height"] > 60 and one["marks"] > 15, one
            assert one["letters"] > 8, f"{one['id']}: letters of {one['letters']} pixels at {width}"


OUTSIDE = """() => [...document.querySelectorAll('figure .plot svg text')].filter((text) => {
  const own = text.getBoundingClientRect(), room = text.closest('section, header').getBoundingClientRect();
  return own.width > 0 && (own.left < room.left - 0.5 || own.right > room.right + 0.5);
}).map((text) => text.closest('figure').id + ': ' + text.textContent)"""


def test_nothing_is_wider_than_the_screen(see: Any) -> None:
    for width in (320, 360, 390, 768, 1280):
        seen = see(width)
        seen.open_everything()
        wide = seen.page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, f"at {width} pixels the page is {wide} wide"
        assert seen.page.evaluate(OUTSIDE) == [], f"at {width} pixels"


CONTRASTS = """() => {
  const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
  const ground = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const color = numbers(getComputedStyle(one).backgroundColor);
      if (color.length < 4 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  const low = [];
  for (const element of document.querySelectorAll('body *')) {
    const text = [...element.childNodes].filter((node) => node.nodeType === 3).map((node) => node.textContent.trim()).join('');
    if (!text || element.closest('script, style, .spoken, .skip') || element.getBoundingClientRect().width === 0) continue;
    const style = getComputedStyle(element), drawn = element instanceof SVGElement;
    if (drawn && style.stroke !== 'none') continue;
    const [one, other] = [light(numbers(drawn ? style.fill : style.color)), light(ground(element))].sort();
    const [least, most] = one < other ? [one, other] : [other, one];
    const ratio = (most + 0.05) / (least + 0.05);
    if (ratio < 4.5) low.push(`${text.slice(0, 40)}: ${ratio.toFixed(2)}`);
  }
  return low;
}"""


def test_light_and_dark_are_both_legible(see: Any) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    seen = see(color_scheme="light")
    seen.open_everything()
    light = seen.page.evaluate(ground)
    assert seen.page.evaluate(CONTRASTS) == []
    seen.page.get_by_role("button", name="Switch to dark colours").click()
    dark = seen.page.evaluate(ground)
    assert dark != light
    assert seen.page.evaluate(CONTRASTS) == []
    asked = see(color_scheme="dark")
    assert asked.page.evaluate(ground) == dark
    asked.page.get_by_role("button", name="Switch to light colours").click()
    assert asked.page.evaluate(ground) == light


def test_a_reader_can_switch_sort_point_and_copy(see: Any) -> None:
    seen = see()
    seen.open_everything()
    page = seen.page
    shown = (
        "[...document.querySelectorAll('.alternatives .panel')].filter((one) => !one.hidden).map((one) => one.dataset.title)"
    )
    assert page.evaluate(shown) == ["equal tokens"]
    page.get_by_role("tab", name="equal seconds").click()
    assert page.evaluate(shown) == ["equal seconds"]
    page.keyboard.press("ArrowLeft")
    assert page.evaluate(shown) == ["equal FLOPs"]

    rows = "[...document.querySelector('#result table').tBodies[0].rows]"
    values = f"{rows}.map((row) => Number(row.cells[1].textContent))"
    losses = f"{values}.filter(Number.isFinite)"
    before = page.evaluate(losses)
    page.locator("#result thead button", has_text="validation loss").first.click()
    assert page.evaluate(losses) == sorted(before) != before

    for figure, mark, tip in (
        ("differences", "muddformer:", f"muddformer: {words.MINUS}0.0"),
        ("losses", "muddformer: 3.7", "muddformer: 3.7"),
    ):
        page.locator(f"#figure-{figure} .wide svg [aria-label^='{mark}']").last.hover(force=True)
        assert page.locator(".tip").inner_text().startswith(tip)

    for figure, kind, begin in (
        ("losses", "CSV", b"arm,seed,"),
        ("paired", "CSV", b"arm,seed,"),
        ("paired", "SVG", b"<svg xmlns="),
    ):
        with page.expect_download() as download:
            page.locator(f"#figure-{figure} .files").get_by_text(kind).click()
        assert download.value.suggested_filename == f"{figure}.{kind.lower()}"
        assert Path(download.value.path()).read_bytes().startswith(begin)

    page.get_by_role("button", name="Copy").click()
    page.get_by_role("button", name="Copied").wait_for()
    page.evaluate("document.querySelector('main').prepend(Object.assign(document.createElement('textarea'), { id: 'pasted' }))")
    page.locator("#pasted").focus()
    page.keyboard.press("Control+V")
    assert page.locator("#pasted").input_value() == example().command
    assert seen.complaints == []


def test_the_answer_fits_a_screen_and_a_link_opens_what_is_folded(see: Any, report: Path) -> None:
    page = see(1400).page
    tops = page.evaluate("['training', 'appendix'].map((id) => document.getElementById(id).getBoundingClientRect().top)")
    assert tops[0] < 1.25 * 900 and tops[1] < 4 * 900, "two reasons and an unfinished run take a quarter more"
    folded = page.locator("#costs table").first
    assert not folded.is_visible()
    page.get_by_role("link", name="Costs of each arm", exact=True).click()
    folded.wait_for()


KEPT = sorted((Path(__file__).parents[2] / "studies" / "results").glob("*/report.html"))


@pytest.mark.parametrize("kept", KEPT, ids=lambda kept: kept.parent.name)
def test_a_kept_report_takes_four_screens_before_its_appendix(browser: Any, kept: Path) -> None:
    with looking(Seen, browser, kept) as see:
        for width, height in ((1400, 900), (390, 844)):
            page = see(width).page
            top = page.evaluate("document.getElementById('appendix').getBoundingClientRect().top + scrollY")
            assert top <= 4 * height, f"{top / height:.2f} screens at {width} pixels"


def test_on_a_phone_a_caption_opens_and_elsewhere_it_is_whole(see: Any) -> None:
    wide, phone, paper, unscripted = see(1280).page, see(390).page, see(390).page, see(390, java_script_enabled=False).page
    paper.emulate_media(media="print")
    caption = "#figure-differences figcaption"
    assert phone.locator(caption).get_by_text("Left of zero is better.").is_visible()
    for page, shown in ((wide, True), (paper, True), (unscripted, True), (phone, False)):
        assert page.locator(f"{caption} .rest").is_visible() is shown
    assert not wide.locator(f"{caption} .more").is_visible() and not paper.locator(f"{caption} .more").is_visible()
    for shown in (True, False):
        phone.locator(f"{caption} .more").click()
        assert phone.locator(f"{caption} .rest").is_visible() is shown
        assert phone.locator(f"{caption} .more").get_attribute("aria-expanded") == str(shown).lower()


def test_without_scripts_nothing_is_missing(see: Any) -> None:
    seen = see(java_script_enabled=False)
    for summary in seen.page.locator("#appendix > details > summary").all():
        summary.click(position={"x": 5, "y": 10})
    assert seen.page.locator(".alternatives .panel table:visible").count() == 3
    assert seen.page.locator("figure .wide svg:visible").count() >= 9
    assert seen.page.locator("#command:visible").count() == 1
    assert seen.page.locator("button:visible").count() == 0
