"""Drafts of heads change no token, and are what the published head predicts however it is served."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from assistant_checkpoint import TorchAssistant, make_model_and_assistant
from checkpoints import make_checkpoint
from dflash_checkpoint import TorchDFlash, make_model_and_drafter
from draft_settings import SETTINGS, make_drafts_free
from eagle3_checkpoint import make_model_and_head
from lora_checkpoints import save_adapter
from mtp_checkpoint import FILE, TorchHead, make_checkpoint_with_head, make_knowing_head
from on_devices import printed_on_devices
from safetensors.torch import load_file, save_file

from jpaged import LLM, MTP, Assistant, DFlash, Eagle3, SamplingParams
from jpaged.execution.drafts import Drafter
from jpaged.speculative import Speculative

RNG = np.random.default_rng(7)
PROMPTS = [RNG.integers(3, 211, int(n)).tolist() for n in (5, 11, 30, 45, 23, 1)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.2, seed=3, max_tokens=24, ignore_eos=True)
PARAMS = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "several": replace(SAMPLED, n=3, top_k=5, logprobs=2),
    "edited": replace(SAMPLED, allowed_token_ids=[3, 4, 5, 6], repetition_penalty=1.2, min_tokens=9),
}
SHARE_OF_PEAK = 0.6
"""The share of the large pages that a run's sequences take together: too few for all, enough for the longest."""


@pytest.fixture(autouse=True)
def all_drafts(monkeypatch):
    make_drafts_free(monkeypatch)


@pytest.fixture
def drafted(monkeypatch):
    """The first drafts of steps, by the tokens that they follow."""
    found: dict[tuple[int, ...], tuple[int, ...]] = {}
    fill = Drafter.fill

    def noting(self, step):
        filled = fill(self, step)
        for chunk in filled.chunks:
            if chunk.drafts:
                before = tuple(chunk.seq.token_ids[: chunk.start + chunk.length - len(chunk.drafts)])
                found[before] = chunk.drafts
        return filled

    monkeypatch.setattr(Drafter, "fill", noting)
    return found


NIGHTLY = pytest.mark.nightly
FAMILIES = {
    "qwen3_5": {},
    "qwen3_next": {"mlp_only_layers": []},
    "glm4_moe": {"num_mtp_layers": 1, "own_tables": True},
    "deepseek_v3": {},
    "glm4_moe_lite": {},
    "eagle3": {},
    "eagle3 with norms": {},
    "assistant": {},
    "dflash": {},
}
ON_A_COMMIT = ("qwen3_5", "deepseek_v3", "eagle3", "assistant", "dflash")
WITHOUT_STATES = ("glm4_moe", "deepseek_v3", "glm4_moe_lite", "eagle3", "assistant", "dflash")
OF_FOLDERS = {
    "eagle3": (make_model_and_head, Eagle3),
    "eagle3 with norms": (
        partial(make_model_and_head, norms=("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")),
        Eagle3,
    ),
    "assistant": (make_model_and_assistant, Assistant),
    "dflash": (make_model_and_drafter, DFlash),
}
IN_BLOCKS = ("dflash",)
"""Drafts of a block depend on how many there are."""


class Served(NamedTuple):
    """A model with a head: the published head in PyTorch, the model's folder, the setting for so many drafts, and an
    engine without any."""

    reference: TorchHead | TorchAssistant | TorchDFlash
    folder: str
    drafts: Callable[[int], Speculative]
    plain: LLM
    in_blocks: bool = False


