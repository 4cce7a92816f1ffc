"""The benchmark of pictures in several engines asks all of them the same."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from scripts.benchmarks import picture_peers as benchmark
from scripts.benchmarks.peers import Engine
from scripts.benchmarks.pictures import BEGIN, END, IMAGE


def test_an_engine_that_is_not_known_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"env=\['sglang'\] are none of openvino, llamacpp, vllm"):
        benchmark.picture_peers(env=[f"sglang={tmp_path}"])


def test_texts_have_the_tokens_of_the_prompts_which_are_token_ids(tmp_path):
    benchmark.write_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    orders = dict(benchmark._work(tmp_path, [16], questions=2, tokens=3, rounds=2))
    assert list(orders) == ["first token, 16, 0", "questions, 16, 0", "first token, 16, 1", "questions, 16, 1"]
    for asked in orders.values():
        for request in asked:
            ids = tokenizer("<|vision_start|><|image_pad|><|vision_end|>" + request["text"])["input_ids"]
            assert ids == request["prompt"] and ids[:3] == [BEGIN, IMAGE, END] and len(ids) == 19
    assert len({request["picture"] for request in orders["questions, 16, 0"]}) == 1, "one picture, two questions"
    pictures = {Path(request["picture"]).read_bytes() for asked in orders.values() for request in asked}
    assert len(pictures) == 4, "each order has a picture of its own"


def test_times_are_of_the_rounds_that_follow_the_one_which_compiles():
    def engine(name: str, *seconds: float) -> Engine:
        return Engine(
            name, "float32", "auto", None, {f"first token, 16, {turn}": [s] for turn, s in enumerate(seconds)}
        )

    own, peer = engine("jpaged", 100.0, 1.0, 2.0, 4.0), engine("vllm", 900.0, 3.0, 5.0, 8.0)
    row = benchmark._row(peer, own, "first token, 16", rounds=3)
    assert (row["seconds"], row["times"]) == (5.0, 2.5)
    peer.failed = True
    assert "times" not in benchmark._row(peer, own, "first token, 16", rounds=3)
