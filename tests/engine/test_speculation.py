"""Speculation changes no token: outputs with drafts are those without, whatever is asked for, however it is served."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from checkpoints import make_checkpoint
from draft_settings import make_drafts_free
from few_shapes import run_in_few_shapes
from near import Near
from tiny_chat_model import VOCAB_SIZE, byte_level_tokenizer, make_chat_model

from jpaged import LLM, AsyncLLM, DraftModel, Layers, NGram, SamplingParams, StructuredOutputsParams
from jpaged.sampling_params import BeamSearchParams

SETTINGS = {"dtype": "float32", "max_model_len": 160, "block_size": 8, "max_num_seqs": 24}
RNG = np.random.default_rng(7)
FEW = RNG.integers(3, VOCAB_SIZE, 6)
PROMPTS = [RNG.choice(FEW, int(n)).tolist() for n in (5, 11, 30, 45, 23, 8)]
"""Prompts of few tokens, so that drafts are found for almost every place."""
ALLOWED = FEW.tolist()

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.2, seed=3, max_tokens=24, ignore_eos=True)
PARAMS = {
    "greedy": GREEDY,
    "temperature": SAMPLED,
    "few tokens": replace(SAMPLED, allowed_token_ids=ALLOWED),
    "top-k": replace(SAMPLED, top_k=3),
    "top-p": replace(SAMPLED, top_p=0.4),
    "min-p": replace(SAMPLED, min_p=0.3),
    "penalties": replace(
        SAMPLED, presence_penalty=0.4, frequency_penalty=0.5, repetition_penalty=1.3, allowed_token_ids=ALLOWED
    ),
    "bias": replace(GREEDY, logit_bias={ALLOWED[0]: 8.0, ALLOWED[1]: 7.5, ALLOWED[2]: 8.0}),
    "min_tokens": replace(
        SAMPLED, ignore_eos=False, stop_token_ids=ALLOWED[:1], min_tokens=9, allowed_token_ids=ALLOWED
    ),
    "stop strings": replace(SAMPLED, stop=["a", "xy", "Q"], min_tokens=2),
    "bad words": replace(SAMPLED, bad_words=["ab", "c", "de"], allowed_token_ids=[*ALLOWED, *range(60, 90)]),
    "logprobs": replace(SAMPLED, logprobs=3, allowed_token_ids=ALLOWED),
    "prompt_logprobs": replace(GREEDY, prompt_logprobs=2, logprobs=0),
    "several outputs": replace(SAMPLED, n=3, allowed_token_ids=ALLOWED),
    "regex": SamplingParams(
        temperature=1.5,
        seed=5,
        max_tokens=30,
        structured_outputs=StructuredOutputsParams(regex="(ab|cd|abc)+x[0-9]{2,6}"),
    ),
    "regex and limits": SamplingParams(
        temperature=1.5,
        seed=5,
        max_tokens=30,
        min_tokens=6,
        bad_words=["ab"],
        structured_outputs=StructuredOutputsParams(regex="[a-d]+"),
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("speculation")
    make_chat_model(path)
    byte_level_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def engines(folder):
    """Engines by their settings, made once. Drafts cost nothing in them, so that all that can be made are."""
    made: dict[tuple, LLM] = {}

    def engine(**settings) -> LLM:
        key = tuple(sorted((name, str(value)) for name, value in settings.items()))
        if key not in made:
            pages = settings.pop("pages", None)
            if pages is not None:
                settings["kv_cache_memory_bytes"] = pages * engine().memory_report().page_bytes
            with pytest.MonkeyPatch.context() as patch:
                make_drafts_free(patch)
                made[key] = LLM(folder, **{"max_num_batched_tokens": 64} | SETTINGS | settings)
        return made[key]

    return engine


NGRAM = NGram(6, longest=3, shortest=1)
WAYS = {"n-grams": NGRAM, "first layers": Layers(2, tokens=3)}


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    """A folder with a model of window layers and the same vocabulary, whose KV blocks live otherwise."""
    path = tmp_path_factory.mktemp("draft")
    make_checkpoint("mistral-window", path, 1)
    return str(path)


def facts(outputs, *, exact: bool = False) -> list:
    """Everything of the outputs but times; log-probabilities to 1e-3, or all their bits."""

    def number(x: float) -> str | Near:
        return float(x).hex() if exact else Near(x)

    def table(rows) -> list | None:
        if rows is None:
            return None
        return [row and {t: (number(p.logprob), p.rank) for t, p in row.items()} for row in rows]

    found = []
    for output in outputs:
        for o in output.outputs:
            total = [float(o.cumulative_logprob).hex()] if exact else []
            found.append((o.token_ids, o.text, o.finish_reason, o.stop_reason, table(o.logprobs), *total))
        found.append(table(output.prompt_logprobs))
    return found


def serve(llm, params, *, prompts=PROMPTS):
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    assert llm.control.engine.memory.num_used_blocks == 0
    return outputs


SHORT = ("stop strings",)
"""Parameters under which outputs may end before a draft is worth its while."""


def test_prompts_are_scored_in_steps_whose_drafts_the_device_makes(engines, caplog):
    """The second prompt comes in chunks while the first, which is short, has drafts."""
    plain, drafting = engines(), engines(speculative=WAYS["first layers"])
    prompts = [PROMPTS[0], (10 * PROMPTS[3])[:130]]
    params = [PARAMS["few tokens"], replace(PARAMS["prompt_logprobs"], max_tokens=2)]
    found, wanted = (facts(serve(llm, params, prompts=prompts)) for llm in (drafting, plain))
    assert found == wanted and not caplog.records, "no step failed"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PARAMS)
def test_drafts_change_nothing_under_any_parameter(engines, name, way):
    plain, drafting = engines(), engines(speculative=WAYS[way])
    before = drafting.stats().num_draft_tokens
    assert facts(serve(drafting, PARAMS[name])) == facts(serve(plain, PARAMS[name]))
    assert name in SHORT or drafting.stats().num_draft_tokens > before


def test_a_batch_of_all_parameters_gives_each_what_it_gets_without_drafts(engines):
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(PARAMS))]
    each = [replace(p, n=min(p.n, 2)) for p in PARAMS.values()]
    plain, drafting = engines(), engines(speculative=NGRAM)
    assert facts(serve(drafting, each, prompts=prompts)) == facts(serve(plain, each, prompts=prompts))


@pytest.mark.parametrize(("way", "mode"), [("n-grams", "swap"), ("first layers", "recompute")])
def test_preemption_and_drafts_together_change_nothing(engines, mode, way):
    params = [replace(PARAMS["few tokens"], seed=i, max_tokens=40, n=1 + (i == 2)) for i in range(12)]
    prompts = PROMPTS * 2
    small = engines(speculative=WAYS[way], pages=40, preemption_mode=mode)
    outputs = serve(small, params, prompts=prompts)
    assert any(o.metrics.num_preemptions for o in outputs) and small.stats().num_accepted_tokens > 0
    assert facts(outputs) == facts(serve(engines(), params, prompts=prompts))


@pytest.mark.parametrize("way", WAYS)
def test_prefix_hits_and_drafts_together_change_nothing(engines, way):
    """The second time all of prompt and output is in the cache, drafts that were lost are not."""
    drafting, params = engines(speculative=WAYS[way]), PARAMS["few tokens"]
    first = serve(drafting, params)
    longer = [p + o.outputs[0].token_ids[:-1] for p, o in zip(PROMPTS, first, strict=True)]
    again = serve(drafting, params, prompts=longer)
    assert all(o.num_cached_tokens >= len(p) // 8 * 8 - 8 for o, p in zip(again, longer, strict=True))
    plain = engines(enable_prefix_caching=False)
    assert facts(again) == facts(serve(plain, params, prompts=longer))


@pytest.mark.parametrize("way", WAYS)
def test_deterministic_outputs_agree_to_the_last_bit(engines, way):
    params = [replace(PARAMS["logprobs"], seed=i) for i in range(len(PROMPTS))]
    plain, drafting = engines(deterministic=True), engines(deterministic=True, speculative=WAYS[way])
    assert facts(serve(drafting, params), exact=True) == facts(serve(plain, params), exact=True)
    assert drafting.stats().num_accepted_tokens > 0


@pytest.mark.parametrize("settings", [{}, {"pages": 60, "preemption_mode": "swap"}], ids=str)
def test_a_draft_model_changes_nothing(engines, small_model, settings):
    """Its KV lies beside the model's: it is preempted, swapped and found in the cache with it."""
    drafting = engines(speculative=DraftModel(small_model, tokens=3), **settings)
    assert len(drafting.memory_report().groups) > len(engines().memory_report().groups)
    params = [replace(PARAMS["few tokens"], seed=i, n=1 + (i == 2)) for i in range(12)]
    want = facts(serve(engines(), params, prompts=PROMPTS * 2))
    for _ in range(2):
        outputs = serve(drafting, params, prompts=PROMPTS * 2)
        assert facts(outputs) == want
    assert drafting.stats().num_draft_tokens > 100


