"""Engines on FP8 blocks and on act-order GPTQ generate the tokens of their dequantised values, on any path."""

import pytest
from coded_checkpoints import fp8_llama, gptq_llama

from jpaged import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": list(range(3, 3 + length))} for length in (1, 17, 30)]
SMALL = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 24, "block_size": 8}


def tokens(folder):
    outputs = LLM(str(folder), **SMALL).generate(PROMPTS, GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("write", [fp8_llama, gptq_llama])
def test_tokens_are_those_of_the_dequantised_values(write, tmp_path):
    """Prompts are chunked and share steps with decodes."""
    quantised, values = write(tmp_path)
    assert tokens(quantised) == tokens(values)
