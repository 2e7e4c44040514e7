"""Acting when another library is imported."""

import importlib
import sys

import pytest

from twoaxis.core.import_hooks import when_imported


@pytest.fixture
def modules(tmp_path, monkeypatch):
    (tmp_path / "late_library.py").write_text("ready = True\n")
    (tmp_path / "its_listener.py").write_text(
        "calls = []\n\ndef listen():\n    import late_library\n    calls.append(late_library.ready)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    yield
    sys.meta_path[:] = finders
    for name in ("late_library", "its_listener"):
        sys.modules.pop(name, None)


def test_it_waits_for_the_import_and_acts_once(modules):
    finders = list(sys.meta_path)
    when_imported("late_library", "its_listener:listen")
    assert "its_listener" not in sys.modules
    importlib.import_module("late_library")
    assert sys.modules["its_listener"].calls == [True] and sys.meta_path == finders
    importlib.reload(sys.modules["late_library"])
    assert sys.modules["its_listener"].calls == [True]


def test_it_acts_at_once_when_the_import_is_over(modules):
    importlib.import_module("late_library")
    when_imported("late_library", "its_listener:listen")
    assert sys.modules["its_listener"].calls == [True]
