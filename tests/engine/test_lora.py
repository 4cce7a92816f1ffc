"""Low-rank adapters in one batch: what PEFT on torch generates, whatever the pool has room for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from greedy_reference import GREEDY, LENGTHS, assert_same_tokens, random_prompts, torch_greedy
from lora_checkpoints import save_adapter, save_all, torch_model
from safetensors.numpy import load_file, save_file
from test_tensor_parallel import on_eight_devices

from jpaged import LLM, BeamSearchParams, LoRARequest, NGram, SamplingParams, StateRefused
from jpaged.execution.caches.adapters import AdapterCache
from jpaged.execution.compile.recent import recent_programs
from jpaged.loading.load import load_model
from jpaged.loading.lora import AdapterRegistry
from jpaged.memory.tiers import HostMemory

SETTINGS = {
    "enable_lora": True,
    "max_lora_rank": 6,
    "max_loras": 3,
    "block_size": 8,
    "max_model_len": 160,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 24,
}
POOL = 30 * 24576
"""Bytes of 30 large pages of the Llama below: one sequence and its adapter take up to 22."""
NAMES = [None, "small", "all", "some"] * 4


def asked(prompts: list[list[int]]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def references(model: str, adapters: dict[str, str], prompts: list[list[int]], names: list[str | None], guesses=None):
    found = {}
    for name in dict.fromkeys(names):
        mine = [i for i, other in enumerate(names) if other == name]
        torch = torch_model(model, None if name is None else adapters[name])
        its = None if guesses is None else [guesses[i] for i in mine]
        found |= dict(zip(mine, torch_greedy(torch, [prompts[i] for i in mine], guesses=its), strict=True))
    return [found[i] for i in range(len(prompts))]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str]]:
    return save_all("llama", tmp_path_factory.mktemp("lora"))


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3", marks=pytest.mark.nightly)])
def test_a_batch_of_three_adapters_and_none_generates_what_peft_does_in_a_pool_that_evicts_them(
    family: str, tmp_path: Path, llama: tuple[str, dict[str, str]]
):
    model, adapters = llama if family == "llama" else save_all(family, tmp_path)
    prompts = random_prompts(lengths=LENGTHS)
    shared = prompts[0] + prompts[1]
    prompts = [shared[: 8 * (i % 3)] + prompt for i, prompt in enumerate(prompts)]
    tight = LLM(
        model,
        **SETTINGS,
        lora_modules=adapters,
        kv_cache_memory_bytes=POOL if family == "llama" else 30 * 16384,
        preemption_mode="swap" if family == "gemma3" else "recompute",
    )
    outputs = tight.generate(asked(prompts), GREEDY, use_tqdm=False, lora_request=NAMES)
    again = tight.generate(asked(prompts), GREEDY, use_tqdm=False, lora_request=NAMES)
    stats = tight.stats()
    assert stats.num_preemptions > 0, "the pool is to be short"
    assert stats.num_adapter_loads > 3, "an adapter is to be evicted and read again"
    if family == "llama":  # Gemma's two groups leave nothing cached in so small a pool
        assert sum(output.num_cached_tokens for output in again) > 0
    tight.control.engine.memory.check_invariants()
    assert tight.control.engine.memory.num_used_blocks == 0
    guesses = [output.outputs[0].token_ids for output in outputs]
    expected = references(model, adapters, prompts, NAMES, guesses)
    assert_same_tokens(outputs, expected)
    assert_same_tokens(again, expected)


@pytest.mark.nightly
def test_programs_for_adapters_and_their_loading_are_compiled_ahead_and_kept_in_a_folder(
    tmp_path: Path, llama: tuple[str, dict[str, str]]
):
    model, adapters = llama
    small = {**SETTINGS, "max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 64}
    small |= {"max_loras": 2, "kv_cache_memory_bytes": 1 << 20}
    number, _ = LLM.compile_programs(model, tmp_path / "programs", use_tqdm=False, **small)
    recent_programs.clear()
    with LLM(model, lora_modules=adapters, compiled_programs=str(tmp_path / "programs"), **small) as llm:
        assert llm.warmup(use_tqdm=False) == number == llm.control.engine.runner.worker.programs.num_found
        prompts = asked(random_prompts(lengths=(12, 9, 5)))
        llm.generate(prompts, SamplingParams(max_tokens=4), use_tqdm=False, lora_request=["small", "all", None])
        assert (llm.stats().num_adapter_loads, llm.num_recompiles) == (2, 0)


@pytest.fixture(scope="module")
def engine(llama: tuple[str, dict[str, str]]) -> LLM:
    model, adapters = llama
    return LLM(model, **SETTINGS, lora_modules=adapters, kv_cache_memory_bytes=POOL)


PROMPTS = random_prompts(lengths=(9, 17, 33, 21), seed=3)
SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def tokens(outputs: list) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_an_adapter_that_was_dropped_and_read_again_gives_the_same_tokens_and_finds_its_prefix(
    engine: LLM, llama: tuple[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch
):
    (cache,) = (cache for cache in engine.control.engine.runner.spec.caches if isinstance(cache, AdapterCache))
    host = HostMemory()
    bounded = AdapterRegistry(load_model(Path(llama[0])), cache, llama[1], host, most=1)
    monkeypatch.setattr(engine.input_processor, "adapters", bounded)
    prompt, names = asked([PROMPTS[1]]), ("small", "all")
    first = [engine.generate(prompt, SHORT, False, lora_request=name)[0] for name in names]
    assert host.used_adapters == 0, "finished requests are gone, with no need to collect garbage"
    assert host.adapters == bounded.find("all").blocks.nbytes
    again = [engine.generate(prompt, SHORT, False, lora_request=name)[0] for name in names]
    assert tokens(again) == tokens(first) and tokens(first)[0] != tokens(first)[1]
    assert [output.num_cached_tokens for output in again] == [(len(PROMPTS[1]) - 1) // 8 * 8] * 2
    engine.reset_prefix_cache()


def test_no_kv_is_shared_between_adapters_or_with_the_model_itself(engine: LLM):
    prompt = asked([PROMPTS[2]])
    first = [engine.generate(prompt, SHORT, False, lora_request=name)[0] for name in (None, "small", "all")]
    again = [engine.generate(prompt, SHORT, False, lora_request=name)[0] for name in (None, "small", "all")]
    assert [output.num_cached_tokens for output in first] == [0, 0, 0]
    assert [output.num_cached_tokens for output in again] == [(len(PROMPTS[2]) - 1) // 8 * 8] * 3
    assert tokens(first) == tokens(again)
    assert len({tuple(ids) for ids in tokens(first)}) == 3


def test_a_batch_without_adapters_runs_the_programs_it_runs_without_lora(
    engine: LLM, llama: tuple[str, dict[str, str]]
):
    plain = LLM(llama[0], **{k: v for k, v in SETTINGS.items() if "lora" not in k}, kv_cache_memory_bytes=POOL)

    def lowered(llm: LLM) -> str:
        runner = llm.control.engine.runner
        bucket = runner.buckets.decode[0]
        worker = runner.worker
        step = worker.model._step._function
        pool = np.zeros(worker.pool.shape, worker.pool.dtype)
        batch, weights = runner.shapes.empty_batch(bucket), worker.model._weights
        return step.lower(weights, pool, batch, np.zeros(8, np.int32), decode_only=True).as_text()

    assert lowered(engine) == lowered(plain)


def test_outputs_of_one_prompt_and_beams_run_with_its_adapter(engine: LLM):
    several = SamplingParams(n=4, temperature=0, max_tokens=8, ignore_eos=True)
    (four,) = engine.generate(asked(PROMPTS[:1]), several, False, lora_request="all")
    (one,) = engine.generate(asked(PROMPTS[:1]), SHORT, False, lora_request="all")
    assert [output.token_ids for output in four.outputs] == [one.outputs[0].token_ids] * 4
    beams = BeamSearchParams(beam_width=1, max_tokens=8, ignore_eos=True)
    (found,) = engine.beam_search(asked(PROMPTS[:1]), beams, lora_request="all", use_tqdm=False)
    assert found.outputs[0].token_ids == one.outputs[0].token_ids


def test_vectors_are_those_of_the_adapter(engine: LLM, llama: tuple[str, dict[str, str]]):
    import torch

    names = [None, "all", "some", "all"]
    found = engine.embed(asked(PROMPTS), use_tqdm=False, lora_request=names)
    for prompt, name, output in zip(PROMPTS, names, found, strict=True):
        model = torch_model(llama[0], None if name is None else llama[1][name])
        with torch.no_grad():
            hidden = model.model(torch.tensor([prompt])).last_hidden_state[0, -1]
        np.testing.assert_allclose(output.outputs.embedding, (hidden / hidden.norm()).numpy(), atol=1e-5)


def test_requests_give_a_folder_as_in_vllm(engine: LLM, llama: tuple[str, dict[str, str]]):
    by_folder = LoRARequest("given", 7, llama[1]["some"])
    outputs = engine.generate(asked(PROMPTS[:2]), SHORT, False, by_folder)
    assert tokens(outputs) == tokens(engine.generate(asked(PROMPTS[:2]), SHORT, False, "some"))
    with pytest.raises(ValueError, match=r"prompt 0: lora_path='/elsewhere': the adapter 'given' was read from"):
        engine.generate(asked(PROMPTS[:1]), SHORT, False, LoRARequest("given", 7, "/elsewhere"))


@pytest.mark.parametrize(
    ("lora", "error", "message"),
    [
        ("other", ValueError, r"prompt 0: lora_request='other' is no known adapter \(known: 'small', 'all', 'some'"),
        (["all"], ValueError, "1 lora_requests for 4 prompts"),
        (3, TypeError, "lora_request=3 must be a LoRARequest, an adapter's name or None"),
    ],
)
def test_what_is_no_adapter_is_refused(engine: LLM, lora: object, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        engine.generate(asked(PROMPTS), SHORT, False, lora)
    assert engine.control.engine.memory.num_used_blocks == 0


def test_an_adapter_that_is_not_finite_is_refused(engine: LLM, tmp_path: Path, llama: tuple[str, dict[str, str]]):
    folder = Path(save_adapter(llama[0], tmp_path, "broken", r=2, target_modules=["v_proj"]))
    tensors = load_file(folder / "adapter_model.safetensors")
    name = next(name for name in tensors if name.endswith("layers.1.self_attn.v_proj.lora_B.weight"))
    tensors[name][3, 1] = np.inf
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(
        ValueError, match=r"broken: lora_B of .*layers\.1\.self_attn\.v_proj has numbers that are not finite"
    ):
        engine.generate(asked(PROMPTS), SHORT, False, LoRARequest("broken", 9, str(folder)))
    assert engine.control.engine.memory.num_used_blocks == 0


@pytest.mark.nightly
def test_more_adapters_than_a_step_has_places_for_wait_their_turn(tmp_path: Path, llama: tuple[str, dict[str, str]]):
    model, adapters = llama
    one = LLM(model, **SETTINGS | {"max_loras": 1}, lora_modules=adapters, kv_cache_memory_bytes=POOL)
    names = ["small", "all", "some", "small"]
    outputs = one.generate(asked(PROMPTS), SHORT, False, lora_request=names)
    alone = [
        one.generate(asked([prompt]), SHORT, False, lora_request=name)[0]
        for prompt, name in zip(PROMPTS, names, strict=True)
    ]
    assert tokens(outputs) == tokens(alone)


@pytest.mark.nightly
def test_deterministic_steps_give_a_row_the_same_bits_whoever_is_next_to_it(llama: tuple[str, dict[str, str]]):
    model, adapters = llama
    llm = LLM(model, **SETTINGS, lora_modules=adapters, kv_cache_memory_bytes=POOL, deterministic=True)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
    names = [None, "small", "all", "some"]
    together = llm.generate(asked(PROMPTS), params, False, lora_request=names)
    llm.reset_prefix_cache()
    for prompt, name, output in reversed(list(zip(PROMPTS, names, together, strict=True))):
        (alone,) = llm.generate(asked([prompt]), params, False, lora_request=name)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
        assert alone.outputs[0].cumulative_logprob == output.outputs[0].cumulative_logprob


@pytest.mark.nightly
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_adapters_work_with_quantised_weights(llama: tuple[str, dict[str, str]], quantization: str):
    model, adapters = llama
    settings = SETTINGS | {"quantization": quantization, "kv_cache_memory_bytes": POOL}
    llm = LLM(model, **settings, lora_modules=adapters)
    names = [None, "small", "all", "some"]
    together = llm.generate(asked(PROMPTS), SHORT, False, lora_request=names)
    alone = [
        llm.generate(asked([p]), SHORT, False, lora_request=name)[0] for p, name in zip(PROMPTS, names, strict=True)
    ]
    assert tokens(together) == tokens(alone)
    assert (
        len(
            {
                tuple(llm.generate(asked(PROMPTS[:1]), SHORT, False, lora_request=n)[0].outputs[0].token_ids)
                for n in names
            }
        )
        > 2
    )


@pytest.mark.nightly
def test_drafts_change_no_token_of_an_adapter(engine: LLM, llama: tuple[str, dict[str, str]]):
    from jpaged import Layers

    names = [None, "small", "all", "some"]
    expected = tokens(engine.generate(asked(PROMPTS), GREEDY, False, lora_request=names))
    for speculative in (NGram(tokens=3), Layers(1, tokens=2)):
        llm = LLM(llama[0], **SETTINGS, lora_modules=llama[1], kv_cache_memory_bytes=POOL, speculative=speculative)
        assert tokens(llm.generate(asked(PROMPTS), GREEDY, False, lora_request=names)) == expected
        llm.close()


@pytest.mark.nightly
def test_a_saved_request_goes_on_with_its_adapter_or_is_refused(tmp_path: Path, llama: tuple[str, dict[str, str]]):
    model, adapters = llama
    settings = SETTINGS | {"kv_cache_memory_bytes": POOL}
    llm = LLM(model, **settings, lora_modules=adapters)
    (expected,) = llm.generate(asked(PROMPTS[:1]), GREEDY, False, lora_request="all")
    stream = llm.stream(asked(PROMPTS[:1]), GREEDY, lora_request="all")
    for _ in range(5):
        next(stream)
    llm.save_state(tmp_path / "state")
    stream.close()
    fresh = LLM(model, **settings, lora_modules=adapters)
    fresh.load_state(tmp_path / "state")
    (resumed,) = fresh.resume(use_tqdm=False)
    assert resumed.outputs[0].token_ids == expected.outputs[0].token_ids
    without = LLM(model, **settings, lora_modules={name: adapters[name] for name in ("small", "some")})
    with pytest.raises(StateRefused, match="'all' is no known adapter"):
        without.load_state(tmp_path / "state")
    other = save_adapter(model, tmp_path, "other", r=2, target_modules=["q_proj"])
    changed = LLM(model, **settings, lora_modules={"all": other})
    with pytest.raises(StateRefused, match="the adapter 'all' has another content"):
        changed.load_state(tmp_path / "state")


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_more_devices_change_no_token(family: str, tmp_path: Path):
    model, adapters = save_all(family, tmp_path)
    found = on_eight_devices("lora_by_devices.py", model, json.dumps(adapters), 1, 2, 4)
    expected = references(model, adapters, PROMPTS, [None, *adapters])
    for size in ("1", "2", "4"):
        assert found[size] == [reference.tokens[:8] for reference in expected]


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_layers_that_are_stacked_have_their_adapters_too(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jpaged.loading.build_context.layers_are_stacked", lambda *_: True)
    model, adapters = save_all(family, tmp_path)
    llm = LLM(model, **SETTINGS, lora_modules=adapters, kv_cache_memory_bytes=1 << 20)
    assert llm.control.engine.runner.spec.caches[-1].group.sites[0].stacked
    outputs = llm.generate(asked(PROMPTS), GREEDY, False, lora_request=[None, *adapters])
    assert_same_tokens(outputs, references(model, adapters, PROMPTS, [None, *adapters]))
