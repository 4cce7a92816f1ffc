"""A name that goes away says so at its caller's line, and is gone when it was to be."""

from __future__ import annotations

import importlib
import pkgutil
import warnings

import pytest

import jpaged
from jpaged import deprecation
from jpaged.deprecation import deprecated, overdue


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    """What a test deprecates is not known to the next one."""
    known = list(deprecation._KNOWN)
    monkeypatch.setattr(deprecation, "_KNOWN", known)
    return known


def test_a_call_warns_at_the_callers_line_and_does_its_work():
    @deprecated("double", use="twice", since="0.2", removed="0.4")
    def double(value: int, *, plus: int = 0) -> int:
        """Return two of it."""
        return 2 * value + plus

    with pytest.warns(DeprecationWarning) as caught:
        assert double(3, plus=1) == 7
    said = "double is deprecated since jpaged 0.2 and will be removed in 0.4: use twice"
    assert [(str(one.message), one.filename) for one in caught] == [(said, __file__)]
    assert double.__doc__ == "Return two of it."


def test_defining_it_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        deprecated("old", use="new", since="0.2", removed="0.3")(len)


@pytest.mark.parametrize(("since", "removed"), [("0.2", "0.2"), ("0.3", "0.2"), ("0.2.0", "0.2.9")])
def test_a_name_stays_for_a_minor_version(since, removed):
    with pytest.raises(ValueError, match="later minor version"):
        deprecated("old", use="new", since=since, removed=removed)


@pytest.mark.parametrize("version", ["", "soon", "0.2rc1", "1.2.3.4"])
def test_a_version_is_numbers(version):
    with pytest.raises(ValueError, match="numbers with dots"):
        deprecated("old", use="new", since="0.1", removed=version)


def test_what_was_to_be_gone_is_overdue_from_that_version_on(nothing_known):
    nothing_known.clear()
    deprecated("old", use="new", since="0.9", removed="0.10")
    assert overdue("0.9.12") == []
    assert [one.name for one in overdue("0.10.0")] == ["old"]
    assert [one.name for one in overdue("1.0")] == ["old"]


def test_nothing_of_this_version_is_overdue():
    """Importing the modules with users' names is what makes their deprecations known."""
    for name in jpaged.__all__:
        getattr(jpaged, name)
    for module in pkgutil.iter_modules(jpaged.__path__, "jpaged."):
        if not module.ispkg:
            importlib.import_module(module.name)
    assert overdue(jpaged.__version__) == []
