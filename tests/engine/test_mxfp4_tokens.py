"""GPT-OSS in MXFP4 generates what transformers generates with the values of its codes."""

from greedy_reference import GREEDY, LENGTHS, NUM_TOKENS, assert_same_tokens, random_prompts, torch_greedy
from mxfp4_checkpoint import make_mxfp4

from jpaged import LLM


def test_tokens_are_those_of_the_dequantised_model_in_a_pool_that_preempts(tmp_path):
    prompts = random_prompts()
    expected = torch_greedy(make_mxfp4(tmp_path), prompts)
    settings = {"dtype": "float32", "block_size": 8, "max_model_len": max(LENGTHS) + NUM_TOKENS, "max_num_seqs": 8}
    # 20 pages, each of 2 blocks of the window's 3 layers or 3 of the 2 global ones: one prompt fits, eight do not.
    llm = LLM(str(tmp_path), max_num_batched_tokens=16, kv_cache_memory_bytes=20 * (48 << 10), **settings)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], GREEDY, use_tqdm=False)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert_same_tokens(outputs, expected)
