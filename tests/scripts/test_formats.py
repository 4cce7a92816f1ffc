"""One row a format and engine, with figures from the engine's own process."""

import pytest
from coded_checkpoints import SIZES, float_llama, save
from tiny_chat_model import VOCAB_SIZE, tokenizer
from transformers import LlamaConfig

from scripts.benchmarks.formats import formats


@pytest.fixture
def folder(tmp_path):
    config, tensors = float_llama()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name].repeat(3, 0)[:VOCAB_SIZE]
    config = LlamaConfig(
        **SIZES | {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 2048}, tie_word_embeddings=False
    )
    save(tmp_path / "model", config, tensors)
    tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.nightly
def test_every_format_is_measured_in_a_process_of_its_own(folder):
    plain, coded = formats(folder, only=["bfloat16", "NF4"], requests=2, rounds=1)
    for row, name in ((plain, "bfloat16"), (coded, "NF4")):
        assert (row["format"], row["engine"], row["failed"]) == (name, "jpaged", False)
        assert min(row["single"], row["batch"], row["prompts"]) > 0
        assert row["peak MiB"] > row["weights MiB"] > 0
    assert coded["file MiB"] < 0.7 * plain["file MiB"]


def test_unknown_formats_and_engines_are_refused(folder):
    with pytest.raises(ValueError, match=r"only=\['gguf'\] are none of bfloat16"):
        next(formats(folder, only=["gguf"]))
    with pytest.raises(ValueError, match=r"env=\['exllama'\] are none of vllm, openvino, llamacpp"):
        next(formats(folder, env=["exllama=/tmp"]))
