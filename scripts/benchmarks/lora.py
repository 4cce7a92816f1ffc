"""Measures what low-rank adapters cost a decode step."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from jpaged import LLM, SamplingParams
from scripts.cases import Rows

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(folder: Path, shapes: dict[str, tuple[int, ...]], rank: int, seed: int) -> str:
    """Write a random adapter of all linear layers in PEFT's form; return its folder."""
    folder.mkdir()
    random, tensors = np.random.default_rng(seed), {}
    for name, (outputs, inputs) in shapes.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{module}.lora_A.weight"] = random.normal(size=(rank, inputs), scale=0.02).astype(np.float32)
        tensors[f"{module}.lora_B.weight"] = random.normal(size=(outputs, rank), scale=0.02).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(MODULES)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def layer_shapes(model: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that adapters change."""
    from jpaged.loading import load_model

    shapes = load_model(model).tensor_shapes
    return {name: shape for name, shape in shapes.items() if name.split(".")[-2] in MODULES}


def lora(model: str = "smollm2-135m", rank: int = 16, sequences: int = 16, tokens: int = 32, rounds: int = 3) -> Rows:
    """CPU milliseconds of a decode step with 0, 1 and 4 adapters in a batch; the least of --rounds."""
    shapes = layer_shapes(model)
    with tempfile.TemporaryDirectory() as folder:
        adapters = {f"a{i}": write_adapter(Path(folder) / f"a{i}", shapes, rank, i) for i in range(4)}
        llm = LLM(
            model,
            enable_lora=True,
            max_loras=4,
            max_lora_rank=rank,
            lora_modules=adapters,
            max_num_seqs=sequences,
            max_num_batched_tokens=64,
            max_model_len=256,
        )
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [7, 11, 13 + i]} for i in range(sequences)]
    choices = {0: [None], 1: ["a0"], 4: list(adapters)}
    seconds: dict[int, list[float]] = {count: [] for count in choices}
    for turn in range(rounds + 1):  # the first compiles, and loads the adapters
        for count, names in choices.items():
            loras = [names[i % len(names)] for i in range(sequences)]
            steps, start = llm.stats().num_steps, time.process_time()
            llm.generate(prompts, params, use_tqdm=False, lora_request=loras)
            spent = (time.process_time() - start) / (llm.stats().num_steps - steps)
            if turn:
                seconds[count].append(spent)
    llm.close()
    plain = min(seconds[0])
    return [
        {"adapters": count, "CPU ms a step": 1e3 * min(each), "times none": min(each) / plain}
        for count, each in seconds.items()
    ]
