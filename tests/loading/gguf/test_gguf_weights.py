import re

import jax
import ml_dtypes
import numpy as np
import pytest
from dense_model import run_dense
from flax import nnx
from gguf import GGMLQuantizationType as Encoding
from gguf import quants
from gguf_files import VOCABULARY, write_gguf

from jpaged.loading import load_model
from jpaged.loading.demo_model import fetch_demo_model
from jpaged.loading.gguf.config import config_from_gguf
from jpaged.loading.gguf.reader import GGUFFile
from jpaged.loading.gguf.weights import GGUFWeights
from jpaged.loading.model_config import as_transformers
from jpaged.loading.parameters.targets import flat_values
from pallas_kernels.held_matrix import is_held

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


def test_a_shape_is_known_without_reading_what_is_changed(tmp_path, monkeypatch):
    stored = {"blk.0.attn_qkv.weight": draw(96, 32), "blk.0.attn_output.weight": draw(32, 32)}
    reader = weights(tmp_path, "gpt2", stored)
    monkeypatch.setattr(GGUFFile, "decode", lambda *given: pytest.fail("a tensor was decoded"))
    assert reader.shape("transformer.h.0.attn.c_attn.weight") == (32, 96)
    assert reader.shape("transformer.h.0.attn.c_proj.weight") == (32, 32)


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


# ------------------------------------------------------------------ an expert a tensor, as files of early 2024 have it

EXPERTS = 4
PARTS = {"gate": (96, 64), "up": (96, 64), "down": (64, 96)}


def write_mixtral(path, encodings, *, apart, without=()):
    """Write a tiny Mixtral; `encodings` are those of the experts' matrices in turn, `apart` gives each a tensor."""
    rng, ones = np.random.default_rng(1), np.ones(64, np.float32)
    tensors = {"token_embd.weight": rng.standard_normal((32, 64), np.float32), "output_norm.weight": ones}
    for block in ("blk.0", "blk.1"):
        of_block = {"attn_q": 64, "attn_k": 32, "attn_v": 32, "attn_output": 64, "ffn_gate_inp": EXPERTS}
        for part, rows in of_block.items():
            tensors[f"{block}.{part}.weight"] = rng.standard_normal((rows, 64), np.float32) * 0.2
        tensors |= {f"{block}.{norm}.weight": ones for norm in ("attn_norm", "ffn_norm")}
        for part, shape in PARTS.items():
            values = rng.standard_normal((EXPERTS, *shape), np.float32) * 0.2
            stored = [quants.quantize(one, kind) for one, kind in zip(values, encodings, strict=True)]
            if not apart:
                tensors[f"{block}.ffn_{part}_exps.weight"] = np.stack(stored), encodings[0]
                continue
            for number in reversed(range(EXPERTS)):
                tensors[f"{block}.ffn_{part}.{number}.weight"] = stored[number], encodings[number]
    keys = VOCABULARY | {"llama.expert_count": EXPERTS, "llama.expert_used_count": 2}
    return write_gguf(path, "llama", {k: v for k, v in tensors.items() if k not in without}, keys)


def loaded_twice(tmp_path, encodings, **options):
    return [
        load_model(write_mixtral(tmp_path / f"{apart}.gguf", encodings, apart=apart), dtype="float32", **options)
        for apart in (True, False)
    ]


def logits(loaded):
    return run_dense(nnx.merge(loaded.graphdef, loaded.params), np.random.default_rng(0).integers(0, 32, 20))


@pytest.mark.parametrize("encoding", [Encoding.F32, Encoding.Q8_0, Encoding.Q4_1], ids=lambda encoding: encoding.name)
def test_experts_with_a_tensor_each_are_those_in_one_tensor(tmp_path, encoding, recwarn):
    quantization = None if encoding == Encoding.F32 else "gguf"
    apart, merged = loaded_twice(tmp_path, [encoding] * EXPERTS, quantization=quantization)
    assert jax.tree.structure(apart.params) == jax.tree.structure(merged.params)
    for one, other in zip(jax.tree.leaves(apart.params), jax.tree.leaves(merged.params), strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(logits(apart), logits(merged))
    assert not [warning for warning in recwarn if "were not used" in str(warning.message)]


def test_experts_of_one_layer_may_differ_in_their_encodings(tmp_path):
    """The first quantisers counted each expert's tensor as a layer, and gave some more bits."""
    encodings = [Encoding.Q4_1, Encoding.Q8_0, Encoding.Q4_1, Encoding.Q8_0]
    path = write_mixtral(tmp_path / "m.gguf", encodings, apart=True)
    reader = GGUFWeights(GGUFFile(path))
    names = [f"model.layers.1.mlp.experts.{number}.up_proj.weight" for number in range(EXPERTS)]
    assert [reader.encodings(name)[0].name for name in names] == [encoding.name for encoding in encodings]
    kept = flat_values(load_model(path, dtype="float32", quantization="gguf", stacked=False).params)
    floats = flat_values(load_model(path, dtype="float32", stacked=False).params)
    experts = [place for place, value in kept.items() if is_held(value) and "experts" in map(str, place)]
    assert len(experts) == 4, kept.keys()
    for place in experts:
        np.testing.assert_array_equal(kept[place].dequantised(np.float32), floats[place])


@pytest.mark.parametrize(
    ("apart", "missing"),
    [
        (True, "blk.1.ffn_down.2.weight"),
        (False, "blk.1.ffn_down_exps.weight"),
        (True, "blk.0.ffn_gate_inp.weight"),
        (True, "blk.0.attn_norm.weight"),
        (False, "output_norm.weight"),
    ],
)
def test_a_tensor_that_is_missing_has_its_name_in_the_file(tmp_path, apart, missing):
    path = write_mixtral(tmp_path / "m.gguf", [Encoding.F32] * EXPERTS, apart=apart, without=(missing,))
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))} has no tensor {re.escape(missing)} \(model\."):
        load_model(path, dtype="float32")
