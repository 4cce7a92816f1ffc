"""How thorough a run of the tests is: all that a commit has to pass, or with ``--nightly`` all there is."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

NIGHTLY = False
"""Whether ``--nightly`` was given; set before any test module is imported."""


def examples(nightly: int) -> int:
    """Return how many examples a property is tried on, a third of them where the run is not nightly."""
    return nightly if NIGHTLY else -(-nightly // 3)


def by_name(cases: Mapping[str, Any], *often: str) -> list[Any]:
    """Return the parameters of a test by their names; those that are not named again are for the night."""
    assert set(often) <= cases.keys()
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            id=name,
            marks=() if name in often else pytest.mark.nightly,
        )
        for name, case in cases.items()
    ]


def rarely(*values: Any) -> Any:
    """Return one set of a test's parameters, for the night."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def for_the_night() -> frozenset[str]:
    """Return the node ids of tests/for_the_night.txt, which says how they were chosen."""
    lines = Path(__file__).with_name("for_the_night.txt").read_text().splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))
