"""Two allocators on the real engine: the same tokens, and more sequences at once where memory is not wasted."""

import pytest
import thorough

from jpaged.benchmarks.memory_real import SYSTEMS, RealRun, _build, _requests, page, run, table
from jpaged.benchmarks.memory_real_models import MODELS, RealModel, keeping_all
from jpaged.benchmarks.random_model import gemma3_config
from jpaged.loading.hugging_face import transformers


def small_gemma3():
    return transformers().Gemma3TextConfig(**gemma3_config(hidden=128, mlp=96, layers=6, vocab=101, window=16))


SMALL = RealModel("small", "a small one", small_gemma3, 3 << 10, keeping_all)


def test_both_allocators_generate_the_same_and_releasing_windows_runs_more_at_once():
    said = []
    largest, jenga = run(12, 0, said.append, [SMALL])
    assert largest.tokens == jenga.tokens
    assert len(set(map(tuple, jenga.tokens))) > 6, "requests that differ"
    assert jenga.batch > 1.5 * largest.batch and jenga.steps < largest.steps
    assert said == ["small"]
    assert largest.compiled == jenga.compiled == 0, "programs were compiled before the run that is told"
    assert jenga.computed < largest.computed, "preempted requests compute their tokens again"
    assert "12 of 12 |" in table([largest, jenga])
    text = page([largest, jenga], "jpaged bench memory-real", "2 cores", [SMALL])
    assert table([largest, jenga]) in text and "- **small**: a small one; 3 MiB of KV" in text


def real_run(system, **more):
    counts = {"batch": 2.0, "preemptions": 0, "steps": 100, "seconds": 4.0, "cpu_seconds": 5.0, "computed": 900}
    return RealRun(**{"model": "small", "system": system, "compiled": 0, "tokens": [[1] * 200]} | counts | more)


def test_the_page_says_what_steps_and_their_time_make_of_the_cpus_seconds():
    largest, jenga = real_run("largest page", computed=1000), real_run("jpaged", batch=4.0, steps=50, cpu_seconds=4.0)
    text = page([largest, jenga], "x", "y", [SMALL])
    assert "| small | jpaged | 4.0 | 0 | 50 | 900 | 80.0 | 50.0 | 50.0 |" in text
    assert "| small | 2.00 | 0.90 | 0.50 | 1.60 | 1.00 | 1.25 | 1 of 1 |" in text
    assert (
        "- **small**: 0.50 times the steps with 2.00 times the batch; 100 tokens fewer are computed; a step takes 1.60 "
        "times the CPU's time."
    ) in text
    assert "programs are compiled by a run before these." in text


def test_programs_that_are_compiled_while_the_clock_runs_are_told():
    runs = [real_run("largest page", compiled=3), real_run("jpaged")]
    assert "by a run before these, but for these many: small, largest page 3." in page(runs, "x", "y", [SMALL])


@pytest.mark.skipif(not thorough.NIGHTLY, reason="engines of a minute's compilation")
@pytest.mark.parametrize(("name", "length"), [("Gemma 3 + images", 64), ("Llama 3.2 Vision", 1)])
def test_requests_with_images_have_their_own_and_every_place_is_the_images_token(name, length):
    (model,) = (model for model in MODELS if model.name == name)
    built = _build(model, SYSTEMS[1])
    try:
        requests = _requests(built, model, 2, seed=0)
    finally:
        built.engine.close()
    for request in requests:
        assert [image.length for image in request.images] == [length] * model.images
        for image in request.images:
            places = request.prompt_token_ids[image.start : image.stop]
            assert set(places) == {built.model_config.image_token_id}
    assert len({image.digest for request in requests for image in request.images}) == 2 * model.images


@pytest.mark.skipif(not thorough.NIGHTLY, reason="a minute a model")
@pytest.mark.parametrize("model", MODELS[1:], ids=lambda model: model.name)
def test_groups_of_every_kind_run_more_at_once_than_the_largest_page(model):
    largest, jenga = run(8, 0, lambda said: None, [model])
    assert jenga.batch > largest.batch