@pytest.fixture(scope="module", params=[pytest.param(n, marks=[] if n in ON_A_COMMIT else NIGHTLY) for n in FAMILIES])
def family(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    if request.param in OF_FOLDERS:
        make, drafts = OF_FOLDERS[request.param]
        head = folder / request.param
        reference = make(folder, head)
        plain = LLM(str(folder), **SETTINGS)
        return Served(reference, str(folder), partial(drafts, head), plain, request.param in IN_BLOCKS)
    reference = make_checkpoint_with_head(request.param, folder, **FAMILIES[request.param])
    return Served(reference, str(folder), MTP, LLM(str(folder), **SETTINGS))


def serve(llm, params, prompts=PROMPTS):
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    memory = llm.control.engine.memory
    memory.check_invariants()
    assert memory.num_used_blocks == 0
    return outputs


def tokens(outputs):
    return [[o.token_ids for o in output.outputs] for output in outputs]


def test_a_head_changes_no_token_and_drafts_what_the_published_one_predicts(family, drafted):
    reference, folder, drafts, plain, _ = family
    drafting = LLM(folder, speculative=drafts(3), **SETTINGS)
    for name, params in PARAMS.items():
        before = drafting.stats()
        assert tokens(serve(drafting, params)) == tokens(serve(plain, params)), name
        assert drafting.stats().num_draft_tokens > before.num_draft_tokens
        if name == "greedy":
            checked = dict(drafted)
    assert 0 < drafting.stats().num_accepted_tokens < drafting.stats().num_draft_tokens
    some = sorted(checked)[::6]
    assert len(some) > 5
    assert [checked[before] for before in some] == [
        tuple(reference.drafts(list(before), len(checked[before]))) for before in some
    ]


def test_a_draft_depends_on_its_sequence_only(family, drafted):
    """Prompts may come in chunks, and sequences be swapped out; while one waits there are no drafts."""
    _, folder, drafts, plain, in_blocks = family
    whole, params = LLM(folder, speculative=drafts(2), **SETTINGS), replace(SAMPLED, max_tokens=50)
    serve(whole, params)
    want = dict(drafted)
    drafted.clear()
    serve(LLM(folder, speculative=drafts(2), **SETTINGS | {"max_num_batched_tokens": 16}), params)
    assert _agree(want, drafted, in_blocks) > 30
    drafted.clear()
    peak = whole.memory_report(peak=True)
    size = int(SHARE_OF_PEAK * (peak.num_pages - peak.free_pages - peak.idle_pages)) * peak.page_bytes
    small = LLM(folder, speculative=drafts(2), preemption_mode="swap", kv_cache_memory_bytes=size, **SETTINGS)
    outputs = serve(small, params)
    swapped = [output for output in outputs if output.metrics.num_preemptions]
    assert swapped
    assert tokens(outputs) == tokens(serve(plain, params))
    starts = [tuple(output.prompt_token_ids + output.outputs[0].token_ids[:10]) for output in swapped]
    after = {before: drafts for before, drafts in drafted.items() if any(before[: len(s)] == s for s in starts)}
    assert _agree(want, after, in_blocks) > 5
    assert _agree(want, drafted, in_blocks) > 10


def test_what_the_cache_holds_of_a_prompt_serves_the_head_too(family, drafted):
    _, folder, drafts, plain, in_blocks = family
    cold = LLM(folder, speculative=drafts(2), enable_prefix_caching=False, **SETTINGS)
    warm = LLM(folder, speculative=drafts(2), **SETTINGS)
    first = tokens(serve(warm, SAMPLED))
    longer = [prompt + found[0][:-1] for prompt, found in zip(PROMPTS, first, strict=True)]
    drafted.clear()
    outputs = serve(warm, SAMPLED, longer)
    assert sum(output.num_cached_tokens for output in outputs) > 60
    hit = dict(drafted)
    drafted.clear()
    assert tokens(outputs) == tokens(serve(cold, SAMPLED, longer)) == tokens(serve(plain, SAMPLED, longer))
    assert _agree(hit, drafted, in_blocks) > 30


def test_a_prefix_hit_may_end_at_every_block_of_a_model_without_states(family, request):
    if request.node.callspec.params["family"] not in WITHOUT_STATES:
        pytest.skip("states are kept at checkpoints, which prefix hits end at")
    llm = LLM(family.folder, speculative=family.drafts(2), **SETTINGS)
    first = tokens(serve(llm, SAMPLED))
    longer = [prompt + found[0][:-1] for prompt, found in zip(PROMPTS, first, strict=True)]
    cached = [output.num_cached_tokens for output in serve(llm, SAMPLED, longer)]
    assert cached == [(len(prompt) - 1) // 8 * 8 for prompt in longer]


def _agree(want, found, in_blocks) -> int:
    """Return how many sequences got drafts both times, of a block as many; as many as both have are the same."""
    both = {before for before in want.keys() & found.keys() if not in_blocks or len(want[before]) == len(found[before])}
    for before in both:
        least = min(len(want[before]), len(found[before]))
        assert want[before][:least] == found[before][:least]
    return len(both)


def test_a_head_that_knows_from_hidden_states_loses_no_draft(tmp_path):
    """They come from the step before, the last chunk of a prompt, or the head itself; also after the weights were gone
    from the device."""
    cycle = make_knowing_head("qwen3_5", tmp_path)
    prompts = [np.random.default_rng(n).choice(cycle, n).tolist() for n in (2, 16, 40, 70)]
    llm = LLM(str(tmp_path), speculative=MTP(3), **SETTINGS | {"max_num_batched_tokens": 24})
    want = tokens(serve(LLM(str(tmp_path), **SETTINGS), GREEDY, prompts))
    assert tokens(serve(llm, GREEDY, prompts)) == want
    assert llm.stats().acceptance_rate == 1.0
    assert llm.stats().num_accepted_tokens > 50
    llm.sleep(level=1)
    llm.wake_up()
    assert tokens(serve(llm, GREEDY, prompts)) == want
    assert llm.stats().acceptance_rate == 1.0
    # Every token gets another id, in both tables of the model: the head is right only if they are its own too.
    ids = np.random.default_rng(2).permutation(211)
    new = {name: tensor for name, tensor in load_file(tmp_path / FILE).items() if not name.startswith("mtp.")}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        new[name] = new[name][np.argsort(ids)]
    llm.update_params(new)
    renamed = [ids[prompt].tolist() for prompt in prompts]
    assert tokens(serve(llm, GREEDY, renamed)) == [[ids[one].tolist() for one in output] for output in want]
    assert llm.stats().acceptance_rate == 1.0


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "phi"])
def test_all_drafts_of_a_step_are_made_in_one_pass(name, tmp_path, monkeypatch):
    """And a vocabulary that has one table for both ends serves the drafter too, with the factor of Gemma's embedding.
    Gemma's windows are the model's alone. Phi's head is another table than its embedding, with a bias."""
    reference = make_model_and_drafter(tmp_path / "m", tmp_path / "h", family=name)
    assert reference.model.config.tie_word_embeddings == (name != "phi")
    llm = LLM(str(tmp_path / "m"), speculative=DFlash(tmp_path / "h"), **SETTINGS)
    passes, steps, fill = [], [], Drafter.fill
    monkeypatch.setattr(Drafter, "fill", lambda self, step: steps.append(fill(self, step)) or steps[-1])
    draft = llm.control.engine.runner.worker.draft
    monkeypatch.setattr(llm.control.engine.runner.worker, "draft", lambda *args: passes.append(1) or draft(*args))
    serve(llm, GREEDY)
    assert len(passes) == len(steps) > 5
    made = {tuple(c.seq.token_ids[: c.start + 1]): c.drafts for step in steps for c in step.chunks if c.drafts}
    assert max(map(len, made.values())) > 2
    for before in sorted(made)[::8]:
        assert made[before] == tuple(reference.drafts(list(before), len(made[before])))


