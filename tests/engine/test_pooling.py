"""Vectors, classes and scores of prompts equal those of transformers, in chunks, preempted and from the cache."""

import asyncio
import json
import signal

import numpy as np
import pytest
import torch
from checkpoints import CHECKPOINTS, make_checkpoint
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen3ForSequenceClassification,
    Qwen3ForTokenClassification,
)

from jpaged import LLM, AsyncLLM, PoolingParams, SamplingParams
from jpaged.engine.pooled import RunOptions

RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(3, 211, length).tolist() for length in (1, 5, 24, 40, 57, 33, 48)]
SETTINGS = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "max_model_len": 80, "block_size": 8}


def prompts(ids=PROMPTS):
    return [{"prompt_token_ids": one} for one in ids]


def vectors(outputs):
    return np.array([output.outputs.embedding for output in outputs])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("qwen3")


@pytest.fixture(scope="module")
def hidden(folder):
    """transformers' last hidden states of each prompt."""
    model = make_checkpoint("qwen3", folder)
    with torch.no_grad():
        return [model.model(torch.tensor([ids])).last_hidden_state[0].numpy() for ids in PROMPTS]


@pytest.fixture(scope="module")
def llm(folder, hidden):
    return LLM(str(folder), **SETTINGS)


def unit(rows):
    rows = np.array(rows)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def test_the_last_token_or_the_mean_of_all_is_what_transformers_gives(llm, hidden):
    last = vectors(llm.embed(prompts(), use_tqdm=False))
    np.testing.assert_allclose(last, unit([states[-1] for states in hidden]), atol=2e-5)
    plain = PoolingParams(pooling="mean", normalize=False)
    for _ in range(2):  # the second time the cache holds the prompts, of which a mean reads nothing
        outputs = llm.embed(prompts(), False, plain)
        np.testing.assert_allclose(vectors(outputs), [states.mean(0) for states in hidden], atol=2e-4)
        assert [output.num_cached_tokens for output in outputs] == [0] * len(PROMPTS)
    again = llm.embed(prompts(), use_tqdm=False)
    assert sum(output.num_cached_tokens for output in again) > 100
    np.testing.assert_allclose(vectors(again), last, atol=1e-6)


def test_a_llamas_vectors_are_those_of_transformers_too(tmp_path):
    model = make_checkpoint("llama", tmp_path)
    with torch.no_grad():
        states = [model.model(torch.tensor([ids])).last_hidden_state[0].numpy() for ids in PROMPTS]
    with LLM(str(tmp_path), **SETTINGS) as llm:
        np.testing.assert_allclose(
            vectors(llm.embed(prompts(), use_tqdm=False)), unit([one[-1] for one in states]), atol=2e-5
        )
        means = llm.embed(prompts(), False, PoolingParams(pooling="mean"))
        np.testing.assert_allclose(vectors(means), unit([one.mean(0) for one in states]), atol=2e-5)


def test_leading_numbers_are_normalised_after_the_cut(llm, hidden):
    each = [PoolingParams(dimensions=n) for n in (1, 7, 96)]
    outputs = llm.embed(prompts(PROMPTS[:3]), False, each)
    for output, states, params in zip(outputs, hidden, each, strict=False):
        want = unit([states[-1][: params.dimensions]])[0]
        assert output.outputs.hidden_size == params.dimensions
        np.testing.assert_allclose(output.outputs.embedding, want, atol=2e-5)


def test_preempted_prompts_are_pooled_over_what_was_computed_last(llm, folder, hidden):
    page = llm.memory_report().page_bytes
    slow = {"long_prefill_token_threshold": 2, "preemption_mode": "recompute", "enable_prefix_caching": False}
    tight = LLM(str(folder), **SETTINGS, kv_cache_memory_bytes=12 * page, **slow)
    stream = tight.stream(prompts(PROMPTS[3:4]), SamplingParams(max_tokens=30, ignore_eos=True))
    next(stream)  # grows while the other prompt is computed, and takes its memory
    (output,) = tight.embed(prompts(PROMPTS[5:6]), False, PoolingParams(pooling="mean", normalize=False))
    stream.close()
    np.testing.assert_allclose(output.outputs.embedding, hidden[5].mean(0), atol=2e-4)
    assert tight.stats().num_preemptions > 0
    assert tight.control.engine.memory.num_used_blocks == 0


