"""Blocks saved by sharing, on a case small enough to count by hand."""

import json
import subprocess
import sys

import pytest

from scripts.benchmarks.text_savings import Lengths, saving


@pytest.mark.parametrize(("width", "saved", "used"), [(1, 0, 3), (2, 1 + 1, 1 + 3), (4, 3 + 3, 1 + 5)])
def test_a_full_block_of_prompt_is_shared_by_all_and_each_output_has_one_more(width, saved, used):
    """Two steps: the prompt's block with all outputs on it, then one block each for the first token's KV."""
    requests = [Lengths(prompt=16, output=2)]
    assert saving(requests, "n", width, block_size=16, sharpness=1) == saved / (saved + used)


def test_beams_share_more_than_samples():
    requests = [Lengths(prompt=20, output=60)] * 3
    beams, samples = (saving(requests, kind, 4, block_size=8, sharpness=4) for kind in ("beam", "n"))
    assert beams > samples > 0


def test_the_case_imports_no_jax_and_prints_both_columns(tmp_path):
    workload = tmp_path / "two.jsonl"
    workload.write_text("\n".join(json.dumps({"prompt": "a" * 70, "output": "b" * n}) for n in (40, 90)))
    run = "import runpy, sys; runpy.run_module('scripts.benchmarks', run_name='__main__')"
    code = f"{run}; assert 'jax' not in sys.modules"
    command = [sys.executable, "-c", code, "text-savings", "--workload", str(workload)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in shown[2:]]
    assert [row[2] for row in cells] == ["0.0609", "0.0853", "0.0979", "0.3756", "0.5313", "0.5516"]
    assert cells[0][3:] == ["2", "16", "14.5"]