def test_after_ctrl_c_within_a_draft_the_engine_gives_the_same_tokens(family, monkeypatch):
    llm, calls, fill = LLM(family.folder, speculative=family.drafts(2), **SETTINGS), [], Drafter.fill

    def interrupted(self, step):
        calls.append(1)
        if len(calls) == 5:
            signal.raise_signal(signal.SIGINT)
        return fill(self, step)

    monkeypatch.setattr(Drafter, "fill", interrupted)
    with pytest.raises(KeyboardInterrupt):
        serve(llm, SAMPLED)
    assert tokens(serve(llm, SAMPLED)) == tokens(serve(family.plain, SAMPLED))
    assert len(calls) > 10


@pytest.mark.nightly
def test_a_deterministic_engine_gives_the_same_bits(family):
    folder, drafts = family.folder, family.drafts
    found = []
    for way in (None, drafts(2)):
        llm = LLM(folder, speculative=way, deterministic=True, **SETTINGS)
        outputs = serve(llm, replace(SAMPLED, logprobs=1))
        found.append([(o.outputs[0].token_ids, float(o.outputs[0].cumulative_logprob).hex()) for o in outputs])
    assert found[0] == found[1] and llm.stats().num_accepted_tokens > 0


@pytest.mark.nightly
@pytest.mark.parametrize(
    "settings", [{"kv_cache_dtype": "int8", "block_size": 32}, {"quantization": "int8"}, {"dtype": "bfloat16"}], ids=str
)
def test_other_forms_of_weights_and_kv_give_the_tokens_without_drafts(family, settings):
    """The number that hides the first token's key stays one in every form."""
    folder, drafts = family.folder, family.drafts
    settings = SETTINGS | {"state_checkpoint_interval": 32} | settings
    llm = LLM(folder, speculative=drafts(2), **settings)
    assert tokens(serve(llm, SAMPLED)) == tokens(serve(LLM(folder, **settings), SAMPLED))
    assert llm.stats().num_accepted_tokens > 0


