"""Tiny checkpoints in each weight format, packed by the public definitions, with the floats that they stand for.

A writer takes a module's name, its matrix' shape and a generator, and returns the stored tensors by the ends of their
names, and the matrix' values in float32. `FORMATS` has a row a form: a writer and the config's fields.
"""

import json

import ml_dtypes
import numpy as np
from coded_checkpoints import SIZES, awq_words, float_llama, pack_words, save
from transformers import Phi3Config

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""OCP Microscaling Formats 1.0, section 5.3.3."""
NF4 = np.array(
    [
        *(-1, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1),
    ],
    np.float32,
)
"""QLoRA (2023), appendix E."""
FP4 = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3], np.float32) / np.float32(12)
FLOAT8 = ml_dtypes.float8_e4m3fn


def scales_of(rng, shape, bits=4, dtype=np.float32):
    return (rng.uniform(0.5, 1.5, shape) * 0.3 / 2**bits).astype(dtype)


def spread(scales, size, inputs):
    """Each group's number for each of its inputs, float32."""
    return np.repeat(scales.astype(np.float32), size, 1)[:, :inputs]


def packed(bits, group, *, symmetric=True, sorts=False, dtype=ml_dtypes.bfloat16):
    """compressed-tensors' pack-quantized; group=None: a scale an output."""

    def write(module, shape, rng):
        outputs, inputs = shape
        size = group or inputs
        middle = 2 ** (bits - 1)
        codes = rng.integers(-middle, middle, shape)
        scales = scales_of(rng, (outputs, -(-inputs // size)), bits, dtype)
        zeros = np.zeros(scales.shape, int) if symmetric else rng.integers(-middle, middle, scales.shape)
        of_input = np.arange(inputs) // size
        if sorts:  # matrices that multiply the same activations share an order
            of_input = np.random.default_rng(inputs).permutation(of_input)
        values = (codes - zeros[:, of_input]).astype(np.float32) * scales.astype(np.float32)[:, of_input]
        parts = {
            "weight_packed": pack_words(codes + middle, bits, 1),
            "weight_scale": scales,
            "weight_shape": np.array(shape, np.int64),
        }
        if not symmetric:
            parts["weight_zero_point"] = pack_words(zeros + middle, bits, 0)
        return parts | ({"weight_g_idx": of_input.astype(np.int32)} if sorts else {}), values

    return write


def int8(strategy, *, symmetric=True):
    """compressed-tensors' int-quantized."""

    def write(module, shape, rng):
        size = {"channel": (shape[0], 1), "tensor": (1,)}[strategy]
        codes, scales = rng.integers(-128, 128, shape), scales_of(rng, size, 8)
        zeros = np.zeros(size, int) if symmetric else rng.integers(-20, 20, size)
        values = (codes - zeros).astype(np.float32) * scales
        parts = {"weight": codes.astype(np.int8), "weight_scale": scales}
        return parts | ({} if symmetric else {"weight_zero_point": zeros.astype(np.int8)}), values

    return write


def float8(kind, ending="weight_scale", *, static=None, block=128, dtype=np.float32):
    """float8 with a scale a "tensor" (as [], or "one" as [1]), "channel", "flat" channel or "block"."""

    def write(module, shape, rng):
        outputs, inputs = shape
        sizes = {"tensor": (), "one": (1,), "channel": (outputs, 1), "flat": (outputs,)}
        size = sizes.get(kind, (-(-outputs // block), -(-inputs // block)))
        codes = (rng.standard_normal(shape) * 100).clip(-448, 448).astype(FLOAT8)
        scales = np.asarray(scales_of(rng, size, 11), dtype)
        wide = scales.astype(np.float32)
        if kind == "block":
            wide = np.repeat(np.repeat(wide, block, 0), block, 1)[:outputs, :inputs]
        values = codes.astype(np.float32) * (wide[:, None] if kind == "flat" else wide)
        parts = {"weight": codes, ending: scales}
        return parts | ({static: np.array(0.02, np.float32)} if static else {}), values

    return write


def nvfp4(codes_name, whole, *, divides, static="input_scale"):
    def write(module, shape, rng):
        outputs, inputs = shape
        codes = rng.integers(0, 16, shape)
        scales = rng.uniform(20, 400, (outputs, inputs // 16)).astype(FLOAT8)
        one = np.array([0.0003 if not divides else 3000.0], np.float32)
        wide = scales.astype(np.float32) / one if divides else scales.astype(np.float32) * one
        values = E2M1[codes] * spread(wide, 16, inputs)
        pairs = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
        return {codes_name: pairs, "weight_scale": scales, whole: one, static: np.ones(1, np.float32)}, values

    return write


def mxfp4(module, shape, rng):
    outputs, inputs = shape
    codes, exponents = rng.integers(0, 16, shape), rng.integers(120, 125, (outputs, inputs // 32))
    values = E2M1[codes] * spread(2.0 ** (exponents - 127), 32, inputs)
    pairs = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
    return {"weight_packed": pairs, "weight_scale": exponents.astype(np.uint8)}, values


def gptq(bits, group, *, symmetric, version="gptq", with_groups=False, but=None):
    """GPTQ; `but` = (part of a module's name, other bits), as `dynamic` has them."""

    def write(module, shape, rng):
        outputs, inputs = shape
        width = but[1] if but and but[0] in module else bits
        size = inputs if group == -1 else group
        codes, middle = rng.integers(0, 2**width, (inputs, outputs)), 2 ** (width - 1)
        zeros_shape = (-(-inputs // size), outputs)
        zeros = np.full(zeros_shape, middle) if symmetric else rng.integers(0, 2**width, zeros_shape)
        scales = scales_of(rng, zeros_shape, width, np.float16)
        of_input = np.arange(inputs) // size
        values = ((codes - zeros[of_input]).astype(np.float32) * scales.astype(np.float32)[of_input]).T
        parts = {
            "qweight": pack_words(codes, width, 0),
            "qzeros": pack_words((zeros - 1) % 2**width if version == "gptq" else zeros, width, 1),
            "scales": scales,
        }
        return parts | ({"g_idx": of_input.astype(np.int32)} if with_groups else {}), values

    return write


def awq(group):
    def write(module, shape, rng):
        outputs, inputs = shape
        codes, zeros = rng.integers(0, 16, (inputs, outputs)), rng.integers(0, 16, (inputs // group, outputs))
        scales = scales_of(rng, zeros.shape, 4, np.float16)
        of_input = np.arange(inputs) // group
        values = ((codes - zeros[of_input]).astype(np.float32) * scales.astype(np.float32)[of_input]).T
        return {"qweight": awq_words(codes), "qzeros": awq_words(zeros), "scales": scales}, values

    return write


def mlx(bits, group, dtype=ml_dtypes.bfloat16):
    def write(module, shape, rng):
        outputs, inputs = shape
        codes = rng.integers(0, 2**bits, shape)
        scales = scales_of(rng, (outputs, inputs // group), bits, dtype)
        biases = (-(2.0 ** (bits - 1)) * scales.astype(np.float32) * rng.uniform(0.8, 1.2, scales.shape)).astype(dtype)
        values = codes.astype(np.float32) * spread(scales, group, inputs) + spread(biases, group, inputs)
        words = pack_words(codes, bits, 1).view(np.uint32)
        return {"weight": words, "scales": scales, "biases": biases}, values

    return write


def bnb4(kind, block=64, *, nested=False):
    table = {"nf4": NF4, "fp4": FP4}[kind]

    def write(module, shape, rng):
        codes = rng.integers(0, 16, np.prod(shape))
        blocks = -(-len(codes) // block)
        state = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": list(shape)}
        parts = {"weight": (codes[::2] << 4 | codes[1::2]).astype(np.uint8)[:, None], "weight.quant_map": table}
        if nested:
            held, numbers = rng.integers(0, 256, blocks), np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
            largest = rng.uniform(0.01, 0.05, -(-blocks // 256)).astype(np.float32)
            offset = np.float32(0.1)
            absmax = numbers[held] * np.repeat(largest, 256)[:blocks] + offset
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(offset)}
            parts |= {"weight.absmax": held.astype(np.uint8), "weight.nested_absmax": largest}
            parts["weight.nested_quant_map"] = numbers
        else:
            absmax = parts["weight.absmax"] = scales_of(rng, blocks, 1)
        said = np.frombuffer(json.dumps(state).encode(), np.uint8)
        parts[f"weight.quant_state.bitsandbytes__{kind}"] = said
        return parts, (table[codes] * np.repeat(absmax, block)[: len(codes)]).reshape(shape)

    return write


def llm_int8(module, shape, rng):
    codes, largest = rng.integers(-127, 128, shape), scales_of(rng, shape[0], 1)
    parts = {"weight": codes.astype(np.int8), "SCB": largest, "weight_format": np.zeros((), np.uint8)}
    return parts, codes.astype(np.float32) * (largest / np.float32(127))[:, None]


def by_module(**writers):
    """The writer of the first name that is part of a module's."""

    def write(module, shape, rng):
        return next(writer for part, writer in writers.items() if part in module)(module, shape, rng)

    return write


def ct(stored, *, targets=("Linear",), of_group=None, activations=None, **weights):
    """A group of compressed-tensors' config."""
    said = {"type": "int", "symmetric": True} | weights
    own = {"targets": list(targets), "weights": said, "input_activations": activations}
    return own | ({"format": of_group} if of_group else {})


def compressed(stored, *groups, **more):
    named = {f"group_{n}": group for n, group in enumerate(groups)}
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "config_groups": named,
        "ignore": ["lm_head"],
    } | more


DYNAMIC = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}
STATIC = {"num_bits": 8, "type": "float", "dynamic": False, "strategy": "tensor"}
P, I8, F8 = "pack-quantized", "int-quantized", "float-quantized"
NV, MX = "nvfp4-pack-quantized", "mxfp4-pack-quantized"
GPTQ4 = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False}
BNB4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
AUTO = {"quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": True}
MIXED = by_module(
    down_proj=packed(8, None), self_attn=float8("channel", static="input_scale"), mlp=packed(4, 64, symmetric=False)
)

FORMATS = {
    "W4A16 in groups of 32": (packed(4, 32), compressed(P, ct(P, num_bits=4, strategy="group", group_size=32))),
    "W4A16 with zero points": (
        packed(4, 64, symmetric=False),
        compressed(P, ct(P, num_bits=4, strategy="group", group_size=64, symmetric=False)),
    ),
    "W8A16 with zero points an output": (
        packed(8, None, symmetric=False, dtype=np.float16),
        compressed(P, ct(P, num_bits=8, strategy="channel", symmetric=False)),
    ),
    "W4A16 with actorder of groups": (
        packed(4, 64, sorts=True),
        compressed(P, ct(P, num_bits=4, strategy="group", group_size=64, actorder="group")),
    ),
    "W8A8": (int8("channel"), compressed(I8, ct(I8, num_bits=8, strategy="channel", activations=DYNAMIC))),
    "W8A8 with zero points": (
        int8("channel", symmetric=False),
        compressed(I8, ct(I8, num_bits=8, strategy="channel", symmetric=False, activations=DYNAMIC)),
    ),
    "W8A8 a scale a matrix": (int8("tensor"), compressed(I8, ct(I8, num_bits=8, strategy="tensor"))),
    "FP8 dynamic": (
        float8("channel", dtype=ml_dtypes.bfloat16),
        compressed(F8, ct(F8, num_bits=8, type="float", strategy="channel", activations=STATIC | {"dynamic": True})),
    ),
    "FP8 static": (
        float8("one", static="input_scale"),
        compressed(F8, ct(F8, num_bits=8, type="float", strategy="tensor", activations=STATIC)),
    ),
    "FP8 of compressed-tensors in blocks": (
        float8("block"),
        compressed(F8, ct(F8, num_bits=8, type="float", strategy="block", block_structure=[128, 128])),
    ),
    "naive-quantized": (
        float8("tensor"),
        compressed("naive-quantized", ct(F8, num_bits=8, type="float", strategy="tensor")),
    ),
    "NVFP4 of compressed-tensors": (
        nvfp4("weight_packed", "weight_global_scale", divides=True, static="input_global_scale"),
        compressed(NV, ct(NV, num_bits=4, type="float", strategy="tensor_group", group_size=16)),
    ),
    "MXFP4 of compressed-tensors": (
        mxfp4,
        compressed(MX, ct(MX, num_bits=4, type="float", strategy="group", group_size=32)),
    ),
    "several groups": (
        MIXED,
        compressed(
            "mixed-precision",
            ct(P, of_group=P, num_bits=4, strategy="group", group_size=64, symmetric=False),
            ct(P, of_group=P, targets=["re:.*down_proj$"], num_bits=8, strategy="channel"),
            ct(
                F8,
                of_group=F8,
                targets=["re:.*self_attn.*"],
                num_bits=8,
                type="float",
                strategy="channel",
                activations=STATIC,
            ),
        ),
    ),
    "AWQ in groups of 32": (awq(32), {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
    "AWQ by AutoRound": (awq(64), AUTO | {"packing_format": "auto_round:auto_awq"}),
    "GPTQ by AutoRound": (gptq(4, 64, symmetric=True), AUTO | {"packing_format": "auto_round:auto_gptq"}),
    "AutoRound's packing": (gptq(4, 64, symmetric=True, version="gptq_v2"), AUTO | {"packing_format": "auto_round"}),
    "GPTQ with other bits for some": (
        gptq(4, 64, symmetric=True, but=("down_proj", 8), with_groups=True),
        GPTQ4 | {"dynamic": {r"+:.*\.down_proj": {"bits": 8}}},
    ),
    "FP8 a scale a matrix": (
        float8("tensor", static="input_scale"),
        {"quant_method": "fp8", "activation_scheme": "static"},
    ),
    "FP8 as Ministral 3 has it": (
        float8("tensor", "weight_scale_inv", static="activation_scale", dtype=ml_dtypes.bfloat16),
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
    ),
    "fbgemm": (float8("channel"), {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
    "MLX in 4 bits": (mlx(4, 64), {"group_size": 64, "bits": 4}),
    "MLX in 8 bits": (mlx(8, 32, np.float16), {"group_size": 32, "bits": 8, "mode": "affine"}),
    "MLX with other bits for some": (
        by_module(**{"layers.0.mlp.down_proj": mlx(8, 64), "": mlx(4, 64)}),
        {"group_size": 64, "bits": 4, "model.layers.0.mlp.down_proj": {"group_size": 64, "bits": 8}},
    ),
    "NF4": (bnb4("nf4"), BNB4 | {"bnb_4bit_quant_type": "nf4"}),
    "NF4 with runs that cross rows": (bnb4("nf4", 128), BNB4 | {"bnb_4bit_quant_type": "nf4"}),
    "NF4 double quantised": (bnb4("nf4", nested=True), BNB4 | {"bnb_4bit_quant_type": "nf4"}),
    "FP4": (bnb4("fp4"), BNB4 | {"bnb_4bit_quant_type": "fp4"}),
    "LLM.int8": (llm_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "ModelOpt's FP8": (float8("tensor", static="input_scale"), {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "ModelOpt's NVFP4": (
        nvfp4("weight", "weight_scale_2", divides=False),
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
    ),
}


def write_format(folder, name, *, fused=False, tied=False, head=False, change=None, keep=()):
    """Write a checkpoint in a format of `FORMATS`, and one of its values. Return both folders.

    Args:
        fused: of a Phi-3, whose Q, K and V, and whose gate and up, are one matrix each.
        tied: whether the embedding is the head.
        head: whether a matrix of the vocabulary is quantised too, the head's or, if tied, the embedding's.
        change: edits the stored tensors.
        keep: parts of names of modules that are plain.
    """
    writer, fields = FORMATS[name]
    config, tensors = float_llama(tied=tied)
    if fused:
        config = Phi3Config(**SIZES, tie_word_embeddings=tied, pad_token_id=0)
        tensors = _fused(tensors)
    rng = np.random.default_rng(5)
    tables = ["model.embed_tokens.weight" if tied else "lm_head.weight"] if head else []
    stored, values = {}, {}
    for name_, array in tensors.items():
        module = name_.removesuffix(".weight")
        if not (name_.endswith("_proj.weight") or name_ in tables) or any(part in module for part in keep):
            stored[name_] = values[name_] = array
            continue
        parts, values[name_] = writer(module, array.shape, rng)
        stored |= {f"{module}.{part}": tensor for part, tensor in parts.items()}
    if change is not None:
        change(stored)
    if head and "ignore" in fields:
        fields = fields | {"ignore": []}
    return save(folder / "codes", config, stored, fields), save(folder / "values", config, values)


def _fused(tensors):
    """A Llama's tensors with Phi-3's names and forms."""
    found = dict(tensors)
    for layer in range(SIZES["num_hidden_layers"]):
        owner = f"model.layers.{layer}."
        for parts, joined in (
            (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn.qkv_proj"),
            (("mlp.gate_proj", "mlp.up_proj"), "mlp.gate_up_proj"),
        ):
            found[f"{owner}{joined}.weight"] = np.concatenate([found.pop(f"{owner}{part}.weight") for part in parts])
    return found
