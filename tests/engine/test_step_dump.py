"""A step that an engine wrote to a file gives the same tokens when it runs again alone."""

from __future__ import annotations

import json
from pathlib import Path

import golden_runs
import numpy as np
import pytest
from greedy_reference import random_prompts
from thorough import rarely
from tiny_chat_model import make_chat_model
from typer.testing import CliRunner

from jpaged import LLM, ImageSources, NGram, SamplingParams
from jpaged.cli.main import app
from jpaged.engine.step_dump import VARIABLE, replay_step
from jpaged.execution.step_dump import DumpedStep

SETTINGS = {"dtype": "float32", "block_size": 8, "max_num_seqs": 4, "max_model_len": 128, "max_num_batched_tokens": 16}
PROMPTS = random_prompts(lengths=(3, 9, 17, 20, 33))
MIXED = [
    SamplingParams(temperature=temperature, seed=7 + i, max_tokens=24, ignore_eos=True, logprobs=2 if i else None)
    for i, temperature in enumerate((0.0, 1.0, 0.0, 1.3, 0.8))
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("chat-model")
    make_chat_model(folder)
    return str(folder)


@pytest.fixture(scope="module")
def page_bytes(model) -> int:
    with LLM(model, **SETTINGS) as llm:
        return llm.memory_report().page_bytes


def run(model: str, asked: str, params=MIXED, prompts=PROMPTS, times: int = 2, **settings) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, asked)
        with LLM(model, **SETTINGS, **settings) as llm:
            for _ in range(times):
                llm.generate([{"prompt_token_ids": tokens} for tokens in prompts], params, use_tqdm=False)


@pytest.fixture(scope="module")
def dumped(model, page_bytes, tmp_path_factory) -> list[Path]:
    """The steps of a tight pool's run of five requests, twice: with preemptions, and then with prefix hits."""
    folder = tmp_path_factory.mktemp("steps")
    run(model, str(folder), kv_cache_memory_bytes=10 * page_bytes)
    return sorted(folder.iterdir())


def mixes_prompts_with_decodes(path: Path) -> bool:
    inputs = DumpedStep.read(path).inputs
    return not inputs.bucket.decode_only and inputs.num_samples > 1


def test_steps_of_a_tight_pool_give_the_same_tokens_alone(dumped):
    mixed = next(filter(mixes_prompts_with_decodes, dumped))
    hit = next(p for p in dumped if DumpedStep.read(p).inputs.batch.positions[0] > 0 and p > dumped[len(dumped) // 2])
    for path in (mixed, hit, dumped[-1]):
        found = replay_step(path)
        assert found.is_same and len(found.drawn.tokens) > 0
        np.testing.assert_array_equal(found.drawn.logprobs, found.dump.drawn.logprobs)
        assert found.ranked.top_tokens.shape == (len(found.dump.rows), 5)


def test_a_file_has_the_blocks_of_its_step_and_no_others(dumped, page_bytes):
    inputs = DumpedStep.read(dumped[-1]).inputs
    (blocks,), (contents,) = inputs.blocks, inputs.contents
    assert 0 < len(blocks) == contents.shape[1] < 10
    tables = inputs.batch.caches[0].table
    assert sorted(set(tables[tables >= 0].tolist())) == list(blocks)


def test_a_changed_block_changes_what_a_replay_gives(dumped, tmp_path):
    dump = DumpedStep.read(dumped[-1])
    zeros = [np.zeros_like(part) for part in dump.inputs.contents]
    path = tmp_path / "other.jpaged"
    dump._replace(inputs=dump.inputs._replace(contents=zeros)).write(path)
    assert not np.array_equal(replay_step(path).ranked.top_logprobs, replay_step(dumped[-1]).ranked.top_logprobs)


def test_some_steps_can_be_chosen(model, tmp_path):
    run(model, f"{tmp_path / 'some'}:2-3", times=1)
    assert [path.name for path in sorted((tmp_path / "some").iterdir())] == ["step-000002.jpaged", "step-000003.jpaged"]
    with pytest.raises(ValueError, match="JPAGED_DUMP_STEPS='steps:2-' must be FOLDER, FOLDER:STEP or FOLDER:FIRST"):
        run(model, "steps:2-")


def test_a_dump_needs_no_folder_of_the_machine_that_wrote_it(model, tmp_path):
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    run(model, f"{tmp_path / 'steps'}:2", times=1, images=ImageSources(folders=[allowed]))
    allowed.rmdir()
    (path,) = (tmp_path / "steps").iterdir()
    assert replay_step(path).is_same


@pytest.mark.parametrize("settings", [{"speculative": NGram(tokens=2)}, {"deterministic": True}], ids=str)
def test_steps_of_other_engines_give_the_same_tokens_too(model, tmp_path, settings):
    prompts = [[4, 5, 6, 7] * 4, [8, 9] * 8]
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    run(model, f"{tmp_path}:4", greedy, prompts, times=1, **settings)
    (path,) = tmp_path.iterdir()
    assert replay_step(path).is_same


@pytest.mark.parametrize("name", ["fork", rarely("images"), "lora", rarely("layer_drafts")])
def test_what_a_step_reads_beside_tables_is_in_its_file(name, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, f"{tmp_path}:9-12")
        golden_runs.RUNS[name]()
    found = replay_step(max(tmp_path.iterdir()))
    assert found.is_same and len(found.drawn.tokens) > 0


def test_the_command_prints_both_tokens_and_fails_where_they_differ(dumped, tmp_path):
    result = CliRunner().invoke(app, ["replay-step", str(dumped[-1]), "--top", "3"])
    assert result.exit_code == 0, result.output
    dump = DumpedStep.read(dumped[-1])
    tokens = dump.drawn.tokens
    assert f" {tokens[0]} (" in result.output and "DIFFERENT" not in result.output
    other = tmp_path / "other.jpaged"
    dump._replace(drawn=dump.drawn._replace(tokens=tokens + 1)).write(other)
    result = CliRunner().invoke(app, ["replay-step", str(other)])
    assert result.exit_code == 1 and result.output.count("DIFFERENT") == len(tokens)


def test_what_cannot_be_replayed_is_refused(dumped, tmp_path, tmp_path_factory):
    data = dumped[-1].read_bytes()

    def written(name: str, content: bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(content)
        return path

    with pytest.raises(ValueError, match=r"is damaged: its .* bytes have another checksum"):
        replay_step(written("cut", data[:-7]))
    with pytest.raises(ValueError, match="is no dump of a step: it begins with b'hello'"):
        replay_step(written("text", b"hello"))
    with pytest.raises(ValueError, match=r"is of format 9, and jpaged .* reads 1"):
        replay_step(written("later", data.replace(b"dump 1\n", b"dump 9\n", 1)))
    dump, other = DumpedStep.read(dumped[-1]), tmp_path_factory.mktemp("other-model")
    make_chat_model(other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 77.0, "rms_norm_eps": 0.3}))
    with pytest.raises(ValueError, match="cannot be replayed: it is of another model"):
        replay_step(dumped[-1], str(other))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match=r"by jpaged 9\.9, and this is"):
        patch.setattr("jpaged.execution.step_dump.versions", lambda: {"jpaged": "9.9"})
        dump.write(tmp_path / "version")
        patch.undo()
        replay_step(tmp_path / "version")


