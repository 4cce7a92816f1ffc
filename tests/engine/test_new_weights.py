"""Weights are replaced while requests run: what becomes of them, of pins and of cached KV."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import jax
import pytest
import torch
from flax import nnx
from tiny_chat_model import make_chat_model
from transformers import DynamicCache

from jpaged import LLM, AsyncLLM, BeamSearchParams, NGram, SamplingParams

SETTINGS = {"dtype": "float32", "block_size": 8, "max_num_seqs": 4, "max_model_len": 96, "max_num_batched_tokens": 24}
PROMPT = [*range(5, 45)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, detokenize=False)
DRAWN = SamplingParams(temperature=1.0, seed=3, max_tokens=30, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The folder of the old weights, and both weights on torch."""
    folder = tmp_path_factory.mktemp("old")
    old = make_chat_model(folder)[0]
    return str(folder), old, make_chat_model(tmp_path_factory.mktemp("new"), seed=1)[0]


@pytest.fixture(scope="module")
def new(models):
    """The new weights, in the engine's tree."""
    with LLM(models[0], **SETTINGS) as llm:
        llm.update_params(models[2].state_dict())
        return jax.tree.map(lambda leaf: leaf + 0, llm.params)


@pytest.fixture(scope="module")
def fresh(models, new):
    """An engine that has never known but the new weights."""
    with LLM(models[0], **SETTINGS) as llm:
        llm.update_params(new)
        yield llm


def ids(tokens):
    return {"prompt_token_ids": list(tokens)}


def begun(llm, params, prompts=(PROMPT,), deltas=4):
    """Streams that have begun, and the tokens they gave; several may be waiting or swapped."""
    stream = llm.stream([ids(prompt) for prompt in prompts], params)
    got = [next(stream) for _ in range(deltas)]
    return stream, got


def whole(got, stream):
    """Each prompt's outputs, in order of prompt and index."""
    tokens: dict[tuple[int, int], list[int]] = {}
    for delta in [*got, *stream]:
        tokens.setdefault((delta.prompt_index, delta.index), []).extend(delta.token_ids)
    return tokens


def so_far(llm):
    return [
        list(seq.token_ids) for request in llm.control.engine.requests.unfinished.values() for seq in request.sequences
    ]


def continued(fresh, tokens, params):
    left = params.max_tokens - (len(tokens) - len(PROMPT))
    answer = fresh.generate(ids(tokens), replace(params, max_tokens=left), use_tqdm=False)[0].outputs[0]
    return [*tokens[len(PROMPT) :], *answer.token_ids]


SERVINGS = {
    "plain": {},
    "deterministic": {"deterministic": True},
    "guessing": {"speculative": NGram(3)},
    "swapping": {"preemption_mode": "swap", "pages": 14},
    "finding blocks in host memory": {"kv_offloading_size": 1 / 64, "kv_offloading_break_even": 1, "pages": 14},
}


@pytest.mark.parametrize("name", SERVINGS)
def test_recomputed_requests_go_on_as_the_new_weights_would_after_their_tokens(models, new, fresh, name):
    settings = dict(SERVINGS[name])
    if pages := settings.pop("pages", None):
        settings["kv_cache_memory_bytes"] = pages * fresh.memory_report().page_bytes
    prompts = [PROMPT, [*PROMPT[:16], *range(60, 84)], [*range(90, 130)]]
    with LLM(models[0], **{**SETTINGS, **settings}) as llm:
        stream, got = begun(llm, DRAWN, prompts, deltas=12)
        llm.update_params(new)
        tokens = so_far(llm)
        assert any(len(its) > len(PROMPT) for its in tokens)
        assert list(whole(got, stream).values()) == [
            continued(fresh, its, DRAWN) for its in sorted(tokens, key=lambda its: prompts.index(its[:40]))
        ]
        again = llm.generate(ids(PROMPT), DRAWN, use_tqdm=False)[0]
        assert again.outputs[0].token_ids == fresh.generate(ids(PROMPT), DRAWN, use_tqdm=False)[0].outputs[0].token_ids


