"""The table of families in docs/models.md is what the registry, the families' code and the tests say today."""

from __future__ import annotations

import difflib
from types import SimpleNamespace

import models_table
import pytest
from gguf_of_checkpoint import ARCHITECTURES as OF_TESTS
from models_table import NAMES, TESTS, architectures, judged, named_types, registered

from jpaged.loading.gguf.config import ARCHITECTURES, config_from_gguf


def test_the_page_holds_what_the_script_writes():
    kept = models_table.PAGE.read_text(encoding="utf-8")
    found = models_table.filled(kept)
    changes = "\n".join(difflib.unified_diff(kept.splitlines(), found.splitlines(), "page", "found", lineterm="", n=0))
    assert not changes, f"{changes}\n\nRun python scripts/models_table.py --write"


def test_names_that_people_know_are_given_for_every_registered_family_and_no_other():
    assert NAMES.keys() == registered()
    assert all(NAMES.values())


def test_every_family_is_judged_by_transformers():
    assert set().union(*judged().values()) == registered()
    named = models_table.PUBLISHED | models_table.WITH_IMAGES | models_table.OF_OTHER_TYPES | models_table.GGUF_ENCODERS
    assert [file for file in named.values() if not (TESTS / file).exists()] == []


def test_every_architecture_of_gguf_files_becomes_a_registered_family():
    unknown = SimpleNamespace(path="a.gguf", metadata={"general.architecture": "nothing"})
    with pytest.raises(ValueError, match="is not supported; supported: ") as refused:
        config_from_gguf(unknown)
    found = architectures()
    named = {name for names in found.values() for name in names}
    assert named == set(str(refused.value).rpartition("supported: ")[2].split(", ")) == ARCHITECTURES.keys()
    assert found.keys() <= registered()


def test_architectures_are_those_that_the_tests_write_files_of():
    found = architectures()
    others = {model_type: arch for model_type, arch in OF_TESTS.items() if arch not in found[model_type]}
    assert others == {"glm4_moe_lite": "deepseek2"}, "a file of GLM-4.7-Flash becomes a deepseek_v3"


@pytest.mark.parametrize(
    ("architecture", "types"),
    [
        ("llama", {"llama", "mixtral"}),  # another function's result is returned where there are experts
        ("granitemoe", {"granitemoe"}),  # another function's fields are changed
        ("gemma-embedding", {"gemma3_text"}),
    ],
)
def test_a_types_name_is_found_in_the_function_that_gives_it(architecture, types):
    assert named_types(ARCHITECTURES[architecture]) == types


def test_a_change_of_a_family_changes_its_row(monkeypatch):
    def row():
        return next(line for line in models_table.table().splitlines() if line.startswith("| `qwen3_5_text` |"))

    monkeypatch.setattr(models_table, "NAMES", {"qwen3_5_text": "Qwen3.5"})
    before = row()
    assert before == "| `qwen3_5_text` | Qwen3.5 | full, state | | ● | ● head | `qwen35` | L T G A H |"
    monkeypatch.setattr(models_table, "adaptable_targets", lambda model: [])
    monkeypatch.setattr(models_table, "HasDraftHead", str)
    monkeypatch.setitem(models_table.ARCHITECTURES, "qwen35", ARCHITECTURES["llama"])
    assert row() == "| `qwen3_5_text` | Qwen3.5 | full, state | | | ● | | L T G A H |"