def test_a_state_that_is_saved_while_vectors_are_computed_has_all_else(llm, tmp_path):
    engine, greedy = llm.control.engine, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    (expected,) = llm.generate(prompts(PROMPTS[2:3]), greedy, use_tqdm=False)
    means = vectors(llm.embed(prompts(PROMPTS[3:5]), False, PoolingParams(pooling="mean")))
    work = llm.pooler.embed(prompts(PROMPTS[3:5]), PoolingParams(pooling="mean"), RunOptions(False, None, None))
    request = llm.input_processor.process(prompts()[2], greedy)
    for each in (request, *work.requests):
        engine.add(each)
    while not 0 < work.requests[0].sequences[0].num_computed < 40:
        engine.step()
    assert not request.sequences[0].finished, "what is saved would be an end"
    assert llm.save_state(tmp_path).num_requests == 1
    while engine.has_work:
        engine.step()
    np.testing.assert_allclose(vectors(work.results()), means, atol=2e-5)
    engine.abort(*work.requests, request)
    assert llm.load_state(tmp_path) == [str(request.request_id)]
    engine.memory.check_invariants()
    (found,) = llm.resume(use_tqdm=False)
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    assert engine.memory.num_used_blocks == 0 and len(engine.scheduler.allocation.free_rows) == 4


