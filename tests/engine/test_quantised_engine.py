"""Quantised engines: sharded, on tiny checkpoints, and what they cost in quality on the demo model."""

from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoints import make_checkpoint
from on_devices import printed_on_devices

from jpaged import LLM, SamplingParams
from jpaged.bench.prompts import questions
from scripts.benchmarks.perplexity import perplexity

HERE = Path(__file__).parent
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": list(range(3, 3 + length))} for length in (1, 17, 30)]
SMALL = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}


def tokens(llm):
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def weight_bytes(llm):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(llm.params))


@pytest.mark.parametrize(
    ("family", "forms"),
    [
        ("llama", ["int8 on 8", "int4 on 2"]),
        pytest.param("llama", ["int8 on 2", "int4 on 8"], marks=pytest.mark.nightly),
        *(
            pytest.param(family, ["int8 on 2"], marks=pytest.mark.nightly)
            for family in ("qwen2_moe", "glm4_moe_lite", "nemotron_h")
        ),
    ],
)
def test_shards_of_quantised_matrices_multiply_to_the_same(family, forms, tmp_path):
    """6 heads of 48 on 2 KV heads and an MLP of 109: heads are padded, KV heads replicated, groups cut to fit.

    The others have experts: next to a gated shared one, after latent attention, and between recurrent layers.
    """
    make_checkpoint(family, tmp_path)
    found = printed_on_devices(8, HERE / "quantised_by_devices.py", tmp_path, *forms)
    assert set(found) == set(forms)
    for name, (from_values, from_one_device) in found.items():
        assert from_values < 1e-4, name
        if name.startswith("int8"):  # a scale an output is the same on any number of devices
            assert from_one_device < 1e-4, name


def test_replaced_parameters_are_used_and_must_be_quantised_alike(tmp_path):
    make_checkpoint("llama", tmp_path / "one")
    make_checkpoint("llama-tied-biased", tmp_path / "other")
    llm = LLM(str(tmp_path / "one"), quantization="int8", **SMALL)
    before = tokens(llm)
    llm.update_params(jax.tree.map(lambda leaf: leaf[::-1] if leaf.ndim >= 2 else leaf, llm.params))
    assert tokens(llm) != before
    with pytest.raises(
        ValueError, match=r"new\['embed_tokens'\]\['weight'\]\.value\.codes is missing, which the engine's"
    ):
        llm.update_params(LLM(str(tmp_path / "one"), **SMALL).params)


def test_experts_in_codes_give_a_prompt_the_same_tokens_in_any_batch(tmp_path):
    """Alone a token has two experts; together experts have as many rows as chance gives them."""
    make_checkpoint("qwen3_moe", tmp_path)
    llm = LLM(str(tmp_path), quantization="int8", enable_prefix_caching=False, **SMALL)
    together = tokens(llm)
    alone = [llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids for prompt in PROMPTS]
    in_chunks = LLM(str(tmp_path), quantization="int8", deterministic=True, **SMALL | {"max_num_batched_tokens": 16})
    assert together == alone == tokens(in_chunks)


@pytest.mark.parametrize(
    "kv_cache_dtype", ["int8", *(pytest.param(dtype, marks=pytest.mark.nightly) for dtype in ("bfloat16", "fp8"))]
)
def test_narrow_kv_is_shared_copied_and_swapped_like_any_other(kv_cache_dtype, tmp_path):
    """Prefix hits, forks of one prompt and preemption change no token."""
    make_checkpoint("gemma2", tmp_path)
    settings = SMALL | {"block_size": 8, "kv_cache_dtype": kv_cache_dtype}
    llm = LLM(str(tmp_path), **settings)
    first = tokens(llm)
    assert tokens(llm) == first  # served from the prefix cache
    params = SamplingParams(n=3, temperature=0, max_tokens=12, ignore_eos=True)
    forks = llm.generate(PROMPTS[1], params, use_tqdm=False)[0].outputs
    assert [fork.token_ids for fork in forks] == [first[1]] * 3
    pool = 8 * llm.memory_report().page_bytes
    tight = LLM(str(tmp_path), kv_cache_memory_bytes=pool, preemption_mode="swap", watermark=0.0, **settings)
    assert tokens(tight) == first
    llm.control.engine.memory.check_invariants()


@pytest.mark.parametrize(("kv_cache_dtype", "bytes_of_four"), [("fp8", 1), ("int8", 17 / 16)])
def test_kv_of_a_byte_a_value_takes_that_much_of_float32(kv_cache_dtype, bytes_of_four, tmp_path):
    make_checkpoint("llama", tmp_path)
    wide, narrow = (
        LLM(str(tmp_path), kv_cache_dtype=dtype, **SMALL).memory_report().groups[0].block_bytes
        for dtype in ("auto", kv_cache_dtype)
    )
    assert narrow * 4 == wide * bytes_of_four


# ------------------------------------------------------------------ the demo model

DEMO = {"dtype": "float32", "max_model_len": 640, "max_num_seqs": 4, "max_num_batched_tokens": 512}
TOKENS = 1024


@pytest.fixture(scope="module")
def text_tokens():
    """Return the tokens of GSM8K's questions and answers."""
    llm = LLM("smollm2-135m", quantization="gguf", kv_cache_memory_bytes=1 << 25, **DEMO)
    text = "\n\n".join(f"{question}\n{answer}" for question, answer in questions())
    return llm.tokenizer.encode(text)[:TOKENS]


@pytest.fixture(scope="module")
def plain(text_tokens):
    """(float32 perplexity, prompt logprobs of the first 100 tokens, bytes of the weights)."""
    llm = LLM("smollm2-135m", **DEMO)
    return perplexity(llm, text_tokens), first_logprobs(llm, text_tokens), weight_bytes(llm)


def first_logprobs(llm, ids):
    """[99, 5]: of the next token and the four most likely ones."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=4)
    (output,) = llm.generate({"prompt_token_ids": ids[:100]}, params, use_tqdm=False)
    return [{token: entry.logprob for token, entry in found.items()} for found in output.prompt_logprobs[1:]]


@pytest.mark.parametrize(
    ("quantization", "loss", "share"),
    [("int8", 0.01, 0.26), ("int4", 0.05, 0.19)],
)
@pytest.mark.nightly
def test_perplexity_hardly_grows(quantization, loss, share, text_tokens, plain):
    llm = LLM("smollm2-135m", quantization=quantization, **DEMO)
    assert abs(perplexity(llm, text_tokens) / plain[0] - 1) < loss
    assert weight_bytes(llm) < share * plain[2]


@pytest.mark.nightly
def test_a_gguf_file_run_as_it_is_by_xla_says_what_its_dequantised_values_say(text_tokens, plain, monkeypatch):
    monkeypatch.setattr("jpaged.loading.build_context._product_impl", lambda mesh, impl: "xla")
    llm = LLM("smollm2-135m", quantization="gguf", **DEMO)
    for found, want in zip(first_logprobs(llm, text_tokens), plain[1], strict=True):
        assert found.keys() == want.keys()
        np.testing.assert_allclose(list(found.values()), [want[token] for token in found], atol=1e-3)
    assert weight_bytes(llm) < 0.19 * plain[2]
