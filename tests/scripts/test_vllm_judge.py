"""vLLM on a CPU answers from the folders that jpaged writes; what is counted shows wrong answers.

The nightly test runs where ``JPAGED_VLLM`` names the environment that
``scripts/benchmarks/peer_engines/environment.sh vllm`` makes.
"""

import os
from pathlib import Path

import pytest
import torch
from coded_checkpoints import float_llama, save

from scripts.benchmarks.format_folders import COMPRESSED
from scripts.benchmarks.vllm_judge import FORMS, Answer, judge_of, logprobs_of, message_of, scored, vllm_judge

REFUSED = {
    "compressed-tensors, 8 bits": "Quant type (uint8b128) not supported by CPUWNA16",
    "W8A16 a scale an output": "Quant type (uint8b128) not supported by CPUWNA16",
    "gptq, 8 bits": "Marlin does not support weight_bits = uint8b128",
}
"""Forms -> what vLLM 0.32 says of 8-bit weights with activations in floats, which its CPU kernels lack."""
ROUNDED = {"W8A8": 0.15, "FP8": 0.4}
"""Forms of which vLLM rounds activations too -> the distance of log-probabilities that this may make."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config, tensors = float_llama()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] *= 3  # logits that differ
    return save(tmp_path_factory.mktemp("judged") / "model", config, tensors)


def test_what_pytorch_itself_answers_has_no_distance_and_other_log_probabilities_have(folder):
    judge, prompt, tokens = judge_of(folder, {}), [5, 9, 23], []
    for _ in range(4):
        with torch.no_grad():
            tokens.append(int(judge(torch.tensor([[*prompt, *tokens]])).logits[0, -1].argmax()))
    own = logprobs_of(judge, prompt, tokens).amax(-1).tolist()
    right = [Answer(tokens, own)]
    found = scored(right, right, [prompt], judge, judge)
    assert found | {"log-prob": 0, "at most": 0} == {
        "answers as jpaged's": 1,
        "greedy": 4,
        "of": 4,
        "log-prob": 0,
        "at most": 0,
        "rounding": 0,
        "values": None,
        "refused": None,
    }
    assert found["at most"] < 1e-5
    other = [(tokens[0] + 1) % 96, *tokens[1:]]
    wrong = scored([Answer(other, [p - 0.5 for p in own])], right, [prompt], judge, judge)
    assert wrong["answers as jpaged's"] == 0 and wrong["greedy"] < 4 and wrong["log-prob"] > 0.3
    assert scored("ValueError: no", right, [prompt], judge, judge)["refused"] == "ValueError: no"


def test_an_unknown_form_and_a_folder_without_an_environment_are_refused(folder, tmp_path):
    with pytest.raises(ValueError, match=r"forms=\['awq'\] are none of not quantised"):
        next(vllm_judge(folder, tmp_path, ["awq"]))
    with pytest.raises(ValueError, match="is no environment"):
        next(vllm_judge(folder, tmp_path))


def test_the_message_of_a_refusal_is_the_last_exceptions_whole():
    written = """Traceback (most recent call last):
KeyError: 'a'

During handling of the above exception, another exception occurred:

[rank0]: Traceback (most recent call last):
[rank0]:   File "a.py", line 930, in choose
[rank0]: ValueError: Failed to find a kernel. Reasons:
[rank0]:  Quant type (uint8b128) not supported by CPUWNA16
"""
    found = message_of(written)
    assert found == "ValueError: Failed to find a kernel. Reasons: Quant type (uint8b128) not supported by CPUWNA16"
    assert message_of("Killed\n") == ""


@pytest.mark.nightly
@pytest.mark.parametrize("form", FORMS)
def test_vllm_computes_what_jpaged_computes_from_the_same_folder(form, folder):
    env = os.environ.get("JPAGED_VLLM")
    if env is None:
        pytest.skip("JPAGED_VLLM names no environment with vLLM")
    ours, theirs, *read = vllm_judge(folder, Path(env), [form], tokens=8)
    assert all(row["values"] < 1e-6 for row in read) and len(read) == (form in COMPRESSED or "compressed" in form)
    assert ours["greedy"] == ours["of"] == 80 and ours["at most"] < 1e-3
    if form in REFUSED:
        assert REFUSED[form] in theirs["refused"]
    else:
        assert theirs["refused"] is None
        assert theirs["log-prob"] < ROUNDED.get(form, 0.06), "bfloat16 alone makes half of that"
