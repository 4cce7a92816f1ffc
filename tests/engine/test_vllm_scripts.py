"""Scripts for vLLM, with the calls of its public examples, run with nothing but the import changed.

A script is given a model's folder and settings that keep its engine small; it says in EXPECTED what RESULT must be.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_chat_model

SCRIPTS = sorted((Path(__file__).parent / "vllm_scripts").glob("*.py"))
SETTINGS = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_chat_model.make_chat_model(folder)
    tiny_chat_model.byte_level_tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    return str(folder)


@pytest.mark.parametrize("script", SCRIPTS, ids=[script.stem for script in SCRIPTS])
def test_a_script_runs_with_only_its_import_changed(folder, script, monkeypatch):
    ported, changes = re.subn(r"^from vllm\b", "from jpaged", script.read_text(), flags=re.MULTILINE)
    assert changes and "vllm" not in ported
    monkeypatch.setattr(sys, "argv", [script.name, folder, json.dumps(SETTINGS)])
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(ported, script.name, "exec"), names)
    assert names["RESULT"] == names["EXPECTED"]
