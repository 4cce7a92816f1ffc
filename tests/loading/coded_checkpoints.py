"""Writes tiny Llamas in FP8 blocks and in GPTQ, packed by the public definitions, with the floats they stand for."""

import json

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from transformers import LlamaConfig

SIZES = {
    "vocab_size": 96,
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BLOCK = 128


def float_llama(*, tied=False, seed=0):
    """A config and random float32 tensors by name."""
    config = LlamaConfig(**SIZES, tie_word_embeddings=tied)
    rng = np.random.default_rng(seed)
    embed, mlp = config.hidden_size, config.intermediate_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    shapes = {"model.embed_tokens.weight": (config.vocab_size, embed)}
    for n in range(config.num_hidden_layers):
        for name, shape in {
            "self_attn.q_proj": (q, embed),
            "self_attn.k_proj": (kv, embed),
            "self_attn.v_proj": (kv, embed),
            "self_attn.o_proj": (embed, q),
            "mlp.gate_proj": (mlp, embed),
            "mlp.up_proj": (mlp, embed),
            "mlp.down_proj": (embed, mlp),
        }.items():
            shapes[f"model.layers.{n}.{name}.weight"] = shape
    if not tied:
        shapes["lm_head.weight"] = (config.vocab_size, embed)
    tensors = {name: rng.standard_normal(shape, np.float32) * 0.1 for name, shape in shapes.items()}
    norms = [f"model.layers.{n}.{part}_layernorm.weight" for n in (0, 1) for part in ("input", "post_attention")]
    return config, tensors | {name: np.ones(embed, np.float32) for name in (*norms, "model.norm.weight")}


def save(folder, config, tensors, quantization=None):
    """Write a folder whose config has these fields as its quantization_config."""
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / "model.safetensors")
    fields = json.loads((folder / "config.json").read_text())
    if quantization is not None:
        fields["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(fields | {"dtype": "float32"}))
    return folder


# ------------------------------------------------------------------ FP8 in blocks

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}