def test_several_outputs_and_beams_are_recomputed_together(models, new, fresh):
    params = replace(DRAWN, n=3)
    with LLM(models[0], **SETTINGS) as llm:
        stream, got = begun(llm, params, deltas=7)
        llm.update_params(new)
        tokens, found = so_far(llm), whole(got, stream)
        assert len(tokens) == len(found) == 3
        for index, its in enumerate(tokens):
            assert found[0, index][: len(its) - len(PROMPT)] == its[len(PROMPT) :]
            assert len(found[0, index]) == params.max_tokens


def test_weights_of_a_state_dict_stay_as_they_were_while_the_trainer_goes_on(models, fresh):
    with LLM(models[0], **SETTINGS) as llm:
        training = {name: tensor.clone() for name, tensor in models[2].state_dict().items()}
        llm.update_params(training)
        want = llm.generate(ids(PROMPT), GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        for tensor in training.values():
            tensor.mul_(-3)  # as optimisers do, in its own memory
        before, after = jax.tree.leaves(fresh.params), jax.tree.leaves(llm.params)
        assert all((one == other).all() for one, other in zip(before, after, strict=True))
        assert llm.reset_prefix_cache()
        assert llm.generate(ids(PROMPT), GREEDY, use_tqdm=False)[0].outputs[0].token_ids == want


def test_a_beam_search_begins_again_with_the_new_weights(models, new, fresh):
    params = BeamSearchParams(beam_width=3, max_tokens=50, ignore_eos=True)

    async def search():
        async with AsyncLLM(models[0], **SETTINGS) as llm:
            task = asyncio.create_task(llm.beam_search(ids(PROMPT), params, "beams"))
            while not llm.stats().num_output_tokens and not task.done():
                await asyncio.sleep(0.001)
            await llm.update_params(new)
            return task.done(), await task

    ended_before, found = asyncio.run(search())
    want = fresh.beam_search(ids(PROMPT), params, use_tqdm=False)[0]
    assert not ended_before
    assert [answer.token_ids for answer in found.outputs] == [answer.token_ids for answer in want.outputs]


def test_finished_on_old_kv_they_read_it_with_the_new_weights_and_nobody_else_does(models, new, fresh):
    _, old_torch, new_torch = models
    with LLM(models[0], **SETTINGS) as llm:
        stream, got = begun(llm, GREEDY)
        llm.update_params(new, running="finish")
        (tokens,) = so_far(llm)
        computed = llm.stats().num_computed_tokens
        other = llm.generate(ids(PROMPT), GREEDY, use_tqdm=False)[0]
        assert other.num_cached_tokens == 0
        assert other.outputs[0].token_ids == fresh.generate(ids(PROMPT), GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        found = whole(got, stream)[0, 0]
        assert found == on_old_kv(old_torch, new_torch, tokens)
        assert llm.stats().num_computed_tokens - computed <= len(PROMPT) + 2 * GREEDY.max_tokens, (
            "its KV was not computed again"
        )
        later = [*PROMPT, *found]
        hit = llm.generate(ids(later), GREEDY, use_tqdm=False)[0]
        assert hit.num_cached_tokens <= len(PROMPT), "what it wrote behind old KV is nobody's prefix"
        assert hit.outputs[0].token_ids == fresh.generate(ids(later), GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def on_old_kv(old, new, tokens):
    """Return what torch generates greedily when all tokens but the last were computed by the old weights."""
    with torch.no_grad():
        cache = old(torch.tensor([tokens[:-1]]), past_key_values=DynamicCache(), use_cache=True).past_key_values
        generated = list(tokens)
        while len(generated) < len(PROMPT) + GREEDY.max_tokens:
            step = new(torch.tensor([generated[-1:]]), past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            generated.append(int(step.logits[0, -1].argmax()))
    return generated[len(PROMPT) :]


def test_aborted_requests_end_and_leave_nothing(models, new):
    with LLM(models[0], **SETTINGS) as llm:
        stream, got = begun(llm, replace(DRAWN, n=2), [PROMPT, PROMPT[:20], PROMPT[5:]])
        llm.update_params(new, running="abort")
        ends = {(d.prompt_index, d.index): d.finish_reason for d in [*got, *stream]}
        assert set(ends.values()) == {"abort"} and len(ends) == 6
        assert llm.stats().num_running == 0 and all(not g.used for g in llm.memory_report().groups)


@pytest.mark.parametrize("running", ["recompute", "finish", "abort"])
def test_pinned_prefixes_are_computed_again(models, new, fresh, running):
    with LLM(models[0], **SETTINGS) as llm:
        pinned = llm.pin_prefix(ids(PROMPT))
        stream, _ = begun(llm, GREEDY)
        llm.update_params(new, running=running)
        stream.close()
        llm.generate(ids([99]), GREEDY, use_tqdm=False)
        answer = llm.generate(ids([*PROMPT, 7]), GREEDY, use_tqdm=False)[0]
        assert answer.num_cached_tokens == pinned.num_tokens == 40
        want = fresh.generate(ids([*PROMPT, 7]), GREEDY, use_tqdm=False)[0]
        assert answer.outputs[0].token_ids == want.outputs[0].token_ids
        llm.unpin(pinned)


@pytest.mark.parametrize("running", ["recompute", "finish", "abort"])
def test_clients_of_an_async_engine_go_on_or_are_told(models, new, fresh, running):
    async def serve():
        async with AsyncLLM(models[0], **SETTINGS) as llm:

            async def client(name):
                return [output async for output in llm.generate(ids(PROMPT), replace(DRAWN, max_tokens=50), name)][-1]

            tasks = [asyncio.create_task(client(str(i))) for i in range(6)]  # two of them wait
            while llm.stats().num_output_tokens < 8:
                await asyncio.sleep(0.001)
            await llm.update_params(new, running=running)
            with pytest.raises(ValueError, match="running='stop' is not one of"):
                await llm.update_params(new, running="stop")
            return [output.outputs[0] for output in await asyncio.gather(*tasks)]

    outputs = asyncio.run(serve())
    assert [output.finish_reason for output in outputs] == ["abort" if running == "abort" else "length"] * 6
    if running != "abort":
        want = fresh.generate(ids(PROMPT), replace(DRAWN, max_tokens=50), use_tqdm=False)[0].outputs[0].token_ids
        assert 2 <= [output.token_ids for output in outputs].count(want) < 6, "two waited, others had begun before"


def test_refused_weights_leave_running_requests_alone(models, fresh):
    with LLM(models[0], **SETTINGS) as llm:
        want = llm.generate(ids(PROMPT), GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        stream, got = begun(llm, GREEDY)
        leaves, tree = jax.tree.flatten(llm.params)
        with pytest.raises(ValueError, match="the engine's is"):
            llm.update_params(jax.tree.unflatten(tree, [leaves[0][:-1], *leaves[1:]]))
        for other in (None, 5, [1], "weights", (1, 2, 3)):
            with pytest.raises(ValueError, match=f"new weights are of type {type(other).__name__}: give a tree like"):
                llm.update_params(other)
        assert whole(got, stream)[0, 0] == want


def test_nnx_states_are_taken_as_they_are_and_a_copy_outlives_its_source(models, new, fresh):
    want = fresh.generate(ids(PROMPT), GREEDY, use_tqdm=False)[0].outputs[0].token_ids

    class Tagged(nnx.Param):
        """A trainer's own kind of variable."""

    def tagged(state):
        return jax.tree.map(
            lambda v: Tagged(v.get_value(), sharding_hint="x"), state, is_leaf=lambda v: isinstance(v, nnx.Variable)
        )

    with LLM(models[0], **SETTINGS) as llm:
        old = jax.tree.map(lambda leaf: leaf + 0, llm.params)
        graphdef = llm.trainable().graphdef
        module = nnx.merge(graphdef, new)
        for form in (module, nnx.split(module), nnx.to_pure_dict(new), tagged(new)):
            llm.update_params(old)
            llm.update_params(form)
            assert llm.generate(ids(PROMPT), GREEDY, use_tqdm=False)[0].outputs[0].token_ids == want
        source = jax.tree.map(lambda leaf: leaf + 0, new)
        llm.update_params(source, copy=True)
        jax.tree.map(lambda leaf: leaf.delete(), source)
        assert llm.generate(ids(PROMPT), GREEDY, use_tqdm=False)[0].outputs[0].token_ids == want