@pytest.mark.nightly
def test_a_request_with_an_adapter_has_drafts_too(family, tmp_path, request):
    if request.node.callspec.params["family"] in ("deepseek_v3", "glm4_moe_lite"):
        pytest.skip("adapters change no projection of latents")
    folder, drafts = family.folder, family.drafts
    target = r".*self_attn\.\w*_proj"
    adapters = {"one": save_adapter(folder, tmp_path, "one", r=2, lora_alpha=8, target_modules=target)}
    settings = SETTINGS | {"enable_lora": True, "max_lora_rank": 4, "max_loras": 1, "lora_modules": adapters}
    prompts, names = [{"prompt_token_ids": p} for p in PROMPTS], ["one", None] * 3
    found = []
    for way in (None, drafts(2)):
        llm = LLM(folder, speculative=way, **settings)
        found.append(tokens(llm.generate(prompts, SAMPLED, False, lora_request=names)))
    assert found[0] == found[1]
    assert llm.stats().num_accepted_tokens > 0


@pytest.mark.nightly
def test_a_saved_state_goes_on_with_what_the_head_keeps(family, tmp_path):
    _, folder, drafts, plain, _ = family
    llm = LLM(folder, speculative=drafts(2), **SETTINGS)
    for prompt in PROMPTS:
        llm.control.engine.add(llm.input_processor.process({"prompt_token_ids": prompt}, SAMPLED))
    for _ in range(6):
        llm.control.engine.step()
    llm.save_state(tmp_path / "state")
    llm.close()
    other = LLM.restore_state(tmp_path / "state")
    before = other.stats().num_accepted_tokens
    assert tokens(other.resume(use_tqdm=False)) == tokens(serve(plain, SAMPLED))
    assert other.stats().num_accepted_tokens > before


@pytest.mark.nightly
@pytest.mark.parametrize("deterministic", [False, True])
def test_after_a_warm_up_nothing_is_compiled(family, deterministic):
    settings = SETTINGS | {"max_num_seqs": 4, "deterministic": deterministic}
    llm = LLM(family.folder, speculative=family.drafts(2), **settings)
    llm.warmup(use_tqdm=False)
    for params in (GREEDY, SAMPLED):
        serve(llm, params)
    assert llm.stats().num_draft_tokens > 0 and llm.stats().num_recompiles == 0


@pytest.mark.nightly
def test_two_devices_draft_as_one_does(family, request):
    name = request.node.callspec.params["family"]
    way = name if name in OF_FOLDERS else "head"
    found = printed_on_devices(2, Path(__file__).parent / "speculation_by_devices.py", family.folder, "none", way)
    assert found["none"]["tokens"] == found[way]["tokens"]
    assert found[way]["kept"] > 0


