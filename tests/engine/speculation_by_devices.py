"""Run with a checkpoint's folder on a process of 2 devices: prints as JSON what engines over both give, without and
with drafts, and how many drafts were kept."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from draft_settings import make_drafts_free

from jpaged import LLM, MTP, Assistant, DFlash, Eagle3, Layers, NGram, SamplingParams

SETTINGS = {"dtype": "float32", "block_size": 8, "max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64}
RNG = np.random.default_rng(7)
FEW = RNG.integers(3, 211, 4)
PROMPTS = [RNG.choice(FEW, int(n)).tolist() for n in (5, 11, 30)]
WAYS = {
    "none": None,
    "n-grams": NGram(4, longest=3, shortest=1),
    "first layers": Layers(1, tokens=3),
    "head": MTP(2),
}
HEADS = {"eagle3": Eagle3, "assistant": Assistant, "dflash": DFlash}
"""Further ways: heads in the folders of these names within the checkpoint's."""


def main(folder: str, *ways: str) -> dict[str, dict]:
    """Drafts cost nothing here, so that all that can be made are."""
    make_drafts_free(pytest.MonkeyPatch())
    params = SamplingParams(temperature=1.2, seed=3, max_tokens=24, ignore_eos=True, allowed_token_ids=FEW.tolist())
    found = {}
    for way in ways:
        drafts = HEADS[way](f"{folder}/{way}", tokens=2) if way in HEADS else WAYS[way]
        llm = LLM(folder, tensor_parallel_size=2, speculative=drafts, **SETTINGS)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
        tokens = [output.outputs[0].token_ids for output in outputs]
        found[way] = {"tokens": tokens, "kept": llm.stats().num_accepted_tokens}
        llm.control.engine.memory.check_invariants()
    return found


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