def test_a_file_whose_parts_do_not_fit_is_refused_although_its_checksum_is_right(dumped, tmp_path):
    dump = DumpedStep.read(dumped[-1])
    batch, facts = dump.inputs.batch, dump.facts

    def refusal(**parts) -> str:
        path = tmp_path / "other.jpaged"
        if {"facts", "rows"}.isdisjoint(parts):
            parts = {"inputs": dump.inputs._replace(batch=batch._replace(**parts))}
        dump._replace(**parts).write(path)
        with pytest.raises(ValueError, match=r"other\.jpaged") as error:
            replay_step(path)
        return str(error.value)

    assert "no 'settings'" in refusal(facts={"pool": facts["pool"], "model": facts["model"]})
    assert "no 'views'" in refusal(facts=facts | {"pool": {}})
    assert "no 'weights'" in refusal(facts=facts | {"model": {"name": "a", "config": "b", "layout": "c"}})
    assert "unexpected keyword argument 'colour'" in refusal(facts=facts | {"settings": {"colour": 1}})
    assert "0 draws have tokens" in refusal(rows=[])
    assert "kv_lens[0]=-1 is below the sequence's 1 tokens" in refusal(kv_lens=np.full_like(batch.kv_lens, -1))
    assert "kv_lens has 999, above max_model_len=128" in refusal(kv_lens=np.full_like(batch.kv_lens, 999))
    assert "query_starts must rise from 0" in refusal(query_starts=batch.query_starts[::-1].copy())
    assert "positions has the shape [0]" in refusal(positions=batch.positions[:0])


def test_an_engine_goes_on_where_its_steps_cannot_be_written(model, tmp_path, monkeypatch, caplog):
    folder, params = tmp_path / "steps", SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompt = {"prompt_token_ids": [5, 6, 7]}
    monkeypatch.setenv(VARIABLE, str(folder))
    with LLM(model, **SETTINGS) as llm:
        folder.rmdir()
        with caplog.at_level("ERROR", "jpaged"):
            (first,) = llm.generate(prompt, params, use_tqdm=False)
        (again,) = llm.generate(prompt, params, use_tqdm=False)
    assert first.outputs[0].token_ids == again.outputs[0].token_ids and len(again.outputs[0].token_ids) == 4
    (message,) = [record.getMessage() for record in caplog.records]
    assert "step-000000.jpaged was not written, nor will later steps be" in message


def test_replicas_write_no_steps(model, tmp_path):
    with pytest.raises(ValueError, match=r"above the 1 cpu device|data_parallel_size=1, not"):
        run(model, str(tmp_path), data_parallel_size=2)
