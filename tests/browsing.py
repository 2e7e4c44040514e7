"""A real browser without a screen, for pages that this library writes."""

import importlib.util
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))), None)
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def skip_without_browser() -> None:
    """Skips the whole file that calls it, where there is no browser to look through."""
    if BROWSER is None or importlib.util.find_spec("playwright") is None:
        pytest.skip("needs the package playwright and a browser called chromium or google-chrome", allow_module_level=True)


@contextmanager
def launched_browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=BROWSER, args=list(ARGUMENTS))
        yield launched
        launched.close()


class Seen:
    """A page that is open, with everything it asked for and complained about."""

    def __init__(self, browser: Any, path: Path, width: int, **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        self.page = self.context.new_page()
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(path.as_uri())

    def open_everything(self) -> None:
        self.page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")


@contextmanager
def looking(seen: type[Seen], browser: Any, path: Path) -> Iterator[Callable[..., Any]]:
    """Opens a page at a width, as often as called, and closes all of them at the end."""
    opened: list[Seen] = []

    def look(width: int = 1280, **options: Any) -> Seen:
        opened.append(seen(browser, path, width, **options))
        return opened[-1]

    yield look
    for one in opened:
        with suppress(Exception):
            one.context.close()