def test_a_model_or_checkpoint_without_a_head_is_refused(tmp_path):
    make_checkpoint("llama", tmp_path / "llama", 0)
    with pytest.raises(ValueError, match=r"speculative=MTP\(tokens=1\): Llama has no head that predicts"):
        LLM(str(tmp_path / "llama"), speculative=MTP(), **SETTINGS)
    make_checkpoint("qwen3_5", tmp_path / "bare")
    with pytest.raises(ValueError, match=r"speculative=MTP\(tokens=1\): .* has no tensor mtp\.\S+\.weight, needed for"):
        LLM(str(tmp_path / "bare"), speculative=MTP(), **SETTINGS)


def test_a_folder_of_another_kind_of_head_is_refused(tmp_path):
    make_model_and_assistant(tmp_path / "gemma", tmp_path / "assistant")
    with pytest.raises(ValueError, match=r"speculative=Eagle3\(.*: the folder holds a Gemma 4 assistant, which Assis"):
        LLM(str(tmp_path / "gemma"), speculative=Eagle3(tmp_path / "assistant"), **SETTINGS)
    make_model_and_head(tmp_path / "llama", tmp_path / "eagle3")
    with pytest.raises(ValueError, match=r"speculative=Assistant\(.*: the folder holds an EAGLE-3 head, which Eagle3"):
        LLM(str(tmp_path / "llama"), speculative=Assistant(tmp_path / "eagle3"), **SETTINGS)
    with pytest.raises(ValueError, match="head attends to sliding window layers, and the model has none"):
        LLM(str(tmp_path / "llama"), speculative=Assistant(tmp_path / "assistant"), **SETTINGS)
    with pytest.raises(ValueError, match=r"speculative=DFlash\(.*: the folder holds an EAGLE-3 head, which Eagle3"):
        LLM(str(tmp_path / "llama"), speculative=DFlash(tmp_path / "eagle3"), **SETTINGS)
    make_model_and_drafter(tmp_path / "model", tmp_path / "dflash")
    with pytest.raises(ValueError, match=r"speculative=Eagle3\(.*: the folder holds a DFlash drafter, which DFlash"):
        LLM(str(tmp_path / "model"), speculative=Eagle3(tmp_path / "dflash"), **SETTINGS)
    with pytest.raises(ValueError, match="tokens=8 must be below the drafter's block_size=8"):
        LLM(str(tmp_path / "model"), speculative=DFlash(tmp_path / "dflash", tokens=8), **SETTINGS)


def test_a_checkpoint_with_its_own_head_is_no_folder_of_an_assistant(tmp_path):
    """vLLM's method "mtp" takes its name as well as none."""
    make_checkpoint_with_head("qwen3_5", tmp_path)
    with pytest.raises(ValueError, match=r"speculative=Assistant\(.*: the folder holds a head for .*, which MTP reads"):
        LLM(str(tmp_path), speculative=Assistant(tmp_path), **SETTINGS)
    config = {"method": "mtp", "model": tmp_path, "num_speculative_tokens": 2}
    assert LLM(str(tmp_path), speculative_config=config, **SETTINGS).config.speculative == MTP(2)


def test_a_checkpoint_with_pictures_has_its_head_beside_the_language_model(tmp_path):
    """The names of Qwen3.5's published checkpoints: a text model within, and the head outside it. The tower is left
    out."""
    reference = make_checkpoint_with_head("qwen3_5", tmp_path)
    names = {"model.": "model.language_model."}
    renamed = {
        next((new + n.removeprefix(old) for old, new in names.items() if n.startswith(old)), n): tensor
        for n, tensor in load_file(tmp_path / FILE).items()
    }
    save_file(renamed, tmp_path / FILE, metadata={"format": "pt"})
    text = reference.model.config.to_json_string(use_diff=False)
    (tmp_path / "config.json").write_text(
        f'{{"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": {text}}}'
    )
    llm = LLM(str(tmp_path), speculative=MTP(), language_model_only=True, **SETTINGS)
    serve(llm, GREEDY, PROMPTS[:2])
    assert llm.stats().num_draft_tokens > 0
