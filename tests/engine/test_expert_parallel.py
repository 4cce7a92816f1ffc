"""Whole experts on each device generate the tokens of one device, and lie nowhere else."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from greedy_reference import torch_greedy
from tokens_by_devices import NUM_TOKENS, PROMPTS

from jpaged import LLM

HERE = Path(__file__).parent
EIGHT_DEVICES = {
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": os.pathsep.join([str(HERE.parent / "models"), os.environ.get("PYTHONPATH", "")]),
}
EXPERTS = 8


@pytest.fixture(scope="module", params=["llama4", "gpt_oss"])
def found(request, tmp_path_factory):
    """What torch generates, and what engines of several devices do and hold."""
    folder = tmp_path_factory.mktemp(request.param)
    expected = torch_greedy(make_checkpoint(request.param, folder, num_local_experts=EXPERTS), PROMPTS, NUM_TOKENS)
    command = [sys.executable, str(HERE / "experts_by_devices.py"), str(folder)]
    done = subprocess.run(command, env=os.environ | EIGHT_DEVICES, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return expected, json.loads(done.stdout.splitlines()[-1])


def test_any_number_of_devices_generates_the_tokens_of_transformers(found):
    expected, engines = found
    assert sum(reference.certain for reference in expected) >= 0.95 * sum(len(r.tokens) for r in expected)
    for name, engine in engines.items():
        for tokens, reference in zip(engine["tokens"], expected, strict=True):
            assert tokens[: reference.certain] == reference.tokens[: reference.certain], name


def test_a_device_holds_its_own_experts_only(found):
    """Replicas hold the same experts again."""
    engines = found[1]
    assert engines["2 devices"]["experts"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert engines["4 devices"]["experts"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert engines["8 devices"]["experts"] == [[expert] for expert in range(EXPERTS)]
    assert engines["2 replicas of 4 devices"]["experts"] == 2 * engines["4 devices"]["experts"]