@pytest.mark.parametrize("step", [1, 2, 5])
def test_ctrl_c_in_embed_leaves_nothing_behind_and_the_llm_goes_on(llm, monkeypatch, step):
    expected = vectors(llm.embed(prompts(), use_tqdm=False))
    worker, waits = llm.control.engine.runner.worker, []
    fetch = worker.fetch

    def interrupted(arrays):
        waits.append(arrays)
        if len(waits) == step:
            signal.raise_signal(signal.SIGINT)
        return fetch(arrays)

    llm.reset_prefix_cache()  # all of it takes a dozen steps
    with monkeypatch.context() as patch:
        patch.setattr(worker, "fetch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.embed(prompts(), use_tqdm=False)
    assert len(waits) >= step and not llm.control.engine.has_work and not llm.control.engine.requests.awaited
    assert llm.control.engine.memory.num_used_blocks == 0
    np.testing.assert_allclose(vectors(llm.embed(prompts(), use_tqdm=False)), expected, atol=2e-5)
    assert len(llm.generate(prompts(PROMPTS[:1]), SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs) == 1


def after_a_step(llm, monkeypatch, number, action):
    """Do something after a step of the next call, as a signal's handler can."""
    step, done = llm.control.engine.step, []

    def then():
        finished = step()
        done.append(finished)
        if len(done) == number:
            action()
        return finished

    monkeypatch.setattr(llm.control.engine, "step", then)


@pytest.mark.parametrize("method", ["embed", "score"])
def test_a_prompt_that_is_aborted_meanwhile_is_named(llm, monkeypatch, method):
    llm.reset_prefix_cache()
    after_a_step(llm, monkeypatch, 2, lambda: llm.update_params(llm.params, running="abort"))
    with pytest.raises(RuntimeError, match="prompt 1 was aborted before all of it was computed"):
        getattr(llm, method)(prompts([PROMPTS[0], PROMPTS[4]]), use_tqdm=False)
    assert not llm.control.engine.has_work and llm.control.engine.memory.num_used_blocks == 0


def test_what_the_models_folder_says_is_the_default(folder, hidden, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    modules = [{"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    config = tmp_path / "1_Pooling" / "config.json"
    config.write_text(json.dumps({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}))
    found = vectors(LLM(str(tmp_path), **SETTINGS).embed(prompts(), use_tqdm=False))
    np.testing.assert_allclose(found, [states.mean(0) for states in hidden], atol=2e-4)
    config.write_text(json.dumps({"pooling_mode_max_tokens": True}))
    found = vectors(LLM(str(tmp_path), **SETTINGS).embed(prompts(), use_tqdm=False))
    np.testing.assert_allclose(found, [states.max(0) for states in hidden], atol=2e-4)
    config.write_text(json.dumps({"pooling_mode_weightedmean_tokens": True}))
    llm = LLM(str(tmp_path), **SETTINGS)
    with pytest.raises(ValueError, match=r"asks for pooling weightedmean_tokens; known are last, mean, cls, max"):
        llm.embed(prompts(), use_tqdm=False)
    assert len(llm.embed(prompts(), False, PoolingParams(pooling="last"))) == len(PROMPTS)


@pytest.mark.nightly
def test_a_folder_like_qwen3_embeddings_ends_texts_with_a_token_and_begins_queries(folder, hidden, tmp_path):
    """The vector is that token's state; the tokenizer adds it, and the folder of sentence-transformers has the rest."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:200]
    backend = Tokenizer(models.BPE({letter: number + 3 for number, letter in enumerate(letters)} | {"<end>": 2}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(["<end>"])
    backend.post_processor = processors.TemplateProcessing("$A <end>", special_tokens=[("<end>", 2)])
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<end>").save_pretrained(tmp_path)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": number, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(kinds.items())
    ]
    instruction = "Instruct: find\nQuery:"
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    about = {"prompts": {"query": instruction, "document": ""}, "default_prompt_name": None}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(about))
    model = AutoModelForCausalLM.from_pretrained(tmp_path).model.eval()
    texts = ["pages of memory", "a"]
    with LLM(str(tmp_path), **SETTINGS) as llm:
        queries = llm.embed(texts, False, PoolingParams(prompt_name="query"))
        documents = llm.embed(texts, use_tqdm=False)
        cosines = [output.outputs.score for output in llm.score(texts[0], texts, use_tqdm=False)]
    for outputs, before in ((queries, instruction), (documents, "")):
        for text, output in zip(texts, outputs, strict=True):
            ids = [*backend.encode(before + text, add_special_tokens=False).ids, 2]
            assert output.prompt_token_ids == ids
            with torch.no_grad():
                state = model(torch.tensor([ids])).last_hidden_state[0, -1].numpy()
            np.testing.assert_allclose(output.outputs.embedding, state / np.linalg.norm(state), atol=2e-5)
    np.testing.assert_allclose(cosines, vectors(documents) @ vectors(documents)[0], atol=1e-5)


def test_a_folder_whose_vectors_need_another_module_is_refused_by_its_name(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    names = ("Transformer", "CNN", "Normalize")
    modules = [{"idx": i, "path": name, "type": f"sentence_transformers.models.{name}"} for i, name in enumerate(names)]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with LLM(str(tmp_path), **SETTINGS) as llm:
        for asked in (llm.embed, lambda *given: llm.score(*given, prompts()[0])):
            with pytest.raises(ValueError, match=r"makes its vectors by CNN \(modules\.json\), which is not read"):
                asked(prompts()[0])


def test_a_base_model_has_vectors_and_is_refused_to_generate(folder, hidden, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    save_file(bare, tmp_path / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    llm = LLM(str(tmp_path), **SETTINGS)
    found = vectors(llm.embed(prompts(), use_tqdm=False))
    np.testing.assert_allclose(found, unit([states[-1] for states in hidden]), atol=2e-5)
    for refused in (llm.generate, llm.score, llm.stream):
        with pytest.raises(ValueError, match=r"has no vocabulary's head \(lm_head.weight\)"):
            refused(prompts())

    async def ask():
        async with AsyncLLM.from_llm(llm) as engine:
            return [output async for output in engine.generate(prompts()[1], SamplingParams(), "r")]

    with pytest.raises(ValueError, match=r"has no vocabulary's head \(lm_head.weight\)"):
        asyncio.run(ask())


@pytest.mark.parametrize(
    ("family", "labels", "problem"),
    [
        (Qwen3ForSequenceClassification, 3, None),
        (Qwen3ForSequenceClassification, 1, None),
        (Qwen3ForSequenceClassification, 3, "multi_label_classification"),
        (LlamaForSequenceClassification, 3, None),
    ],
    ids=["one of", "one", "several", "of a Llama"],
)
def test_classes_have_the_probabilities_of_transformers(family, labels, problem, tmp_path):
    torch.manual_seed(1)
    config = CHECKPOINTS[family.config_class.model_type]
    config = config.__class__(**config.to_dict() | {"num_labels": labels})
    config.problem_type, config.pad_token_id = problem, 0
    model = family(config).eval()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        want = np.stack([model(torch.tensor([ids])).logits[0].numpy() for ids in PROMPTS])
    llm = LLM(str(tmp_path), **SETTINGS)
    outputs = llm.classify(prompts(), use_tqdm=False)
    np.testing.assert_allclose([output.outputs.logits for output in outputs], want, atol=1e-4)
    assert len(llm.classify([[5] * 80], use_tqdm=False)) == 1
    several = torch.tensor(want).sigmoid() if labels == 1 or problem else torch.tensor(want).softmax(1)
    np.testing.assert_allclose([output.outputs.probs for output in outputs], several, atol=1e-4)
    assert outputs[0].outputs.num_classes == labels
    with pytest.raises(ValueError, match="only embed"):
        llm.generate(prompts())


def test_a_model_that_classifies_tokens_is_refused(tmp_path):
    config = CHECKPOINTS["qwen3"].to_dict() | {"num_labels": 3}
    Qwen3ForTokenClassification(CHECKPOINTS["qwen3"].__class__(**config)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has a tensor score\.bias: it classifies tokens, not prompts"):
        LLM(str(tmp_path), **SETTINGS)


def test_a_prompts_score_is_its_log_probability_and_a_pairs_its_cosine(llm, folder, hidden):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    scores = [output.outputs.score for output in llm.score(prompts(), use_tqdm=False)]
    for ids, score in zip(PROMPTS, scores, strict=True):
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        want = logprobs[torch.arange(len(ids) - 1), torch.tensor(ids[1:], dtype=torch.long)].sum().item()
        assert score == pytest.approx(want, abs=1e-3)
    last = unit([states[-1] for states in hidden])
    one_to_many = llm.score(prompts(PROMPTS[:1]), prompts(PROMPTS[1:]), use_tqdm=False)
    np.testing.assert_allclose([output.outputs.score for output in one_to_many], last[1:] @ last[0], atol=1e-4)
    with pytest.raises(ValueError, match="data_1 has 2 prompts, data_2 3"):
        llm.score(prompts(PROMPTS[:2]), prompts(PROMPTS[2:5]))


def test_a_prompt_of_max_model_len_tokens_is_taken_as_nothing_follows_it(llm, folder):
    whole = RNG.integers(3, 211, 80).tolist()
    pages = -(-80 // SETTINGS["block_size"])
    room = {"kv_cache_memory_bytes": llm.memory_report().page_bytes * pages, "enable_prefix_caching": False}
    with LLM(str(folder), **SETTINGS | room) as tight:  # not a token more would fit
        for one in (llm, tight):
            (vector,) = vectors(one.embed(prompts([whole]), use_tqdm=False))
            assert vector.shape == (96,)
            (score,) = one.score(prompts([whole]), use_tqdm=False)
            (shorter,) = one.score(prompts([whole[:-1]]), use_tqdm=False)
            assert score.outputs.score < shorter.outputs.score
            for asked in (one.embed, one.score):
                with pytest.raises(ValueError, match=r"prompt 0: the prompt has 81 tokens, above max_model_len=80"):
                    asked(prompts([[*whole, 5]]), use_tqdm=False)
    with pytest.raises(ValueError, match="which leaves no room for output"):
        llm.generate(prompts([whole]), SamplingParams(max_tokens=1), use_tqdm=False)


def test_what_cannot_be_is_refused_by_name_and_nothing_is_left(llm):
    with pytest.raises(ValueError, match=r"prompt 1: dimensions=97 is above the model's 96"):
        llm.embed(prompts(PROMPTS[:2]), False, [PoolingParams(), PoolingParams(dimensions=97)])
    with pytest.raises(ValueError, match=r"prompt 0: the prompt has 0 tokens"):
        llm.embed([{"prompt_token_ids": []}], use_tqdm=False)
    with pytest.raises(ValueError, match=r"has no head for classes .*: only embed\(\), generate\(\) and score\(\)$"):
        llm.classify(prompts())
    with pytest.raises(ValueError, match=r"pooling='min' is not one of last, mean, cls, max, mean_sqrt_len"):
        PoolingParams(pooling="min")
    with pytest.raises(ValueError, match=r"dimensions=0"):
        PoolingParams(dimensions=0)
    assert not llm.control.engine.has_work and llm.control.engine.memory.num_used_blocks == 0
