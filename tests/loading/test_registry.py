from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest

from jpaged.loading import registry


def test_installed_families_are_found():
    assert registry.model_class("llama").__name__ == "Llama"
    assert {"llama", "opt", "gemma2"} <= set(registry.model_types())


def test_an_unknown_type_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match=r"model_type 'nonesuch'\. Known: .*gemma2.*llama"):
        registry.model_class("nonesuch")


def test_a_family_from_outside_takes_the_place_of_jpaged_s(monkeypatch):
    def entry(package, family):
        return SimpleNamespace(name="gpt2", dist=SimpleNamespace(name=package), load=lambda: family)

    entries = [entry("another", int), entry("jpaged", str)]
    monkeypatch.setattr(registry, "entry_points", lambda group: entries)
    assert registry.model_class("gpt2") is int


def test_a_family_that_cannot_be_imported_is_explained(monkeypatch):
    entry = EntryPoint("gone", "a_package_that_is_not_there.gone:Gone", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
    with pytest.raises(ValueError, match=r"'gone' is registered by .* family is not installed: No module named"):
        registry.model_class("gone")


def test_without_families_the_error_says_what_to_check(monkeypatch):
    monkeypatch.setattr(registry, "entry_points", lambda group: [])
    with pytest.raises(ValueError, match="Known: none; is jpaged installed"):
        registry.model_class("llama")
