"""The fuzzer that grows each field of each endpoint ends, and finds nothing wrong with small bodies."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tiny_chat_model import byte_level_tokenizer, make_chat_model

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = ["--dtype", "float32", "--block-size", "8", "--max-num-seqs", "4", "--max-num-batched-tokens", "64"]
OPTIONS += ["--max-model-len", "128", "--kv-cache-memory-bytes", str(2**23), "--tool-parser", "hermes"]


@pytest.mark.nightly
def test_no_field_that_grows_stops_the_other_clients_or_fills_the_memory(tmp_path, monkeypatch):
    """The whole run is by hand: ``python scripts/grow_fields.py MODEL``."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    import grow_fields

    make_chat_model(tmp_path)
    byte_level_tokenizer().save_pretrained(tmp_path)
    assert grow_fields.main([str(tmp_path), "--rounds", "3", "--bytes", str(2**16), *OPTIONS]) == 0
    sys.modules.pop("grow_fields")
