"""Classes, scores and what many callers ask for at once come from the adapter that a request names."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from greedy_reference import assert_same_tokens, random_prompts, torch_greedy
from lora_checkpoints import CONFIGS, save_all, save_random_adapter, torch_model
from peft import LoraConfig, PeftModel
from transformers import LlamaForSequenceClassification

from jpaged import LLM, AsyncLLM, BeamSearchParams, LoRARequest, SamplingParams

SETTINGS = {
    "enable_lora": True,
    "max_lora_rank": 6,
    "max_loras": 2,
    "block_size": 8,
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 24,
    "kv_cache_memory_bytes": 1 << 21,
}
IDS = random_prompts(lengths=(9, 17, 33), seed=3)
PROMPTS = [{"prompt_token_ids": prompt} for prompt in IDS]
NAMES = [None, "all", "some"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str]]:
    return save_all("llama", tmp_path_factory.mktemp("lora"), ("all", "some"))


@pytest.fixture(scope="module")
def engine(llama: tuple[str, dict[str, str]]) -> LLM:
    return LLM(llama[0], **SETTINGS, lora_modules=llama[1])


def test_a_prompt_is_as_likely_as_peft_says(engine: LLM, llama: tuple[str, dict[str, str]]):
    for shift in range(3):
        names = NAMES[shift:] + NAMES[:shift]
        outputs = engine.score(PROMPTS, use_tqdm=False, lora_request=names)
        for ids, name, output in zip(IDS, names, outputs, strict=True):
            model = torch_model(llama[0], None if name is None else llama[1][name])
            with torch.no_grad():
                logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            want = logprobs.gather(1, torch.tensor(ids[1:])[:, None]).sum().item()
            assert output.outputs.score == pytest.approx(want, abs=1e-3)


def test_two_prompts_are_as_alike_as_an_adapter_makes_them(engine: LLM, llama: tuple[str, dict[str, str]]):
    (found,) = engine.score(PROMPTS[:1], PROMPTS[1:2], use_tqdm=False, lora_request="all")
    model = torch_model(llama[0], llama[1]["all"]).model
    with torch.no_grad():
        first, second = (model(torch.tensor([ids])).last_hidden_state[0, -1] for ids in IDS[:2])
    assert found.outputs.score == pytest.approx(torch.cosine_similarity(first, second, 0).item(), abs=1e-5)
    with pytest.raises(ValueError, match="lora_request of two lists of prompts must be one adapter for all"):
        engine.score(PROMPTS[:1], PROMPTS[1:2], use_tqdm=False, lora_request=["all"])


def test_classes_are_those_of_the_adapter(tmp_path: Path):
    torch.manual_seed(1)
    config = CONFIGS["llama"].__class__(**CONFIGS["llama"].to_dict() | {"num_labels": 3})
    plain = LlamaForSequenceClassification(config).eval()
    plain.save_pretrained(tmp_path / "model")
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "exclude_modules": ["score"]}
    folder = save_random_adapter(plain, LoraConfig(**settings), tmp_path / "classes")
    names = [None, "classes", "classes"]
    with LLM(str(tmp_path / "model"), **SETTINGS, lora_modules={"classes": folder}) as llm:
        outputs = llm.classify(PROMPTS, use_tqdm=False, lora_request=names)
    for ids, name, output in zip(IDS, names, outputs, strict=True):
        model = LlamaForSequenceClassification.from_pretrained(tmp_path / "model").eval()
        judge = model if name is None else PeftModel.from_pretrained(model, folder).eval()
        with torch.no_grad():
            logits = judge(torch.tensor([ids])).logits[0]
        np.testing.assert_allclose(output.outputs.logits, logits.numpy(), atol=1e-4)
        np.testing.assert_allclose(output.outputs.probs, logits.softmax(0).numpy(), atol=1e-5)


def test_callers_of_an_async_engine_have_adapters_of_their_own(engine: LLM, llama: tuple[str, dict[str, str]]):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    asked = [None, LoRARequest("all", 1), "some"]

    async def answers():
        async with AsyncLLM.from_llm(engine) as served:

            async def one(number: int):
                stream = served.generate(PROMPTS[number], params, f"r{number}", lora_request=asked[number])
                return [output async for output in stream][-1]

            found = await asyncio.gather(*map(one, range(3)))
            beams = BeamSearchParams(beam_width=1, max_tokens=8, ignore_eos=True)
            best = await served.beam_search(PROMPTS[1], beams, "b", lora_request="some")
            with pytest.raises(ValueError, match="lora_request='other' is no known adapter"):
                await anext(served.generate(PROMPTS[0], params, "refused", lora_request="other"))
            return found, best

    found, best = asyncio.run(answers())
    for ids, name, output in zip(IDS, NAMES, found, strict=True):
        model = torch_model(llama[0], None if name is None else llama[1][name])
        assert_same_tokens([output], torch_greedy(model, [ids], num_tokens=8))
    assert_same_tokens([best], torch_greedy(torch_model(llama[0], llama[1]["some"]), IDS[1:2], num_tokens=8))
