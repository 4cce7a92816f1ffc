import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Encoding
from gguf import quants
from gguf_files import write_gguf

from jpaged.loading.demo_model import fetch_demo_model
from jpaged.loading.gguf.config import config_from_gguf
from jpaged.loading.gguf.reader import GGUFFile
from jpaged.loading.gguf.weights import GGUFWeights
from jpaged.loading.model_config import as_transformers

RNG = np.random.default_rng(0)


def draw(*shape):
    return RNG.standard_normal(shape, np.float32)


def interleave(weight, heads):
    """Return rows of a query or key projection in the order that llama.cpp's converter gives them."""
    by_half = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return by_half.swapaxes(1, 2).reshape(weight.shape)


def weights(path, arch, tensors):
    return GGUFWeights(GGUFFile(write_gguf(path / "m.gguf", arch, tensors)))


def test_llama_projections_are_put_back_in_order(tmp_path):
    q, k, v = draw(64, 64), draw(32, 64), draw(32, 64)
    bias = draw(32)
    stored = {
        "blk.0.attn_q.weight": interleave(q, 4),
        "blk.0.attn_k.weight": interleave(k, 2),
        "blk.0.attn_v.weight": v,
        "blk.0.attn_k.bias": interleave(bias, 2),
    }
    reader = weights(tmp_path, "llama", stored)
    np.testing.assert_array_equal(reader.read("model.layers.0.self_attn.q_proj.weight"), q)
    np.testing.assert_array_equal(reader.read("model.layers.0.self_attn.k_proj.weight"), k)
    np.testing.assert_array_equal(reader.read("model.layers.0.self_attn.v_proj.weight"), v)
    np.testing.assert_array_equal(reader.read("model.layers.0.self_attn.k_proj.bias"), bias)


def test_quantised_rows_are_put_back_in_order_too(tmp_path):
    q = draw(64, 64)
    packed = quants.quantize(interleave(q, 4), Encoding.Q8_0)
    reader = weights(tmp_path, "llama", {"blk.0.attn_q.weight": (packed, Encoding.Q8_0)})
    expected = quants.dequantize(quants.quantize(q, Encoding.Q8_0), Encoding.Q8_0)
    np.testing.assert_array_equal(reader.read("model.layers.0.self_attn.q_proj.weight"), expected)
    assert reader.quantised
    assert reader.stored_dtype == np.float32


def test_other_architectures_are_not_reordered(tmp_path):
    q = draw(64, 64)
    reader = weights(tmp_path, "qwen2", {"blk.1.attn_q.weight": q})
    np.testing.assert_array_equal(reader.read("model.layers.1.self_attn.q_proj.weight"), q)


def test_gemma2_norms_lose_the_one_that_was_added(tmp_path):
    norm, matrix = draw(64), draw(96, 64)
    stored = {
        "blk.0.post_ffw_norm.weight": norm + 1,
        "output_norm.weight": norm + 1,
        "blk.0.ffn_up.weight": matrix,
    }
    reader = weights(tmp_path, "gemma2", stored)
    for name in ("model.layers.0.post_feedforward_layernorm.weight", "model.norm.weight"):
        np.testing.assert_allclose(reader.read(name), norm, atol=1e-6)
    np.testing.assert_array_equal(reader.read("model.layers.0.mlp.up_proj.weight"), matrix)


@pytest.mark.parametrize(
    ("arch", "stored", "name"),
    [
        ("llama", "token_embd.weight", "model.embed_tokens.weight"),
        ("llama", "output.weight", "lm_head.weight"),
        ("llama", "blk.11.ffn_norm.weight", "model.layers.11.post_attention_layernorm.weight"),
        ("qwen3", "blk.0.attn_k_norm.weight", "model.layers.0.self_attn.k_norm.weight"),
        ("gemma2", "blk.0.ffn_norm.weight", "model.layers.0.pre_feedforward_layernorm.weight"),
        ("gemma2", "blk.0.post_attention_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
        ("llama", "blk.0.something_new.weight", "blk.0.something_new.weight"),
    ],
)
def test_tensors_have_hugging_face_names(tmp_path, arch, stored, name):
    reader = weights(tmp_path, arch, {stored: draw(32)})
    assert list(reader.names()) == [name]
    assert reader.shape(name) == (32,)


def test_frequencies_are_left_to_the_config(tmp_path):
    assert not list(weights(tmp_path, "llama", {"rope_freqs.weight": draw(8)}).names())


@pytest.mark.parametrize(("encoding", "dtype"), [(Encoding.F16, np.float16), (Encoding.BF16, ml_dtypes.bfloat16)])
def test_half_precision_stays_as_stored(tmp_path, encoding, dtype):
    values = draw(32, 64)
    reader = weights(tmp_path, "llama", {"output.weight": (quants.quantize(values, encoding), encoding)})
    found = reader.read("lm_head.weight")
    assert found.dtype == reader.stored_dtype == reader.dtype("lm_head.weight") == dtype
    assert not reader.quantised
    np.testing.assert_array_equal(found, values.astype(dtype))


@pytest.mark.nightly
def test_the_demo_models_tensors_equal_those_transformers_reads():
    torch = pytest.importorskip("torch")
    from transformers import LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    file = GGUFFile(fetch_demo_model())
    with torch.device("meta"):
        shapes = LlamaForCausalLM(as_transformers(config_from_gguf(file)))
    expected = load_gguf_checkpoint(str(file.path), return_tensors=True, model_to_load=shapes)["tensors"]
    reader = GGUFWeights(file)
    assert set(reader.names()) == set(expected)
    for name, tensor in expected.items():
        np.testing.assert_array_equal(reader.read(name), tensor.numpy(), err_msg=name)