def test_all_drafts_of_the_model_itself_are_kept(engines, folder):
    """The draft runs the same race with the same clocks, so that equal logits mean equal draws."""
    drafting = engines(speculative=DraftModel(folder, tokens=3))
    params = [replace(SAMPLED, seed=i) for i in range(len(PROMPTS))]
    assert facts(serve(drafting, params)) == facts(serve(engines(), params))
    assert drafting.stats().acceptance_rate > 0.97


def test_a_draft_model_of_another_vocabulary_is_refused(folder, tmp_path):
    make_checkpoint("llama", tmp_path, 0, vocab_size=219)
    with pytest.raises(ValueError, match="vocabulary of 219 tokens, and the model one of 211"):
        LLM(folder, speculative=DraftModel(tmp_path), **SETTINGS)


def test_first_layers_are_fewer_than_all(folder):
    with pytest.raises(ValueError, match="layers=3 must be below the model's 3"):
        LLM(folder, speculative=Layers(3), **SETTINGS)


def test_a_stream_gives_the_same_tokens_several_at_a_time(engines):
    drafting = engines(speculative=NGRAM)
    want = serve(engines(), GREEDY, prompts=PROMPTS[:2])
    got: dict[int, list[int]] = {0: [], 1: []}
    most = 0
    for delta in drafting.stream([{"prompt_token_ids": p} for p in PROMPTS[:2]], GREEDY):
        got[delta.prompt_index] += delta.token_ids
        most = max(most, len(delta.token_ids))
    assert list(got.values()) == [o.outputs[0].token_ids for o in want]
    assert most > 1


