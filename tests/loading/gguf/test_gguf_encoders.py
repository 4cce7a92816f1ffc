"""Encoders' GGUF files, with the names that the gguf package gives tensors, make transformers' vectors."""

import gguf
import numpy as np
import pytest
from encoder_checkpoints import make_encoder
from encoder_prompts import SETTINGS, hidden_states, plain, prompts, vectors
from gguf.constants import PoolingType
from gguf_files import write_gguf
from safetensors.numpy import load_file

from jpaged import LLM
from jpaged.loading.gguf.config import config_from_gguf
from jpaged.loading.gguf.reader import GGUFFile
from jpaged.loading.open_checkpoint import describe_model

RNG = np.random.default_rng(3)
SPECIAL = ["[UNK]", "[PAD]", "[CLS]", "[SEP]"]
VOCABULARY = {
    "tokenizer.ggml.model": "bert",
    "tokenizer.ggml.tokens": [*SPECIAL, *(f"\u2581w{i}" for i in range(4, 211))],
    "tokenizer.ggml.cls_token_id": 2,
    "tokenizer.ggml.seperator_token_id": 3,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.padding_token_id": 1,
}
GEMMA = {
    "sliding_window": 10,
    "query_pre_attn_scalar": 16,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 160.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
    },
}
DENSE = [RNG.normal(size=size).astype(np.float32) for size in ((80, 48), (48, 80))]


def stored(arch, tensors, offset=0):
    """The converter's names and values; it leaves out a pooler, and positions that are skipped."""
    kind = next(kind for kind, said in gguf.MODEL_ARCH_NAMES.items() if said == arch)
    names = gguf.get_tensor_name_map(kind, 3)
    found = {}
    for name, array in tensors.items():
        if name.startswith("pooler."):
            continue
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert known is not None, name
        plus_one = arch == "gemma-embedding" and name.endswith("norm.weight")
        found[known] = array + 1 if plus_one else array[offset:] if known == "position_embd.weight" else array
    return {name: np.ascontiguousarray(array) for name, array in found.items()}


def write(folder, arch, judge, offset=0, extra=None, **keys):
    config = judge.config
    judge.save_pretrained(folder)
    said = {
        "context_length": config.max_position_embeddings - offset,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.causal": False,
        **keys,
    }
    none = dict.fromkeys(("attention.head_count_kv", "attention.layer_norm_rms_epsilon", "rope.freq_base"))
    tensors = stored(arch, load_file(folder / "model.safetensors"), offset) | (extra or {})
    return write_gguf(folder / "m.gguf", arch, tensors, VOCABULARY, **none | said)


def embedded(file, pooling=None):
    with LLM(str(file), **SETTINGS) as llm:
        params = None if pooling is None else plain(pooling)
        return vectors(llm.embed(prompts(), False, params))


@pytest.mark.parametrize(("name", "offset"), [("bert", 0), ("roberta", 2)])
def test_a_bert_gives_transformers_vectors_and_the_files_pooling(name, offset, tmp_path):
    judge = make_encoder(name, tmp_path)
    eps = float(judge.config.layer_norm_eps)
    kind = int(PoolingType.CLS)
    file = write(tmp_path, "bert", judge, offset, **{"attention.layer_norm_epsilon": eps, "pooling_type": kind})
    first = np.array([states[0] for states in hidden_states(judge)])
    expected = first / np.linalg.norm(first, axis=1, keepdims=True)
    np.testing.assert_allclose(embedded(file), expected, atol=3e-5)


def test_a_nomic_bert_gives_transformers_vectors(tmp_path):
    judge = make_encoder("nomic_bert", tmp_path)
    theta = float(judge.config.rope_parameters["rope_theta"])
    keys = {"attention.layer_norm_epsilon": float(judge.config.layer_norm_eps), "rope.freq_base": theta}
    file = write(tmp_path, "nomic-bert", judge, **keys)
    means = [states.mean(0) for states in hidden_states(judge)]
    np.testing.assert_allclose(embedded(file, "mean"), means, atol=3e-5)


