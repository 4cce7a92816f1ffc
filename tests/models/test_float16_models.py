"""float16 from checkpoint to token, by XLA's products and attention as a GPU without Triton runs them.

The engine refuses it on a CPU, where it is slow; these tests let it pass.
"""

import jax
import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from dense_model import run_dense
from flax import nnx

from jpaged import LLM, SamplingParams
from jpaged.loading import load_model
from jpaged.loading.load import convert_checkpoint
from pallas_kernels.quantised import QuantisedMatrix

TOKENS = np.random.default_rng(0).integers(3, 211, 20)
SHAPES = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 24, "enforce_eager": True}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0, detokenize=False)
PROMPTS = [{"prompt_token_ids": list(range(3, 3 + length))} for length in (30, 5, 1)]
FAMILIES = (
    "llama",
    "opt-projected",
    "mixtral",
    pytest.param("gemma3", marks=pytest.mark.nightly),
    pytest.param("deepseek_v2", marks=pytest.mark.nightly),
    pytest.param("jamba", marks=pytest.mark.nightly),
)


@pytest.fixture(autouse=True)
def any_device_takes_float16(monkeypatch):
    monkeypatch.setattr("jpaged.loading.load.check_dtype", lambda *_: None)
    monkeypatch.setattr("jpaged.loading.build_context._product_impl", lambda *_: "xla")


def logits(loaded):
    return run_dense(nnx.merge(loaded.graphdef, loaded.params), TOKENS)[:, : loaded.model.vocab_size]


def error(loaded, judge):
    with torch.no_grad():
        want = judge(torch.tensor(TOKENS)[None]).logits[0].numpy()
    return np.sqrt(np.mean((logits(loaded) - want) ** 2)) / np.std(want)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers_but_for_rounding_to_float16(name, tmp_path):
    """It has three bits more than bfloat16, whose errors are up to 3 % of the logits' spread here."""
    judge = make_checkpoint(name, tmp_path)
    loaded = load_model(tmp_path, dtype="float16")
    assert loaded.dtype == np.float16
    assert 0 < error(loaded, judge) < 0.005


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_matrices_multiply_in_float16(quantization, tmp_path):
    make_checkpoint("llama", tmp_path)
    wide, half = (load_model(tmp_path, dtype=of, quantization=quantization) for of in ("float32", "float16"))
    held = jax.tree.leaves(half.params, is_leaf=lambda leaf: isinstance(leaf, QuantisedMatrix))
    assert any(isinstance(leaf, QuantisedMatrix) for leaf in held)
    want = logits(wide)
    assert 0 < np.sqrt(np.mean((logits(half) - want) ** 2)) / np.std(want) < 0.005


def test_kv_takes_two_bytes_a_number_and_tokens_stay_close_to_float32(tmp_path):
    """Chunks of 24 tokens, a prompt that is shared, and int8 KV."""
    make_checkpoint("llama", tmp_path)

    def answers(**settings):
        with LLM(str(tmp_path), **SHAPES, **settings) as llm:
            size = llm.memory_report().groups[0].block_bytes
            outputs = [o.outputs[0] for o in llm.generate(PROMPTS + PROMPTS[:1], GREEDY, use_tqdm=False)]
        return size, [next(iter(o.logprobs[0].values())).logprob for o in outputs]

    wide, want = answers(dtype="float32")
    half, found = answers(dtype="half")
    assert 2 * half == wide
    np.testing.assert_allclose(found, want, atol=0.01)
    np.testing.assert_allclose(answers(dtype="float16", kv_cache_dtype="int8")[1], want, atol=0.05)


def test_a_float16_checkpoint_is_converted_as_it_is_and_another_is_rounded(tmp_path):
    make_checkpoint("llama", tmp_path / "wide").half().save_pretrained(tmp_path / "half")
    convert_checkpoint(tmp_path / "half", tmp_path / "same")
    convert_checkpoint(tmp_path / "wide", tmp_path / "rounded", dtype="float16")
    models = [load_model(tmp_path / name, dtype="float16") for name in ("half", "same", "rounded")]
    for leaves in zip(*(jax.tree.leaves(model.params) for model in models), strict=True):
        assert {leaf.dtype for leaf in leaves} == {np.dtype(np.float16)}
        for other in leaves[1:]:
            np.testing.assert_array_equal(leaves[0], other)


def test_a_weight_beyond_the_largest_float16_is_named(tmp_path):
    judge = make_checkpoint("llama", tmp_path)
    with torch.no_grad():
        judge.model.layers[1].mlp.down_proj.weight[3, 5] = 70000.0
    judge.save_pretrained(tmp_path)
    message = r"parameter layers.*down.weight: 70000 is beyond 65504, the largest float16; use another dtype"
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path, dtype="float16")
    load_model(tmp_path, dtype="float32")
