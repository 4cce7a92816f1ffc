"""Run with a checkpoint's folder, the id that stands for an image in a prompt, and tensor-parallel sizes on a process
of 8 devices: prints the tokens as JSON. `on_devices` runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from vision_checkpoints import picture, prompt_of

from jpaged import LLM, SamplingParams

SETTINGS = {"dtype": "float32", "block_size": 8, "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 128}
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PARTS = [(3, picture(0), 5), (9,), (picture(1), picture(0), 2)]


def prompts_with(placeholder: int) -> list[dict]:
    """The prompts that are run."""
    return [prompt_of(parts, seed, placeholder) for seed, parts in enumerate(PARTS)]


def on_devices(folder: str, placeholder: int, *sizes: int) -> dict[str, list[list[int]]]:
    """Return each size's tokens."""
    here = Path(__file__).parent
    environment = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(map(str, (here, here.parent / "models"))),
    }
    command = [sys.executable, __file__, folder, str(placeholder), *map(str, sizes)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def assert_like(found: dict[str, list[list[int]]], references: list) -> None:
    """Every size's tokens are the references' as far as these are certain."""
    for tokens in found.values():
        for ours, reference in zip(tokens, references, strict=True):
            assert ours[: reference.certain] == reference.tokens[: reference.certain] and reference.certain > 8


if __name__ == "__main__":
    found = {}
    for size in map(int, sys.argv[3:]):
        llm = LLM(sys.argv[1], tensor_parallel_size=size, **SETTINGS)
        outputs = llm.generate(prompts_with(int(sys.argv[2])), PARAMS, use_tqdm=False)
        found[size] = [output.outputs[0].token_ids for output in outputs]
        llm._engine.memory.check_invariants()
    print(json.dumps(found))
