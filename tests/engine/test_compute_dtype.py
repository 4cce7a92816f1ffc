"""bfloat16 on a CPU: matrices and KV are held in it, all else is float32; where it would be slow it is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import make_checkpoint

from jpaged import LLM, SamplingParams
from jpaged.engine.sizes import check_compute_dtype

SHAPES = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 24, "enforce_eager": True}
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=0, detokenize=False)
PROMPTS = [{"prompt_token_ids": list(range(3, 3 + length))} for length in (30, 5, 1)]


def answers(llm, prompts):
    """Return of each prompt the tokens and their log-probabilities."""
    outputs = [output.outputs[0] for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
    return [
        (o.token_ids, [place[t].logprob for t, place in zip(o.token_ids, o.logprobs, strict=True)]) for o in outputs
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    make_checkpoint("llama", path)
    return str(path)


def test_matrices_and_kv_take_two_bytes_a_number_and_tokens_stay_close_to_float32(folder):
    with LLM(folder, dtype="bfloat16", **SHAPES) as llm:
        assert llm.dtype == jnp.bfloat16
        leaves = jax.tree.leaves(llm.params)
        assert {str(leaf.dtype) for leaf in leaves} == {"uint16", "float32"}
        narrow = sum(group.block_bytes for group in llm.memory_report().groups)
        found = answers(llm, PROMPTS)
        again = answers(llm, PROMPTS[::-1])[::-1]
        assert [tokens for tokens, _ in again] == [tokens for tokens, _ in found]
        llm.update_params(llm.params)
        assert answers(llm, PROMPTS) == found
    with LLM(folder, dtype="float32", **SHAPES) as llm:
        assert sum(group.block_bytes for group in llm.memory_report().groups) == 2 * narrow
        want = answers(llm, PROMPTS)
    for (_, logprobs), (_, others) in zip(found, want, strict=True):
        assert abs(logprobs[0] - others[0]) < 0.05  # the first token's, as later ones may follow another


def test_new_weights_are_given_as_a_state_dict(folder, tmp_path):
    other = make_checkpoint("llama", tmp_path, seed=1)
    with LLM(str(tmp_path), dtype="bfloat16", **SHAPES) as llm:
        want = answers(llm, PROMPTS[:1])
    with LLM(folder, dtype="bfloat16", **SHAPES) as llm:
        assert answers(llm, PROMPTS[:1]) != want
        llm.update_params(other.state_dict(), cast=True)
        assert answers(llm, PROMPTS[:1]) == want


def test_bits_depend_on_the_sequence_alone_with_deterministic(folder):
    with LLM(folder, dtype="bfloat16", deterministic=True, **SHAPES) as llm:
        together = answers(llm, PROMPTS)
        assert [answers(llm, [prompt])[0] for prompt in PROMPTS] == together


def test_several_devices_are_refused_with_what_to_use_instead():
    with pytest.raises(ValueError, match=r"dtype='bfloat16' on 2 CPU devices is refused.* use dtype='float32'"):
        check_compute_dtype("bfloat16", "cpu", 2)


def test_a_base_install_is_told_what_to_install(monkeypatch):
    monkeypatch.setattr("jpaged.engine.sizes.has_cpu_loops", lambda: False)
    with pytest.raises(ValueError, match=r"needs compiled loops, which Numba makes: pip install '\.\[cpu\]'"):
        check_compute_dtype("bfloat16", "cpu")


@pytest.mark.parametrize("platform", ["gpu", "cuda", "tpu"])
def test_other_devices_compute_in_it(platform):
    check_compute_dtype("bfloat16", platform, 8)


def test_auto_is_float32_on_a_cpu(folder):
    with LLM(folder, **SHAPES) as llm:
        assert llm.dtype == np.float32
