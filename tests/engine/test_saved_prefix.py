"""A prefix that one process saves and another loads: hits, the same tokens, and what is refused."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import numpy as np
import pytest
from checkpoints import CHECKPOINTS, make_checkpoint
from few_shapes import run_in_few_shapes

from jpaged import LLM, AsyncLLM, SamplingParams
from jpaged.errors import StateRefused

SETTINGS = {
    "dtype": "float32",
    "block_size": 8,
    "max_model_len": 128,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
WINDOW, HYBRID = "gemma3", "qwen3_next"

FRESH = """
import json, sys
from jpaged import LLM, SamplingParams
folder, saved, prompt, settings = json.loads(sys.argv[1])
llm = LLM(folder, **settings)
length = llm.load_prefix(saved)
params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
(output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
llm.control.engine.memory.check_invariants()
print("answer", json.dumps([length, output.num_cached_tokens, output.outputs[0].token_ids]))
"""


def ask(llm: LLM, tokens: list[int], **prompt):
    (output,) = llm.generate([{"prompt_token_ids": tokens, **prompt}], GREEDY, use_tqdm=False)
    return output.num_cached_tokens, output.outputs[0].token_ids


@pytest.fixture(scope="module", params=[WINDOW, HYBRID])
def model(request, tmp_path_factory):
    """A folder of weights, an engine, a prefix, a prompt that goes on from it, and the tokens of its answer."""
    folder = tmp_path_factory.mktemp(request.param)
    make_checkpoint(request.param, folder)
    llm = LLM(str(folder), **SETTINGS)
    run_in_few_shapes(llm)
    prefix = np.random.default_rng(1).integers(3, CHECKPOINTS[request.param].vocab_size, 75).tolist()
    prompt = [*prefix, 5, 6, 7]
    _, tokens = ask(llm, prompt)
    llm.reset_prefix_cache()
    return str(folder), llm, prefix, prompt, tokens, request.param


def test_a_fresh_process_finds_the_prefix_and_answers_with_the_same_tokens(model, tmp_path):
    folder, llm, prefix, prompt, tokens, _ = model
    saved = llm.save_prefix(tmp_path / "prefix", prefix)
    assert saved.num_tokens == 72 and saved.num_bytes > 0
    assert llm.reset_prefix_cache(), "nothing is held afterwards"
    given = json.dumps([folder, str(tmp_path / "prefix"), prompt, SETTINGS])
    ran = subprocess.run([sys.executable, "-c", FRESH, given], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    (line,) = [line for line in ran.stdout.splitlines() if line.startswith("answer ")]
    assert json.loads(line.removeprefix("answer ")) == [72, 72, tokens]


def test_a_prefix_is_loaded_under_its_salt_or_another_and_over_what_is_cached(model, tmp_path):
    _, llm, prefix, prompt, tokens, _ = model
    llm.save_prefix(tmp_path, prefix, cache_salt="a")
    assert llm.load_prefix(tmp_path) == 72  # it is there already
    assert llm.reset_prefix_cache()
    assert llm.load_prefix(tmp_path) == 72
    assert ask(llm, prompt) == (0, tokens)
    assert ask(llm, prompt, cache_salt="a") == (72, tokens)
    assert llm.load_prefix(tmp_path, cache_salt="b") == 72
    assert ask(llm, prompt, cache_salt="b") == (72, tokens)
    llm.control.engine.memory.check_invariants()
    assert llm.reset_prefix_cache()


def test_a_prefix_of_other_weights_settings_or_bytes_is_refused(model, tmp_path):
    folder, llm, prefix, prompt, tokens, name = model
    llm.save_prefix(tmp_path / "prefix", prefix)
    llm.reset_prefix_cache()
    llm.save_state(tmp_path / "state")
    with pytest.raises(StateRefused, match="holds a saved state, not a prefix"):
        llm.load_prefix(tmp_path / "state")
    with pytest.raises(StateRefused, match=r"holds a prefix, no state: load_prefix\(\) takes it up"):
        llm.load_state(tmp_path / "prefix")
    with pytest.raises(StateRefused, match="has no saved state"):
        llm.load_prefix(tmp_path / "nothing")
    other = LLM(folder, **{**SETTINGS, "block_size": 16})
    with pytest.raises(StateRefused, match=r"its blocks mean something else here, as .*groups"):
        other.load_prefix(tmp_path / "prefix")
    make_checkpoint(name, tmp_path / "others", seed=1)
    with pytest.raises(StateRefused, match="it is of other weights than"):
        LLM(str(tmp_path / "others"), **SETTINGS).load_prefix(tmp_path / "prefix")
    with pytest.raises(StateRefused, match=r"mean something else here, as .*dtype"):
        LLM(folder, **{**SETTINGS, "dtype": "bfloat16"}).load_prefix(tmp_path / "prefix")
    about = tmp_path / "prefix" / "000001" / "host.msgpack"
    content = about.read_bytes()
    about.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(StateRefused, match="is damaged"):
        llm.load_prefix(tmp_path / "prefix")
    assert ask(llm, prompt) == (0, tokens)
    assert llm.reset_prefix_cache()


def test_a_server_saves_and_loads_while_a_client_is_served(model, tmp_path):
    _, llm, prefix, prompt, tokens, _ = model

    async def main():
        engine = AsyncLLM.from_llm(llm)
        try:
            outputs = engine.generate(
                {"prompt_token_ids": [9] * 10}, SamplingParams(max_tokens=90, ignore_eos=True), "r"
            )
            await anext(outputs)
            saved = await engine.save_prefix(tmp_path, prefix)
            loaded = await engine.load_prefix(tmp_path, cache_salt="b")
            given = {"prompt_token_ids": prompt, "cache_salt": "b"}
            answer = [output async for output in engine.generate(given, GREEDY, "s")][-1]
            await outputs.aclose()
            return saved.num_tokens, loaded, answer.num_cached_tokens, answer.outputs[0].token_ids
        finally:
            await engine.shutdown()

    assert asyncio.run(main()) == (72, 72, 72, tokens)
    assert llm.reset_prefix_cache()
