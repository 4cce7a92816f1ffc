"""The script that counts blocks saved by sharing, on a case small enough to count by hand."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "sharing_savings.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("sharing_savings", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["sharing_savings"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("width", "saved", "used"), [(1, 0, 3), (2, 1 + 1, 1 + 3), (4, 3 + 3, 1 + 5)])
def test_a_full_block_of_prompt_is_shared_by_all_and_each_output_has_one_more(script, width, saved, used):
    """Two steps: the prompt's block with all outputs on it, then one block each for the first token's KV."""
    requests = [script.Lengths(prompt=16, output=2)]
    assert script.saving(requests, "n", width, block_size=16, sharpness=1) == saved / (saved + used)


def test_beams_share_more_than_samples(script):
    requests = [script.Lengths(prompt=20, output=60)] * 3
    beams, samples = (script.saving(requests, kind, 4, block_size=8, sharpness=4) for kind in ("beam", "n"))
    assert beams > samples > 0


def test_the_script_imports_no_jax_and_prints_both_columns(tmp_path):
    workload = tmp_path / "two.jsonl"
    workload.write_text("\n".join(json.dumps({"prompt": "a" * 70, "output": "b" * n}) for n in (40, 90)))
    code = f"import runpy, sys; runpy.run_path({str(SCRIPT)!r}, run_name='__main__'); assert 'jax' not in sys.modules"
    command = [sys.executable, "-c", code, str(workload)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert shown[0].startswith("2 requests, 16.0 prompt and 14.5 output tokens")
    assert [line.split()[-1] for line in shown[2:]] == ["6.09%", "8.53%", "9.79%", "37.56%", "53.13%", "55.16%"]
