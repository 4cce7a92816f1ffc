"""A model's config is enough to describe it."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
from checkpoints import CHECKPOINTS, make_checkpoint
from gguf_files import EMBEDDING, write_gguf
from huggingface_hub.errors import LocalEntryNotFoundError

from jpaged.loading import convert_checkpoint
from jpaged.loading.build_context import chosen_dtype
from jpaged.loading.open_checkpoint import describe_model
from jpaged_models.llama import Llama


def write_config(folder: Path, name: str = "config.json", **changes) -> Path:
    config = CHECKPOINTS["llama"].to_dict() | changes
    type(CHECKPOINTS["llama"])(**config).to_json_file(folder / name)
    return folder / name


def test_a_config_file_of_any_name_and_a_folder_without_weights_are_enough(tmp_path):
    for name in (write_config(tmp_path, "other.json"), write_config(tmp_path).parent):
        described = describe_model(name)
        assert described.family is Llama
        assert described.config.intermediate_size == 109


@pytest.mark.parametrize(
    ("dtype", "held"),
    [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16"), (None, "bfloat16")],
)
def test_a_config_says_what_its_checkpoint_holds(dtype, held, tmp_path):
    stored = describe_model(write_config(tmp_path, dtype=dtype)).stored
    assert chosen_dtype(stored, "gpu") == held
    assert chosen_dtype(stored, "cpu") == "float32"


def test_weights_that_are_there_are_asked_instead(tmp_path):
    make_checkpoint("llama", tmp_path)
    write_config(tmp_path, dtype="bfloat16")
    assert chosen_dtype(describe_model(tmp_path).stored, "gpu") == "float32"


def test_a_saved_checkpoint_is_asked_what_it_holds(tmp_path):
    make_checkpoint("llama", tmp_path / "source")
    convert_checkpoint(tmp_path / "source", tmp_path / "saved", dtype="bfloat16")
    described = describe_model(tmp_path / "saved")
    assert described.checkpoint == tmp_path / "saved"
    assert chosen_dtype(described.stored, "gpu") == "bfloat16"


def test_a_gguf_file_describes_itself(tmp_path):
    described = describe_model(write_gguf(tmp_path / "tiny.gguf", "llama", EMBEDDING))
    assert described.family is Llama and described.config.hidden_size == 64


def test_of_a_hub_id_only_the_config_is_fetched(tmp_path, monkeypatch):
    def fetch(repo_id, filename, **place):
        assert (repo_id, filename) == ("org/model", "config.json")
        return str(write_config(tmp_path))

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    assert describe_model("org/model").family is Llama


def test_a_hub_that_does_not_answer_is_told_with_the_id(monkeypatch):
    def fetch(repo_id, filename, **place):
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    with pytest.raises(
        ValueError,
        match=r"model='org/model': there is no internet .*Hugging Face hub \(no network\); a config\.json on disk",
    ):
        describe_model("org/model")


def test_what_is_nothing_of_this_is_named():
    with pytest.raises(ValueError, match=r"model='none\.json' does not exist"):
        describe_model("none.json")
    with pytest.raises(ValueError, match=r"model='./nowhere' does not exist"):
        describe_model("./nowhere")