def test_a_modern_bert_gives_transformers_vectors(tmp_path):
    judge = make_encoder("modernbert", tmp_path)
    keys = {
        "attention.layer_norm_epsilon": float(judge.config.norm_eps),
        "attention.sliding_window": judge.config.local_attention,
        "rope.freq_base": 160.0,
        "rope.freq_base_swa": 10.0,
        "pooling_type": int(PoolingType.CLS),
    }
    file = write(tmp_path, "modern-bert", judge, **keys)
    assert len({*judge.config.layer_types}) == 2
    first = np.array([states[0] for states in hidden_states(judge)])
    np.testing.assert_allclose(embedded(file), first / np.linalg.norm(first, axis=1, keepdims=True), atol=3e-5)


@pytest.mark.parametrize(
    ("pattern", "local"), [(2, [False, True, False]), ([True, False, True], [True, False, True]), (None, [0, 1, 1])]
)
def test_a_modern_bert_may_say_which_layers_see_a_window(pattern, local, tmp_path):
    keys = {"attention.layer_norm_epsilon": 0.01, "attention.sliding_window": 10, "hidden_activation": "silu"}
    keys |= {"attention.sliding_window_pattern": pattern}
    file = write(tmp_path, "modern-bert", make_encoder("modernbert", tmp_path), **keys)
    config = config_from_gguf(GGUFFile(file))
    assert [kind == "sliding_attention" for kind in config.layer_types] == list(map(bool, local))
    assert config.hidden_activation == "silu"


def test_an_activation_of_a_modern_bert_that_is_not_known_is_refused(tmp_path):
    keys = {"attention.layer_norm_epsilon": 0.01, "attention.sliding_window": 10, "hidden_activation": "reglu"}
    file = write(tmp_path, "modern-bert", make_encoder("modernbert", tmp_path), **keys)
    with pytest.raises(ValueError, match=r"m\.gguf: hidden_activation='reglu' is not supported; gelu and silu are"):
        describe_model(str(file))


def test_an_embedding_gemma_gives_transformers_vectors_through_its_dense_modules(tmp_path, recwarn):
    judge = make_encoder("embedding_gemma", tmp_path, **GEMMA)
    keys = {
        "attention.head_count_kv": 1,
        "attention.key_length": 16,
        "attention.layer_norm_rms_epsilon": float(judge.config.rms_norm_eps),
        "attention.sliding_window": 10,
        "attention.sliding_window_pattern": 2,
        "rope.freq_base": 160.0,
        "rope.freq_base_swa": 10.0,
        "pooling_type": int(PoolingType.MEAN),
    }
    dense = {f"dense_{number}.weight": matrix for number, matrix in enumerate(DENSE, 2)}
    file = write(tmp_path, "gemma-embedding", judge, extra=dense, **keys)
    through = np.array([DENSE[1] @ (DENSE[0] @ states.mean(0)) for states in hidden_states(judge)])
    np.testing.assert_allclose(embedded(file), through / np.linalg.norm(through, axis=1, keepdims=True), atol=3e-5)
    assert not [str(one.message) for one in recwarn if "were not used" in str(one.message)]


def test_a_causal_file_of_an_encoder_is_refused(tmp_path):
    judge = make_encoder("bert", tmp_path)
    file = write(tmp_path, "bert", judge, **{"attention.layer_norm_epsilon": 0.01, "attention.causal": True})
    with pytest.raises(ValueError, match=r"attention\.causal=True is not supported; attention\.causal=False is"):
        describe_model(str(file))


def test_a_bert_without_a_table_of_positions_is_refused(tmp_path):
    judge = make_encoder("bert", tmp_path)
    file = write(tmp_path, "bert", judge, **{"attention.layer_norm_epsilon": 0.01})
    tensors = stored("bert", load_file(tmp_path / "model.safetensors"))
    del tensors["position_embd.weight"]
    keys = {"attention.layer_norm_epsilon": 0.01, "attention.layer_norm_rms_epsilon": None}
    write_gguf(file, "bert", tensors, VOCABULARY, **keys)
    with pytest.raises(ValueError, match=r"bert without a tensor position_embd\.weight"):
        describe_model(str(file))
