"""Run on a process of 4 devices: the device calls that drawn loads make, and the shapes of their engines, as JSON.

    python tests/engine/calls_of_loads.py FOLDER [--write]

`--write` writes them to device_calls.json, which the test compares: for a change that means to change them.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import make_checkpoint
from lora_checkpoints import save_all
from scripted_device import ScriptedDevice
from vision_checkpoints import make_gemma3, picture, prompt_of

from jpaged import LLM, BeamSearchParams, DraftModel, LoRARequest, NGram, PoolingParams, SamplingParams

KNOWN = Path(__file__).with_name("device_calls.json")
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 8,
    "max_model_len": 160,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,
}
LENGTHS = (1, 7, 8, 9, 33, 60, 16, 25, 90, 4, 12, 40)


def drawn_prompts(vocab: int, seed: int) -> list[dict[str, list[int]]]:
    """Return prompts of which some begin alike."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(3, vocab, 40).tolist()
    own = [rng.integers(3, vocab, length).tolist() for length in LENGTHS]
    return [{"prompt_token_ids": shared[: 8 * (i % 4)] + ids} for i, ids in enumerate(own)]


def drawn_params(seed: int, **common: Any) -> list[SamplingParams]:
    """Return parameters of which few are alike."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(len(LENGTHS)):
        fields: dict[str, Any] = {"seed": number, "max_tokens": int(rng.integers(1, 30)), "ignore_eos": True} | common
        if number % 3 == 1:
            fields |= {"temperature": 0.0}
        if number % 4 == 2:
            fields |= {"presence_penalty": 0.5, "top_k": 5, "logprobs": 3}
        if number % 4 == 3:
            fields |= {"logit_bias": {5: 2.0, 9: -1.0}, "min_tokens": 2, "stop_token_ids": [17], "top_p": 0.9}
        if number % 5 == 4:
            fields |= {"repetition_penalty": 1.2, "min_p": 0.1, "bad_words": []}
        found.append(SamplingParams(**fields))
    return found


def plain(llm: LLM, **common: Any) -> None:
    prompts = drawn_prompts(llm.control.engine.runner.settings.vocab_size, 1)
    llm.generate(prompts, drawn_params(2, **common), use_tqdm=False)
    llm.generate(prompts[:5], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True), use_tqdm=False)


def urgent(llm: LLM) -> None:
    prompts = drawn_prompts(llm.control.engine.runner.settings.vocab_size, 3)
    llm.generate(prompts, drawn_params(4), use_tqdm=False, priority=[5, 0, 3, 1, 4, 2] * 2)


def several(llm: LLM) -> None:
    plain(llm, n=3)
    prompts = drawn_prompts(llm.control.engine.runner.settings.vocab_size, 5)
    llm.beam_search(prompts[:4], BeamSearchParams(beam_width=3, max_tokens=11), use_tqdm=False)


def scored(llm: LLM) -> None:
    plain(llm, prompt_logprobs=2)


def embedded(llm: LLM) -> None:
    prompts = drawn_prompts(llm.control.engine.runner.settings.vocab_size, 6)
    for pooling in ("last", "mean", "cls", "max"):
        llm.embed(prompts, False, PoolingParams(pooling=pooling, normalize=False))
    plain(llm)


def with_images(llm: LLM) -> None:
    a, b = picture(0), picture(1)
    parts = [(3, a, 5), (a,), (20, b, 30), (9,), (a, b, 2), (3, a, 5, b, 1), (31,), (2, b, 33, a, 4)]
    llm.generate(
        [prompt_of(part, seed) for seed, part in enumerate(parts)],
        SamplingParams(seed=1, max_tokens=20, ignore_eos=True),
        use_tqdm=False,
    )


def adapted(llm: LLM, adapters: dict[str, str]) -> None:
    asked = [None, *(LoRARequest(name, number, path) for number, (name, path) in enumerate(adapters.items(), 1))]
    prompts = drawn_prompts(llm.control.engine.runner.settings.vocab_size, 7)
    llm.generate(prompts, drawn_params(8), use_tqdm=False, lora_request=[asked[i % 4] for i in range(len(prompts))])


def loads(folder: Path) -> dict[str, tuple[Any, dict[str, Any], Any]]:
    """Return each load's model, settings and requests."""
    llama, small, jamba, vision = (folder / name for name in ("plain", "small", "jamba", "vision"))
    make_checkpoint("llama", llama)
    make_checkpoint("llama", small, num_hidden_layers=1)
    make_checkpoint("jamba", jamba)
    vision.mkdir()
    make_gemma3(vision)
    model, adapters = save_all("llama", folder)
    tight = {"kv_cache_memory_bytes": 24 * 24576}
    lora = {"enable_lora": True, "max_lora_rank": 6, "max_loras": 2, "max_num_batched_tokens": 24}
    return {
        "plain": (llama, {}, plain),
        "preempted": (llama, tight, plain),
        "swapped": (llama, tight | {"preemption_mode": "swap"}, plain),
        "urgent": (llama, tight | {"scheduling_policy": "priority"}, urgent),
        "several": (llama, {}, several),
        "scored": (llama, {"enable_prefix_caching": False}, scored),
        "embedded": (llama, {}, embedded),
        "guessed": (llama, {"speculative": NGram(3)}, plain),
        "drafted": (llama, {"speculative": DraftModel(str(small), 2)}, plain),
        "states": (jamba, {}, plain),
        "images": (vision, {"kv_cache_memory_bytes": 8 << 20, "max_num_batched_tokens": 96}, with_images),
        "adapted": (model, lora, lambda llm: adapted(llm, adapters)),
        "replicas": (llama, {"data_parallel_size": 2}, several),
        "deterministic": (llama, {"deterministic": True}, several),
    }


def main(folder: Path) -> dict[str, Any]:
    found = {}
    for name, (model, settings, ask) in loads(folder).items():
        llm = LLM(str(model), **SETTINGS | settings)
        shapes = [shape.name for shape in llm.control.engine.runner.shapes.all()]
        device = ScriptedDevice(llm, period=5 if "speculative" in settings else None)
        ask(llm)
        llm.close()
        names = hashlib.sha256("\n".join(shapes).encode()).hexdigest()
        calls = dict(sorted(device.calls.items()))
        found[name] = {"calls": calls, "digest": device.digest, "shapes": len(shapes), "names": names}
    return found


if __name__ == "__main__":
    found = main(Path(sys.argv[1]))
    if "--write" in sys.argv:
        KNOWN.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    print(json.dumps(found))
