"""`jpaged eval`: what lm_eval asks of a model, judged by PyTorch; and lm_eval itself, where it is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from few_shapes import run_in_few_shapes
from tiny_chat_model import make_chat_model
from typer.testing import CliRunner

from jpaged import LLM, SamplingParams
from jpaged.cli.main import app

HERE = Path(__file__).parent
PAIRS = [("the cab", " is far"), ("the cab", " is near"), ("a", "b")]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat-model")
    model, _ = make_chat_model(folder)
    llm = LLM(str(folder), dtype="float32", max_num_seqs=4, max_model_len=32, max_num_batched_tokens=32)
    run_in_few_shapes(llm)
    return folder, model, llm


@pytest.fixture
def evaluated(made, monkeypatch):
    sys.path.insert(0, str(HERE))
    try:
        import lm_eval_stand_in
    finally:
        sys.path.remove(str(HERE))
    lm_eval_stand_in.install(monkeypatch)
    from jpaged.integrations.lm_eval import EvaluatedModel

    yield EvaluatedModel(made[2])
    sys.modules.pop("jpaged.integrations.lm_eval")


def asked(*args):
    return SimpleNamespace(args=args)


def torch_score(model, ids, first):
    """Return the log-probability of ids[first:], and whether each is the most likely."""
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    ends = range(max(1, first), len(ids))
    return sum(logprobs[i - 1, ids[i]].item() for i in ends), all(logprobs[i - 1].argmax() == ids[i] for i in ends)


def test_continuations_have_the_log_likelihoods_of_pytorch(made, evaluated):
    scores = evaluated.loglikelihood([asked(*pair) for pair in PAIRS], disable_tqdm=True)
    for (context, continuation), score in zip(PAIRS, scores, strict=True):
        ids, first = evaluated.tok_encode(context + continuation), len(evaluated.tok_encode(context))
        logprob, greedy = torch_score(made[1], ids, first)
        assert score == (pytest.approx(logprob, abs=1e-3), greedy)
    assert [call[:2] for call in evaluated.cached] == [("loglikelihood", pair) for pair in PAIRS]


def test_what_greedy_decoding_gives_is_said_to_be_greedy(made, evaluated):
    ids = evaluated.tok_encode("the cab")
    greedy = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    more = made[2].generate({"prompt_token_ids": ids}, greedy, use_tqdm=False)[0].outputs[0].token_ids
    ((_, is_greedy),) = evaluated._loglikelihood_tokens([(None, ids, list(more))], disable_tqdm=True)
    assert is_greedy


def test_a_text_longer_than_the_context_is_scored_in_windows(made, evaluated):
    text = "a cab is far and near and far again, 1234567890"  # 30 predictions a window
    ids = evaluated.tok_encode(text, add_special_tokens=False)
    assert len(ids) > 30 >= len(ids) // 2
    prefix = evaluated.prefix_token_id
    expected = torch_score(made[1], [prefix, *ids[:30]], 1)[0] + torch_score(made[1], [ids[29], *ids[30:]], 1)[0]
    (total,) = evaluated.loglikelihood_rolling([asked(text)], disable_tqdm=True)
    assert total == pytest.approx(expected, abs=1e-2)


def test_generation_takes_a_tasks_options(made, evaluated):
    options = {"until": ["q"], "max_gen_toks": 6, "do_sample": False}
    long = "the cab is far " * 9
    texts = evaluated.generate_until([asked("the cab", options), asked(long, options)], disable_tqdm=True)
    params = SamplingParams(temperature=0, max_tokens=6, stop=["q"])
    assert texts[0] == made[2].generate("the cab", params, use_tqdm=False)[0].outputs[0].text
    last = {"prompt_token_ids": evaluated.tok_encode(long)[-26:]}  # 32 tokens, prompt and output
    assert texts[1] == made[2].generate(last, params, use_tqdm=False)[0].outputs[0].text
    with pytest.raises(TypeError, match="did you mean top_k"):
        evaluated.generate_until([asked("a", {"top_kk": 3})])


def test_a_chat_is_rendered_by_the_models_template(evaluated):
    chat = [{"role": "user", "content": "hi"}]
    assert evaluated.apply_chat_template(chat) == "<s>user: hi<s>assistant:"
    begun = [*chat, {"role": "assistant", "content": "so"}]
    assert evaluated.apply_chat_template(begun, add_generation_prompt=False) == "<s>user: hi<s>assistant: so"


def test_the_command_says_what_it_lacks(monkeypatch):
    monkeypatch.setattr("jpaged.cli.evaluate.find_spec", lambda name: None)
    assert "pip install '.[eval]' in a clone of jpaged" in CliRunner().invoke(app, ["eval", "--tasks", "a"]).output
    monkeypatch.setattr("jpaged.cli.evaluate.find_spec", lambda name: name)
    assert "give --tasks" in CliRunner().invoke(app, ["eval"]).output


def make_tasks(folder: Path) -> Path:
    """Copy the tasks of `lm_eval_tasks` to a folder, with its path in them."""
    shutil.copytree(HERE / "lm_eval_tasks", folder)
    for file in folder.glob("*.yaml"):
        file.write_text(file.read_text().replace("TASKS", str(folder)))
    return folder


@pytest.mark.nightly
def test_lm_evals_own_command_line_runs_local_tasks(made, tmp_path):
    pytest.importorskip("lm_eval")
    tasks = make_tasks(tmp_path / "tasks")
    names = "letters_choice,letters_text,letters_rolling"
    command = [sys.executable, "-m", "jpaged.cli.main", "eval", "--model", str(made[0]), "--max-model-len", "32"]
    command += ["--tasks", names, "--include_path", str(tasks), "--output_path", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(file.read_text())["results"]
    assert set(results) == set(names.split(",")) and 0 <= results["letters_choice"]["acc,none"] <= 1
