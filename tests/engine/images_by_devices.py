"""Run with a checkpoint's folder, the id that stands for an image in a prompt, and sizes, as ``2`` for tensor
parallelism or ``2x1`` for replicas of so many devices, on a process of 8: prints the tokens, and how many
shapes were compiled after the warm-up, as JSON. `on_devices` runs it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from on_devices import printed_on_devices
from vision_checkpoints import picture, prompt_of

from jpaged import LLM, SamplingParams

SETTINGS = {"dtype": "float32", "block_size": 8, "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 128}
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PARTS = [(3, picture(0), 5), (9,), (picture(1), picture(0), 2)]


def prompts_with(placeholder: int) -> list[dict]:
    """The prompts that are run."""
    return [prompt_of(parts, seed, placeholder) for seed, parts in enumerate(PARTS)]


def on_devices(folder: str, placeholder: int, *sizes: int | str, recompiles: int = 0) -> dict[str, list[list[int]]]:
    """Return each size's tokens.

    Args:
        recompiles: most shapes that may be compiled after a warm-up: those of images whose size it cannot foresee.
    """
    said = printed_on_devices(8, Path(__file__), folder, placeholder, *sizes)
    assert max(said["recompiles"]) <= recompiles, said["recompiles"]
    return said["tokens"]


def assert_like(found: dict[str, list[list[int]]], references: list) -> None:
    """Every size's tokens are the references' as far as these are certain."""
    for tokens in found.values():
        for ours, reference in zip(tokens, references, strict=True):
            assert ours[: reference.certain] == reference.tokens[: reference.certain] and reference.certain > 8


if __name__ == "__main__":
    found, recompiles = {}, []
    for size in sys.argv[3:]:
        replicas, devices = map(int, size.split("x")) if "x" in size else (1, int(size))
        llm = LLM(sys.argv[1], data_parallel_size=replicas, tensor_parallel_size=devices, **SETTINGS)
        if replicas > 1:
            llm.warmup(use_tqdm=False)
        outputs = llm.generate(prompts_with(int(sys.argv[2])), PARAMS, use_tqdm=False)
        found[size] = [output.outputs[0].token_ids for output in outputs]
        for replica in llm.control.engine.replicas:
            replica.memory.check_invariants()
            assert replica.memory.num_used_blocks == 0
        recompiles.append(llm.num_recompiles)
    print(json.dumps({"tokens": found, "recompiles": recompiles}))
