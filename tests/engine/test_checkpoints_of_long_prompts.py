"""Recurrent layers' default checkpoints: far apart inside a long prompt, close behind its end, and no token changes."""

from __future__ import annotations

import numpy as np
from checkpoints import CHECKPOINTS, make_checkpoint
from few_shapes import run_in_few_shapes

from jpaged import LLM, SamplingParams
from jpaged.memory import StateCheckpoints

SETTINGS = {
    "dtype": "float32",
    "block_size": 16,
    "max_model_len": 1200,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 128,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def test_a_prompt_is_found_up_to_its_last_checkpoint_and_goes_on_with_the_same_tokens(tmp_path):
    make_checkpoint("mamba2", tmp_path)
    prompt = np.random.default_rng(0).integers(3, CHECKPOINTS["mamba2"].vocab_size, 1100).tolist()
    llm, plain = (LLM(str(tmp_path), **SETTINGS, enable_prefix_caching=cached) for cached in (True, False))
    run_in_few_shapes(llm)
    run_in_few_shapes(plain)
    (policy,) = (group.spec.policy for group in llm.control.engine.memory.layout.groups)
    assert isinstance(policy, StateCheckpoints) and (policy.interval, policy.spacing) == (512, 2048)

    def tokens(engine: LLM) -> tuple[list[int], int | None]:
        (output,) = engine.generate([{"prompt_token_ids": prompt}], GREEDY, use_tqdm=False)
        return output.outputs[0].token_ids, output.num_cached_tokens

    wanted, _ = tokens(plain)
    assert [tokens(llm), tokens(llm)] == [(wanted, 0), (wanted, 1024)]
    llm.control.engine.memory.check_invariants()
    (states,) = llm.memory_report().groups
    assert states.evictable <= 2, "none was kept at 512 tokens"
