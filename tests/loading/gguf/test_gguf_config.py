import numpy as np
import pytest
from gguf_files import EMBEDDING, write_gguf

from jpaged.loading.demo_model import fetch_demo_model
from jpaged.loading.gguf.config import config_from_gguf
from jpaged.loading.gguf.reader import GGUFFile


def config(path, arch="llama", tensors=EMBEDDING, **changes):
    return config_from_gguf(GGUFFile(write_gguf(path / "m.gguf", arch, tensors, **changes)))


def test_the_demo_model_is_smollm2():
    found = config_from_gguf(GGUFFile(fetch_demo_model())).to_dict()
    expected = {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "eos_token_id": 2,
    }
    assert {key: found[key] for key in expected} == expected


def test_embeddings_are_tied_only_when_there_is_no_output_tensor(tmp_path):
    untied = EMBEDDING | {"output.weight": np.zeros((32, 64), np.float32)}
    assert not config(tmp_path, tensors=untied).tie_word_embeddings


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "qwen2vl", "qwen3vl"])
def test_qwen_is_read(tmp_path, arch):
    sections = {"rope__dimension_sections": [8, 4, 4, 0]} if arch.endswith("vl") else {}
    found = config(tmp_path, arch, attention__key_length=32, **sections)
    family = arch.removesuffix("vl")
    assert (found.model_type, found.num_hidden_layers, found.vocab_size) == (family, 2, 32)
    assert found.head_dim == 32
    assert set(found.layer_types) == {"full_attention"}


GEMMA = {
    "attention__key_length": 32,
    "attention__sliding_window": 128,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}


@pytest.mark.parametrize(("layers", "scalar"), [(2, 32), (46, 16)])
def test_gemma2_scales_queries_by_head_size_except_the_27b_model(tmp_path, layers, scalar):
    found = config(tmp_path, "gemma2", block_count=layers, **GEMMA)
    assert found.query_pre_attn_scalar == scalar
    assert (found.sliding_window, found.attn_logit_softcapping, found.final_logit_softcapping) == (128, 50.0, 30.0)
    assert found.layer_types[:2] == ["sliding_attention", "full_attention"]


def test_linear_rope_scaling_is_read(tmp_path):
    found = config(tmp_path, rope__scaling__type="linear", rope__scaling__factor=4.0)
    assert found.rope_parameters == {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize("name", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_factor_without_a_kind_of_scaling_is_linear_as_in_llama_cpp(tmp_path, name):
    extra = {f"llama.{name}": 4.0}
    found = config_from_gguf(GGUFFile(write_gguf(tmp_path / "m.gguf", "llama", EMBEDDING, extra)))
    assert found.rope_parameters == {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize("changes", [{"rope__scaling__factor": 1.0}, {"rope__scaling__type": "none"}])
def test_a_factor_that_says_nothing_leaves_positions_as_they_are(tmp_path, changes):
    found = config(tmp_path, **{"rope__scaling__factor": 4.0} | changes)
    assert found.rope_parameters == {"rope_theta": 10000.0, "rope_type": "default"}


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_yarn_of_a_qwen_is_what_the_makers_config_says(tmp_path, arch):
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 128, "yarn_beta_fast": 16.0}
    found = config(tmp_path, arch, **{f"rope__scaling__{key}": value for key, value in scaling.items()})
    assert found.rope_parameters == {
        "rope_theta": 10000.0,
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16.0,
    }


def test_yarns_attention_factor_multiplies_its_own_as_in_llama_cpp(tmp_path):
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 128, "attn_factor": 0.5}
    found = config(tmp_path, "qwen3", **{f"rope__scaling__{key}": value for key, value in scaling.items()})
    assert found.rope_parameters["attention_factor"] == pytest.approx(0.5 * (1 + 0.1 * np.log(4.0)))
    neutral = config(
        tmp_path, "qwen3", **{f"rope__scaling__{k}": v for k, v in (scaling | {"attn_factor": 1.0}).items()}
    )
    assert "attention_factor" not in neutral.rope_parameters


def llama3_divisors(factor, head_dim=16, theta=500000.0):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_theta": theta, "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    reference = LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=head_dim, rope_parameters=rope)
    scaled = ROPE_INIT_FUNCTIONS["llama3"](reference, "cpu")[0].numpy()
    return (theta ** (-np.arange(0, head_dim, 2) / head_dim) / scaled).astype(np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_parameters_are_recovered_from_the_frequencies(tmp_path, factor):
    pytest.importorskip("torch")
    tensors = EMBEDDING | {"rope_freqs.weight": llama3_divisors(factor)}
    rope = config(tmp_path, tensors=tensors, rope__freq_base=500000.0).rope_parameters
    assert (rope["rope_type"], rope["original_max_position_embeddings"]) == ("llama3", 8192)
    assert rope["factor"] == pytest.approx(factor, rel=1e-5)


def test_other_frequencies_are_refused(tmp_path):
    tensors = EMBEDDING | {"rope_freqs.weight": np.linspace(1, 8, 8, dtype=np.float32)}
    with pytest.raises(ValueError, match=r"rope_freqs\.weight is not Llama 3's"):
        config(tmp_path, tensors=tensors)


def test_settings_of_yarn_that_change_nothing_are_taken(tmp_path):
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 128}
    scaling |= {"yarn_ext_factor": 1.0, "yarn_attn_factor": 1.0}
    rope = config(tmp_path, "qwen3", **{f"rope__scaling__{key}": value for key, value in scaling.items()})
    assert (rope.rope_parameters["rope_type"], rope.rope_parameters["factor"]) == ("yarn", 4.0)


@pytest.mark.parametrize(
    ("arch", "changes", "message"),
    [
        ("mamba", {}, "architecture 'mamba' is not supported; supported: llama, qwen2, qwen2vl, qwen3"),
        ("qwen2", {"expert_count": 8}, "mixture-of-experts"),
        ("llama", {"rope__scaling__type": "yarn"}, r"rope\.scaling\.type='yarn' is not supported"),
        (
            "qwen3",
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__original_context_length": 128,
                "rope__scaling__yarn_attn_factor": 2.0,
            },
            r"qwen3\.rope\.scaling\.yarn_attn_factor=2\.0 is not supported",
        ),
        ("llama", {"rope__scaling__attn_factor": 1.5}, r"llama\.rope\.scaling\.attn_factor=1\.5 is supported with"),
        ("qwen2", {"attention__causal": False}, r"attention\.causal=False is not supported"),
        ("llama", {"expert_weights_scale": 2.5}, r"expert_weights_scale=2\.5 is not supported"),
        ("llama", {"rope__dimension_count": 8}, r"rope\.dimension_count=8 of head size 16"),
        ("llama", {"context_length": None}, r"no llama\.context_length"),
    ],
)
def test_what_cannot_be_represented_is_named(tmp_path, arch, changes, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, arch, **changes)


@pytest.mark.parametrize(
    ("tensors", "extra", "message"),
    [
        (EMBEDDING, {"split.count": 3}, r"m\.gguf is part 1 of 3: its name must end in -00001-of-00003\.gguf"),
        ({"output.weight": np.ones((4, 64), np.float32)}, {}, r"m\.gguf has no tensor token_embd\.weight"),
    ],
)
def test_a_part_of_a_model_is_no_model(tmp_path, tensors, extra, message):
    with pytest.raises(ValueError, match=message):
        config_from_gguf(GGUFFile(write_gguf(tmp_path / "m.gguf", "llama", tensors, extra)))
