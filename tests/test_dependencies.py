"""Each library that jpaged depends on does its part for one tiny model, made without PyTorch.

``LOWEST=1 bash scripts/test_versions.sh`` runs this file with the lowest versions that pyproject.toml allows: most
other tests need PyTorch, and model families that transformers had not yet at its lower end.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from gguf_files import write_gguf
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from jpaged import LLM, SamplingParams, StructuredOutputsParams
from jpaged.cli.main import app

LETTERS = [*"abcdefghijklmnopqrstuvwxyzĠ0123456789:", "<s>", "</s>"]
"""Tokens, in the letters of byte-level tokenizers: Ġ is a blank."""
SIZES = {
    "vocab_size": len(LETTERS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": len(LETTERS) - 2,
    "eos_token_id": len(LETTERS) - 1,
}
SETTINGS = {
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 2,
    "block_size": 8,
    "kv_cache_memory_bytes": 1 << 20,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT = {"prompt_token_ids": [1, 2, 3, 4]}
PARTS = {"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64)}
MLP = {"gate_proj": (96, 64), "up_proj": (96, 64), "down_proj": (64, 96)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A Llama of random weights with a tokenizer of letters and a chat template."""
    folder, rng = tmp_path_factory.mktemp("tiny"), np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (len(LETTERS), 64), "lm_head.weight": (len(LETTERS), 64)}
    norms = ["model.norm.weight"]
    for layer in range(2):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.self_attn.{part}.weight": shape for part, shape in PARTS.items()}
        shapes |= {f"{name}.mlp.{part}.weight": shape for part, shape in MLP.items()}
        norms += [f"{name}.input_layernorm.weight", f"{name}.post_attention_layernorm.weight"]
    tensors = {name: rng.normal(size=shape, scale=0.2).astype(np.float32) for name, shape in shapes.items()}
    save_file(tensors | {name: np.ones(64, np.float32) for name in norms}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "torch_dtype": "float32", **SIZES}))
    backend = Tokenizer(BPE({letter: i for i, letter in enumerate(LETTERS)}, []))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = "{% for message in messages %}{{ message.role }}: {{ message.content }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def answered(llm: LLM) -> list[int]:
    return list(llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0].token_ids)


def test_prompts_chats_and_grammars_are_answered(folder):
    with LLM(str(folder), **SETTINGS) as llm:
        tokens = answered(llm)
        assert len(tokens) == 8 and answered(llm) == tokens
        (output,) = llm.chat([{"role": "user", "content": "abc"}], GREEDY, use_tqdm=False)
        assert llm.get_tokenizer().decode(output.prompt_token_ids) == "user: abc "
        number = SamplingParams(max_tokens=8, seed=1, structured_outputs=StructuredOutputsParams(regex="[0-9]{3}"))
        (output,) = llm.generate([PROMPT], number, use_tqdm=False)
        assert output.outputs[0].text.isdigit() and len(output.outputs[0].text) == 3


def test_a_checkpoint_and_a_saved_state_bring_the_same_tokens(folder, tmp_path):
    with LLM(str(folder), **SETTINGS) as llm:
        want = answered(llm)
        stream = llm.stream([PROMPT], GREEDY)
        begun = list(next(stream).token_ids)
        llm.save_state(tmp_path / "state")
        stream.close()
    done = CliRunner().invoke(app, ["convert", str(folder), str(tmp_path / "saved")])
    assert done.exit_code == 0, done.output
    with LLM(str(tmp_path / "saved"), **SETTINGS) as llm:
        assert answered(llm) == want
    with LLM.restore_state(tmp_path / "state") as llm:
        (output,) = llm.resume(use_tqdm=False)
        assert begun == want[: len(begun)] and list(output.outputs[0].token_ids) == want


def test_a_gguf_file_is_read(tmp_path):
    rng = np.random.default_rng(0)
    names = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
    names |= {"ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}
    shapes = {"token_embd.weight": (len(LETTERS), 64), "output.weight": (len(LETTERS), 64)}
    shapes |= {f"blk.{layer}.{name}.weight": shape for layer in range(2) for name, shape in names.items()}
    tensors = {name: rng.normal(size=shape, scale=0.2).astype(np.float32) for name, shape in shapes.items()}
    norms = ["output_norm", *(f"blk.{layer}.{name}_norm" for layer in range(2) for name in ("attn", "ffn"))]
    tensors |= {f"{name}.weight": np.ones(64, np.float32) for name in norms}
    vocabulary = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*LETTERS[:-3], "ab", *LETTERS[-2:]],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": SIZES["bos_token_id"],
        "tokenizer.ggml.eos_token_id": SIZES["eos_token_id"],
    }
    file = write_gguf(tmp_path / "tiny.gguf", "llama", tensors, vocabulary, context_length=128)
    with LLM(str(file), **SETTINGS) as llm:
        assert len(answered(llm)) == 8


@pytest.mark.parametrize(
    "command", [[], ["generate"], ["chat"], ["serve"], ["convert"], ["compile"], ["plan"], ["bench"]]
)
def test_each_command_has_a_page_of_help(command):
    done = CliRunner().invoke(app, [*command, "--help"])
    assert done.exit_code == 0 and "Usage" in done.output, done.output