def test_a_stream_that_is_closed_frees_its_blocks_and_the_next_request_is_unharmed(engines):
    drafting = engines(speculative=NGRAM)
    stream = drafting.stream({"prompt_token_ids": PROMPTS[3]}, PARAMS["few tokens"])
    next(stream), next(stream)
    stream.close()
    assert drafting.control.engine.memory.num_used_blocks == 0
    assert facts(serve(drafting, GREEDY)) == facts(serve(engines(), GREEDY))


@pytest.mark.parametrize("way", WAYS)
def test_clients_of_asyncio_get_the_tokens_that_they_get_without_drafts(engines, way):
    """One of them goes away while its drafts are verified."""
    drafting, params = engines(speculative=WAYS[way]), PARAMS["few tokens"]
    before = drafting.stats().num_accepted_tokens

    async def client(engine: AsyncLLM, number: int, most: int | None):
        async for output in engine.generate({"prompt_token_ids": PROMPTS[number]}, params, str(number)):
            if most is not None and len(output.outputs[0].token_ids) >= most:
                return None
        return output

    async def serve_all():
        async with AsyncLLM.from_llm(drafting) as engine:
            return await asyncio.gather(*(client(engine, i, 5 if i == 3 else None) for i in range(len(PROMPTS))))

    outputs = asyncio.run(asyncio.wait_for(serve_all(), 60))
    assert outputs.pop(3) is None
    stay = [prompt for number, prompt in enumerate(PROMPTS) if number != 3]
    assert facts(outputs) == facts(serve(engines(), params, prompts=stay))
    assert drafting.stats().num_accepted_tokens > before
    assert drafting.control.engine.memory.num_used_blocks == 0


def test_beams_are_found_as_without_drafts(engines):
    params = BeamSearchParams(beam_width=3, max_tokens=10)
    prompts = [{"prompt_token_ids": p} for p in PROMPTS[:2]]
    want, got = (llm.beam_search(prompts, params, use_tqdm=False) for llm in (engines(), engines(speculative=NGRAM)))
    assert [[o.token_ids for o in x.outputs] for x in got] == [[o.token_ids for o in x.outputs] for x in want]


def test_a_failing_step_is_mended_and_the_tokens_stay(engines, monkeypatch):
    drafting, params = engines(speculative=NGRAM), PARAMS["few tokens"]
    want = facts(serve(engines(), params))
    runner, calls = drafting.control.engine.runner, iter(range(1000))
    dispatch = runner.dispatch_all

    def failing(steps):
        if next(calls) == 9:
            raise RuntimeError("a step fails")
        return dispatch(steps)

    monkeypatch.setattr(runner, "dispatch_all", failing)
    with pytest.raises(RuntimeError, match="a step fails"):
        serve(drafting, params)
    assert facts(serve(drafting, params)) == want


def test_the_metrics_count_drafts(engines):
    drafting = engines(speculative=NGRAM)
    serve(drafting, GREEDY)
    stats, named = drafting.stats(), {metric.name: metric for metric in drafting.get_metrics()}
    assert 0 < stats.num_accepted_tokens <= stats.num_draft_tokens
    assert 0 < stats.acceptance_rate <= 1
    assert named["jpaged:spec_decode_num_accepted_tokens"].value == stats.num_accepted_tokens
    before = stats.num_output_tokens
    outputs = serve(drafting, GREEDY)
    assert drafting.stats().num_output_tokens - before == sum(len(o.outputs[0].token_ids) for o in outputs)


@pytest.mark.parametrize("way", ["n-grams", "a model"])
def test_after_a_warm_up_drafts_compile_nothing(folder, way):
    drafts = {"n-grams": NGram(2), "a model": DraftModel(folder, tokens=2)}[way]
    llm = LLM(folder, speculative=drafts, **SETTINGS | {"max_num_seqs": 4, "max_num_batched_tokens": 64})
    llm.warmup(use_tqdm=False)
    serve(llm, GREEDY)
    assert llm.stats().num_draft_tokens > 0 and llm.stats().num_recompiles == 0
    llm.close()


def test_a_sequence_that_runs_alone_has_rows_for_its_drafts(engines):
    plain, drafting = engines(), engines(speculative=NGRAM, max_num_seqs=1)
    run_in_few_shapes(drafting)
    found = facts(serve(drafting, PARAMS["few tokens"], prompts=PROMPTS[:3]))
    assert found == facts(serve(plain, PARAMS["few tokens"], prompts=PROMPTS[:3]))
    assert drafting.stats().num_accepted_tokens > 0, "others wait, but no row could be theirs"
