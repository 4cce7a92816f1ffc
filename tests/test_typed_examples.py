"""What readers copy from holds under the type checker of their editors: pyright, in its mode ``basic``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = [
    "scripts/demo.py",
    "scripts/colab/*.py",
    "scripts/gpu",
    "scripts/tpu",
    "scripts/rl",
    "scripts/ray/serve.py",
    "scripts/ray/batch.py",
]


def complaints(tmp_path: Path, *included: str) -> list[str]:
    """Return what the checker says of files, each with its place."""
    settings = {
        "typeCheckingMode": "basic",
        "include": list(included),
        "extraPaths": [str(ROOT), str(ROOT / "scripts" / "rl")],
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [
        sys.executable,
        "-m",
        "basedpyright",
        "-p",
        str(tmp_path),
        "--outputjson",
        "--pythonpath",
        sys.executable,
    ]
    said = json.loads(subprocess.run(command, capture_output=True, text=True).stdout)
    assert said["summary"]["filesAnalyzed"] > 0
    found = [one for one in said["generalDiagnostics"] if one["severity"] == "error"]
    return [f"{Path(one['file']).name}:{one['range']['start']['line'] + 1}: {one['message']}" for one in found]


@pytest.mark.nightly
def test_the_examples_are_typed(tmp_path):
    pytest.importorskip("basedpyright")
    wrong = tmp_path / "wrong.py"
    wrong.write_text("from jpaged import SamplingParams\n\nSamplingParams(max_tokens='many')\n")
    found = complaints(tmp_path, str(wrong), *(str(ROOT / example) for example in EXAMPLES))
    assert [one.partition(":")[0] for one in found] == ["wrong.py"], "\n".join(found)
