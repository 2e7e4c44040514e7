"""The documentation site: `make site` builds it from the pages of this folder, which GitHub shows too."""

import re
from pathlib import Path
from typing import Any

from twoaxis import __version__, depth, feed_forward, local, sequence
from twoaxis.cli.list import AXES

project = "twoaxis"
release = version = __version__
copyright = "the twoaxis authors, Apache-2.0"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
templates_path = ["_templates"]

# The tutorial runs when the site is built, once for each change of it.
nb_execution_mode = "cache"
nb_execution_raise_on_error = True
nb_execution_timeout = 1800
nb_execution_in_temp = True
# The widgets of notebooks would be loaded from elsewhere.
nb_ipywidgets_js: dict[str, Any] = {}
myst_enable_extensions = ["fieldlist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
autodoc_typehints = "none"
autodoc_class_signature = "mixed"
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "pydata_sphinx_theme"
html_title = "twoaxis"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = html_copy_source = False
html_sidebars = {"**": ["navigation"]}
html_theme_options: dict[str, Any] = {
    "logo": {"text": "twoaxis"},
    "navbar_center": [],
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "show_prev_next": False,
}
copybutton_prompt_text = "$ "

CHILDREN = {"mixers/README": ("depth", "sequence", "local", "feed_forward"), "studies/README": (".",)}
"""The folders of the pages below a page, which GitHub shows as a folder."""

_OUTSIDE = re.compile(r"(?<=\]\()((?:\.\./)+[\w./-]+\.md)(?=\))")


def read_source(app: Any, page: str, text: list[str]) -> None:
    """Adds the pages below a page, and links of Markdown files outside of this folder as files."""
    folder = (Path(app.srcdir) / page).parent
    root = Path(app.srcdir).resolve()

    def as_file(link: re.Match[str]) -> str:
        return link[1] if (folder / link[1]).resolve().is_relative_to(root) else f"path:{link[1]}"

    text[0] = _OUTSIDE.sub(as_file, text[0])
    below = [file for child in CHILDREN.get(page, ()) for file in sorted((folder / child).glob("[a-z]*.md"))]
    if below:
        names = "\n".join(f"{file.stem} <{file.relative_to(folder).with_suffix('').as_posix()}>" for file in below)
        text[0] += f"\n```{{toctree}}\n:hidden:\n\n{names}\n```\n"
    if page == "tutorial":
        text[0] += "\nThis page as a notebook, with what it printed: {nb-download}`tutorial.ipynb`.\n"


CONFIGS = {row.config: f"mixers/{axis}/{row.kind}" for axis, table in AXES.items() for row in table}
PACKAGES = (depth, sequence, local, feed_forward)
MIXERS = {
    thing: CONFIGS.get(getattr(thing, "config_class", None)) for one in PACKAGES for thing in map(vars(one).get, one.__all__)
}
PAGES = CONFIGS | {mixer: page for mixer, page in MIXERS.items() if page}
"""The page of each mixer, by its configuration and by its module."""


def skip_member(_app: Any, _what: str, name: str, thing: Any, _skip: bool, _options: Any) -> bool | None:
    """Leaves out how a mixer implements the contract, which the base class explains."""
    function = thing.fget if isinstance(thing, property) else getattr(thing, "__func__", thing)
    owner = getattr(function, "__qualname__", "").rpartition(".")[0]
    return True if name.endswith("_class") or owner in {page.__name__ for page in PAGES} else None


_FIELD = re.compile(r"^([A-Z][a-z]+):[ ]+(?=\S)")
_NAMED = re.compile(r"^    (?=\S)[\w*.]+: ")


def rewrite_docstring(_app: Any, _what: str, _name: str, thing: Any, _options: Any, lines: list[str]) -> None:
    """Makes reStructuredText of a docstring: its text is plain but for code, and sections such as Equation are fields.

    Of a mixer only the equation and the arguments are left: it has a page with all sections.
    """
    found, field, example = [], "", False
    page = PAGES.get(thing) if isinstance(thing, type) else None
    for line in lines:
        heading = _FIELD.match(line)
        if heading:
            field, line = heading[1], line[heading.end() :]
            kept = not page or field == "Equation"
            found += ["", f":{field}:"] + (["    ::", ""] if field == "Equation" else []) if kept else []
        elif not line.strip() or (line[0] != " " and field):
            field = ""
        example = line.startswith("Example:") or (example and (not line or line.startswith(" ")))
        if field == "Equation":
            found.append("        " + line.strip())
        elif field and page:
            continue
        elif field:
            found.append("    " + _plain(line.strip()))
        elif example:
            found.append(line)
        else:
            name = _NAMED.match(line)
            start = name.end() if name else 0
            found.append(line[:start] + _plain(line[start:]))
    lines[:] = [*found, "", f":Page: :doc:`/{page}`"] if page else found


def _plain(text: str) -> str:
    """A line whose only markup is code between backticks."""
    parts = re.split(r"`+", text)
    return "".join(f"``{part}``" if index % 2 else re.sub(r"([\\*|_])", r"\\\1", part) for index, part in enumerate(parts))


def setup(app: Any) -> None:
    """Connects the functions above."""
    app.connect("source-read", read_source)
    app.connect("autodoc-skip-member", skip_member)
    app.connect("autodoc-process-docstring", rewrite_docstring, priority=100)