def fp8_of(matrix):
    """(codes, scale_inv) of a matrix [outputs, inputs], a scale a block, edges included."""
    outputs, inputs = matrix.shape
    scales = np.empty((-(-outputs // BLOCK), -(-inputs // BLOCK)), np.float32)
    codes = np.empty(matrix.shape, ml_dtypes.float8_e4m3fn)
    for row, column in np.ndindex(*scales.shape):
        part = np.s_[row * BLOCK : (row + 1) * BLOCK, column * BLOCK : (column + 1) * BLOCK]
        scales[row, column] = np.abs(matrix[part]).max() / 448
        codes[part] = (matrix[part] / scales[row, column]).astype(ml_dtypes.float8_e4m3fn)
    return codes, scales


def fp8_values(codes, scales):
    """Value by value, as published: each code times its block's scale_inv."""
    out = np.empty(codes.shape, np.float32)
    for row, column in np.ndindex(*codes.shape):
        out[row, column] = np.float32(codes[row, column]) * scales[row // BLOCK, column // BLOCK]
    return out


def fp8_llama(folder, *, tied=False, change=None):
    """Write an FP8 checkpoint, and one of its values; `change` edits the stored tensors. Return both folders."""
    config, tensors = float_llama(tied=tied)
    stored, values = {}, {}
    for name, array in tensors.items():
        if name.endswith("_proj.weight"):
            codes, scales = fp8_of(array)
            stored |= {name: codes, name.removesuffix("weight") + "weight_scale_inv": scales}
            values[name] = fp8_values(codes, scales)
        else:
            stored[name] = values[name] = array
    if change is not None:
        change(stored)
    return save(folder / "fp8", config, stored, FP8), save(folder / "values", config, values)


# ------------------------------------------------------------------ GPTQ


def pack_words(numbers, bits, axis):
    """int32 words of neighbours along `axis`, the first in the lowest bits."""
    numbers = np.moveaxis(np.asarray(numbers, np.uint64), axis, -1)
    per_word = 32 // bits
    words = np.zeros((*numbers.shape[:-1], numbers.shape[-1] // per_word), np.uint64)
    for place in range(per_word):
        words |= numbers[..., place::per_word] << np.uint64(bits * place)
    return np.moveaxis(words.astype(np.uint32).view(np.int32), -1, axis)


def gptq_of(shape, rng, *, bits, group, symmetric, act_order, version, order=None):
    """(stored parts, values) of a random matrix [outputs, inputs].

    Values are computed one by one, as GPTQ defines them: ``(code - zero) * scale`` of the input's group.
    """
    outputs, inputs = shape
    size = inputs if group == -1 else group
    groups = inputs // size
    codes = rng.integers(0, 2**bits, (inputs, outputs))
    middle = 1 << (bits - 1)
    zeros = np.full((groups, outputs), middle) if symmetric else rng.integers(0, 2**bits, (groups, outputs))
    scales = (rng.uniform(0.5, 1.5, (groups, outputs)) * 0.2 / 2**bits).astype(np.float16)
    g_idx = np.arange(inputs) // size
    if act_order:
        g_idx = g_idx[order if order is not None else rng.permutation(inputs)]
    stored_zeros = (zeros - 1) % 2**bits if version == "gptq" else zeros
    values = np.empty(shape, np.float32)
    for output, input_ in np.ndindex(*shape):
        at = g_idx[input_], output
        values[output, input_] = np.float32(codes[input_, output] - zeros[at]) * np.float32(scales[at])
    return {
        "qweight": pack_words(codes, bits, 0),
        "qzeros": pack_words(stored_zeros, bits, 1),
        "scales": scales,
        "g_idx": g_idx.astype(np.int32),
    }, values


def gptq_llama(
    folder,
    *,
    bits=4,
    group=64,
    symmetric=False,
    act_order=True,
    version="gptq",
    tied=False,
    one_order=True,
    change=None,
):
    """Write a GPTQ checkpoint, and one of its values. `one_order`: matrices that multiply the same activations have
    one order of inputs, as GPTQ gives them. Return both folders."""
    config, tensors = float_llama(tied=tied)
    rng = np.random.default_rng(1)
    orders, stored, values = {}, {}, {}
    for name, array in tensors.items():
        if not name.endswith("_proj.weight"):
            stored[name] = values[name] = array
            continue
        owner = name.removesuffix(".weight")
        rows = owner.split(".")[2], owner.rpartition(".")[2][0] in "qkv", owner.rpartition(".")[2][0] in "gu"
        order = None
        if one_order and (rows[1] or rows[2]):
            order = orders.setdefault(rows, rng.permutation(array.shape[1]))
        parts, values[name] = gptq_of(
            array.shape,
            rng,
            bits=bits,
            group=group,
            symmetric=symmetric,
            act_order=act_order,
            version=version,
            order=order,
        )
        stored |= {f"{owner}.{part}": tensor for part, tensor in parts.items()}
    if change is not None:
        change(stored)
    fields = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order, "sym": symmetric}
    quantised = save(folder / "gptq", config, stored, fields | {"checkpoint_format": version})
    return quantised, save(folder / "values", config, values)


# ------------------------------------------------------------------ AWQ and compressed-tensors

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""AutoAWQ's order_map: the output whose code lies in each place of a word, from the lowest bits."""


def awq_words(numbers):
    """int32 words [rows, outputs / 8] of 4-bit numbers [rows, outputs]."""
    rows, outputs = numbers.shape
    words = np.zeros((rows, outputs // 8), np.uint64)
    for place, output in enumerate(AWQ_ORDER):
        words |= numbers[:, output::8].astype(np.uint64) << np.uint64(4 * place)
    return words.astype(np.uint32).view(np.int32)


def awq_llama(folder, *, group=64, change=None):
    """Write an AWQ checkpoint, and one of its values. Return both folders."""
    config, tensors = float_llama()
    rng = np.random.default_rng(2)
    stored, values = {}, {}
    for name, array in tensors.items():
        if not name.endswith("_proj.weight"):
            stored[name] = values[name] = array
            continue
        outputs, inputs = array.shape
        size = inputs if group == -1 else group
        codes = rng.integers(0, 16, (inputs, outputs))
        zeros = rng.integers(0, 16, (inputs // size, outputs))
        scales = rng.uniform(0.005, 0.02, zeros.shape).astype(np.float16)
        wide = (codes - np.repeat(zeros, size, 0)).astype(np.float32) * np.repeat(scales, size, 0).astype(np.float32)
        values[name] = wide.T
        owner = name.removesuffix(".weight")
        stored |= {f"{owner}.qweight": awq_words(codes), f"{owner}.qzeros": awq_words(zeros), f"{owner}.scales": scales}
    if change is not None:
        change(stored)
    fields = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return save(folder / "awq", config, stored, fields), save(folder / "values", config, values)


def packed_llama(folder, *, bits=4, group=64, change=None):
    """Write a pack-quantized checkpoint, and one of its values; group=None: a scale an output. Return both folders."""
    config, tensors = float_llama()
    rng = np.random.default_rng(3)
    stored, values = {}, {}
    for name, array in tensors.items():
        if not name.endswith("_proj.weight"):
            stored[name] = values[name] = array
            continue
        outputs, inputs = array.shape
        size = group or inputs
        codes = rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (outputs, inputs))
        scales = (rng.uniform(0.5, 1.5, (outputs, inputs // size)) * 0.2 / 2**bits).astype(ml_dtypes.bfloat16)
        values[name] = codes.astype(np.float32) * np.repeat(scales, size, 1).astype(np.float32)
        owner = name.removesuffix(".weight")
        stored |= {
            f"{owner}.weight_packed": pack_words(codes + 2 ** (bits - 1), bits, 1),
            f"{owner}.weight_scale": scales,
            f"{owner}.weight_shape": np.array([outputs, inputs], np.int64),
        }
    if change is not None:
        change(stored)
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group" if group else "channel"}
    of_group = {"weights": weights | {"group_size": group, "actorder": None}, "input_activations": None}
    fields = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
    quantised = save(folder / "packed", config, stored, fields | {"config_groups": {"group_0": of_group}})
    return quantised, save(folder / "values", config, values)
