"""Speculation changes no bit of any drawn batch: requests of any parameters, seeds and numbers of outputs, beside each
other, in large pools and in small ones, of models with attention and with recurrent layers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from checkpoints import make_checkpoint
from draft_settings import make_drafts_free
from hypothesis import given, settings
from hypothesis import strategies as st
from test_speculation import PARAMS, PROMPTS, SETTINGS, facts
from thorough import examples
from tiny_chat_model import byte_level_tokenizer, make_chat_model

from jpaged import LLM, Layers, NGram

pytestmark = pytest.mark.nightly

PAGES = {"attention": 60, "mamba2": 60, "jamba": 100}
"""Model -> large pages of a small pool, in which every request that is drawn fits alone."""
WAYS = {"n-grams": NGram(4, longest=3, shortest=1), "first layers": Layers(1, tokens=3)}
TEXTLESS = [name for name, its in PARAMS.items() if not (its.stop or its.bad_words or its.structured_outputs)]
"""Parameters that need no tokenizer."""


@pytest.fixture(scope="module", params=["attention", "mamba2", "jamba"])
def model(request, tmp_path_factory):
    """Deterministic engines of one checkpoint: one without drafts, and those with them by (way, pool). Drafts cost
    nothing, so that all that can be made are."""
    folder = tmp_path_factory.mktemp(request.param)
    has_text = request.param == "attention"
    if has_text:
        make_chat_model(folder)
        byte_level_tokenizer().save_pretrained(folder)
    else:
        make_checkpoint(request.param, folder)
    of_all = SETTINGS | {"max_num_batched_tokens": 64, "deterministic": True, "state_checkpoint_interval": 16}
    of_all["cumulative_logprobs"] = True
    plain = LLM(str(folder), **of_all)
    small = {"kv_cache_memory_bytes": PAGES[request.param] * plain.memory_report().page_bytes}
    with pytest.MonkeyPatch.context() as patch:
        make_drafts_free(patch)
        drafting = {
            (way, pool): LLM(str(folder), speculative=how, preemption_mode="swap", **of_all | sizes)
            for way, how in WAYS.items()
            for pool, sizes in (("large", {}), ("small", small))
        }
    return SimpleNamespace(plain=plain, drafting=drafting, names=sorted(PARAMS if has_text else TEXTLESS))


def params_of(name, seed, n, most):
    """Parameters by their name, with another seed, number of outputs and length."""
    its = PARAMS[name]
    n = n if its.temperature else 1
    return replace(its, seed=seed, n=n, max_tokens=most, min_tokens=min(its.min_tokens, most))


def requests(names):
    """Batches of requests, each a prompt and its parameters."""
    drawn = st.builds(params_of, st.sampled_from(names), st.integers(0, 99), st.integers(1, 3), st.integers(1, 24))
    return st.lists(st.tuples(st.sampled_from(PROMPTS), drawn), min_size=1, max_size=6)


@settings(max_examples=examples(30), deadline=None)
@given(data=st.data(), way=st.sampled_from(sorted(WAYS)), pool=st.sampled_from(["large", "small"]))
def test_drafts_change_no_bit_of_any_batch(model, data, way, pool):
    asked = data.draw(requests(model.names))
    prompts, params = [{"prompt_token_ids": prompt} for prompt, _ in asked], [its for _, its in asked]
    drafting = model.drafting[way, pool]
    found, wanted = (
        facts(llm.generate(prompts, params, use_tqdm=False), exact=True) for llm in (drafting, model.plain)
    )
    assert found == wanted
    drafting.control.engine.memory.check_invariants()
    assert drafting.control.engine.memory.num_used_blocks == 0


def test_drafts_were_kept_on_the_way(model):
    assert sum(llm.stats().num_accepted_tokens for llm in model.drafting.values()) > 0
