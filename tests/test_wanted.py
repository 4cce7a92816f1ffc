"""What is missing is a reason to skip a test, unless nothing may be missing."""

import pytest
import wanted


def test_what_is_there_is_given():
    assert wanted.module("json").dumps(1) == "1" and wanted.program("sh").endswith("sh")


def test_what_is_missing_skips_a_test_or_fails_it(monkeypatch):
    for missing, error in ((False, pytest.skip.Exception), (True, (ImportError, pytest.fail.Exception))):
        monkeypatch.setattr(wanted, "NOTHING_MISSING", missing)
        with pytest.raises(error):
            wanted.module("jpaged_nowhere")
        with pytest.raises(error):
            wanted.program("jpaged-nowhere")
