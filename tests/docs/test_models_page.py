"""docs/models.md names every family and every GGUF architecture that there is, once, and no other."""

from __future__ import annotations

import re
from collections import Counter
from importlib.metadata import distribution
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkpoints import CHECKPOINTS
from dense_families import DENSE_FAMILIES
from encoder_checkpoints import ENCODERS
from wrapped_families import BY_THEIR_TEXT

from jpaged.loading.gguf.config import config_from_gguf

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
WITH_IMAGES = {
    "gemma3": "engine/test_vision_engine.py",
    "llava_onevision": "engine/test_llava_engine.py",
    "mllama": "engine/test_mllama_engine.py",
    "mllama_text_model": "engine/test_mllama_engine.py",
}
"""Families that take images -> where their tokens are compared with transformers'."""
OF_OTHER_TYPES = {"new": "models/test_encoders.py"}
"""Types that transformers does not have -> where they are compared with a class of another type."""


@pytest.fixture(scope="module")
def columns():
    """The table's columns: families, model types and GGUF architectures, each a list of a row's names."""
    table = PAGE.read_text(encoding="utf-8").partition("| family | `model_type` | GGUF |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert all(len(row) == 3 for row in rows)
    return [[re.findall(r"`([^`]+)`", cell) for cell in column] for column in zip(*rows, strict=True)]


def registered():
    """The model types that this package registers."""
    return {entry.name for entry in distribution("jpaged").entry_points if entry.group == "jpaged.models"}


def test_every_registered_family_has_its_place_in_the_table(columns):
    named = Counter(name for names in columns[1] for name in names)
    assert set(named) == registered() and set(named.values()) == {1}


def test_every_architecture_of_gguf_files_is_in_the_table(columns):
    unknown = SimpleNamespace(path="a.gguf", metadata={"general.architecture": "nothing"})
    with pytest.raises(ValueError, match="is not supported; supported: ") as refused:
        config_from_gguf(unknown)
    supported = set(str(refused.value).rpartition("supported: ")[2].split(", "))
    assert {name for names in columns[2] for name in names} == supported


def test_every_family_is_judged_by_transformers():
    judged = {config.model_type for config in (*CHECKPOINTS.values(), *DENSE_FAMILIES.values(), *ENCODERS.values())}
    judged |= {config.get_text_config().model_type for _, config in BY_THEIR_TEXT.values()}
    assert all((PAGE.parents[1] / "tests" / file).exists() for file in (WITH_IMAGES | OF_OTHER_TYPES).values())
    assert registered() - judged == WITH_IMAGES.keys() | OF_OTHER_TYPES.keys()
