"""Prints whether log-probabilities and new weights are the same on two devices; run with virtual devices."""

from __future__ import annotations

import json
import sys

import jax
import numpy as np

from jpaged import LLM, SamplingParams
from jpaged.training import logprobs

SETTINGS = {"dtype": "float32", "block_size": 8, "max_num_seqs": 4, "max_model_len": 64, "max_num_batched_tokens": 64}
DRAWN = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, detokenize=False, logprobs=0)
PROMPT = {"prompt_token_ids": list(range(5, 25))}


def answer(llm):
    return llm.generate(PROMPT, DRAWN, use_tqdm=False)[0].outputs[0]


def main(folder: str) -> None:
    tokens = np.random.default_rng(0).integers(3, 200, (2, 24))

    def loss(llm):
        return jax.jit(jax.value_and_grad(lambda params: logprobs(llm, params, tokens).sum()))

    with LLM(folder, **SETTINGS) as one, LLM(folder, tensor_parallel_size=2, deterministic=True, **SETTINGS) as two:
        (plain, slope), (split, slope_of_two) = (loss(llm)(llm.params) for llm in (one, two))
        norms = [float(sum((leaf**2).sum() for leaf in jax.tree.leaves(tree))) for tree in (slope, slope_of_two)]
        drawn = answer(two)
        whole = np.array([[*PROMPT["prompt_token_ids"], *drawn.token_ids]])
        exact = logprobs(two, two.params, whole, start=20, deterministic=True)
        scores = np.array(
            [[of[token].logprob for token, of in zip(drawn.token_ids, drawn.logprobs, strict=True)]], np.float32
        )

        halved = jax.tree.map(lambda leaf: leaf * 0.7, one.params)  # on one device
        one.update_params(halved)
        stream = two.stream(PROMPT, DRAWN)
        next(stream)
        first = jax.devices()[0]  # all on one device: laid out over two, while a request runs
        two.update_params(jax.tree.map(lambda leaf: jax.device_put(leaf, first) * 0.7, two.params))
        stream.close()
        same = answer(one).token_ids == answer(two).token_ids
        two.sleep()
        two.wake_up()
        again = answer(one).token_ids == answer(two).token_ids
    print(
        json.dumps(
            {
                "values": [float(plain), float(split)],
                "norms": norms,
                "bits": bool((exact == scores).all()),
                "same": same,
                "again": again,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
