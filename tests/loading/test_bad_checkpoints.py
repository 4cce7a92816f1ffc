"""Every weight format: a wrong config or tensor ends in an error that names the file and the field or tensor."""

import copy
import json
import re
import struct
from collections.abc import Mapping
from types import SimpleNamespace

import numpy as np
import pytest
from coded_checkpoints import SIZES
from format_writers import FORMATS, write_format
from safetensors.numpy import save_file

from jpaged.loading.safetensors_reader import SafetensorsWeights
from jpaged.loading.weight_formats.methods import check_method, method_of, open_coded, quantization_of

OPTIONAL = {
    "awq": {"zero_point": True, "modules_to_not_convert": ["lm_head"]},
    "gptq": {"checkpoint_format": "gptq", "dynamic": {r"+:.*\.down_proj": {"bits": 8}}},
    "auto-round": {"data_type": "int", "extra_config": {"lm_head": {"bits": 16}}},
    "fp8": {"modules_to_not_convert": ["lm_head"], "fmt": "e4m3"},
    "fbgemm_fp8": {"modules_to_not_convert": ["lm_head"]},
    "bitsandbytes": {"llm_int8_skip_modules": ["lm_head"]},
    "modelopt": {"exclude_modules": ["lm_head"]},
    "mlx": {"mode": "affine"},
    "compressed-tensors": {"sparsity_config": {"format": "dense"}},
}
"""Fields that published configs may have besides those of `FORMATS`, by method."""
NOT_READ = {"activation_scheme", "activation_scale_ub", "input_activations", "llm_int8_threshold"}
"""Fields of activations: what they say is not applied."""
WRONG = {
    bool: ("no", 2, [True]),
    int: (0, -7, 3.5, 4.0, "4", True, [4], {"a": 4}),
    str: ("nonsense", 7, True, ["x"], {"a": "x"}),
    list: ("nonsense", 7, [7], {"a": 1}),
    dict: ("nonsense", 7, [1]),
}
"""Values that no field of a type has."""


DOWN = "model.layers.1.mlp.down_proj"
SHAPE = (SIZES["hidden_size"], SIZES["intermediate_size"])


def settings(name):
    fields = copy.deepcopy(FORMATS[name][1])
    fields = quantization_of({"quantization_config": fields})
    return OPTIONAL.get(fields["quant_method"], {}) | fields


def places(fields, path=()):
    """The way to each field, those of tables within it too."""
    for key, value in fields.items():
        if key in NOT_READ:
            continue
        yield (*path, key), value
        if isinstance(value, Mapping):
            yield from places(value, (*path, key))


def replaced(fields, path, value):
    found = copy.deepcopy(fields)
    at = found
    for key in path[:-1]:
        at = at[key]
    if value is ABSENT:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return found


ABSENT = object()


def matrices(folder, fields):
    """The values of the matrices of one layer."""
    check_method({"model_type": "llama", "quantization_config": fields}, folder / "config.json")
    reader = open_coded(SafetensorsWeights(folder), method_of(SimpleNamespace(quantization_config=fields)))
    if f"{DOWN}.weight" not in set(reader.names()):  # the loader names what it needs and does not find
        raise ValueError(f"{folder} has no tensor {DOWN}.weight")
    if reader.shape(f"{DOWN}.weight") != SHAPE:  # whole codes and scales of another matrix, which a reader cannot tell
        raise ValueError(f"{folder}: {DOWN}.weight has another shape")
    names = [name for name in reader.names() if ".layers.1." in name and name.endswith("_proj.weight")]
    return {name: reader.read(name) for name in names}


def outcome(folder, fields, path, whole):
    """Read a folder with this config; return what is wrong with how that ends, None = nothing."""
    try:
        found = matrices(folder, fields)
    except ValueError as error:
        said = str(error)
        named = str(folder) in said and ("model.layers." in said or any(str(key) in said for key in path))
        return None if named else f"names no file with a field or a tensor: {said}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    same = found.keys() == whole.keys() and all(np.array_equal(found[name], whole[name]) for name in whole)
    return "same" if same else "is read as other values"


@pytest.mark.parametrize("name", FORMATS)
def test_a_field_of_a_wrong_type_or_value_is_named_with_the_config(tmp_path, name):
    folder, _ = write_format(tmp_path, name)
    fields = settings(name)
    whole = matrices(folder, fields)
    bad = []
    for path, value in places(fields):
        for wrong in (*WRONG.get(type(value), ()), None, ABSENT):
            if wrong is value or (path == ("quant_method",) and wrong in (None, ABSENT)):
                continue
            said = outcome(folder, replaced(fields, path, wrong), path, whole)
            # Absent and null are the default, which may be the value that is there.
            if said is not None and not (said == "same" and wrong in (None, ABSENT)):
                bad.append(f"{'.'.join(path)}={'absent' if wrong is ABSENT else json.dumps(wrong)}: {said}")
    assert not bad, "\n".join(bad)


# ------------------------------------------------------------------ tensors

NOT_OF_THE_VALUES = ("input_scale", "activation_scale", "input_global_scale")
"""Tensors that no value depends on, which may be absent."""


def spoilt(part, tensor):
    """Each way in which a tensor may be of another form, or hold what it must not, by name."""
    flat = np.atleast_1d(tensor)
    yield "a row more", np.concatenate([flat, flat[:1]])
    yield "a row less", flat[:-1]
    yield "another axis", tensor[None, None]
    yield "no axis", tensor.reshape(-1)[0] if tensor.ndim else np.stack([tensor] * 3)
    yield "one column", flat.reshape(-1, 1) if flat.ndim < 2 or flat.shape[1] != 1 else flat[:, :0]
    yield "as 64-bit numbers", np.zeros(tensor.shape, np.int64 if tensor.dtype != np.int64 else np.uint8)
    yield "as other floats", np.ones(tensor.shape, np.float64)
    if tensor.dtype.kind == "f" or tensor.dtype.name.startswith(("bfloat", "float8")):
        for bad in ("nan", "inf"):
            yield bad, with_last(tensor, np.float32(bad))
    if part == "weight_scale" and tensor.dtype == np.uint8:
        yield "no exponent", with_last(tensor, 255)
    if part.endswith("g_idx"):
        yield "a group too many", with_last(tensor, 1 << 20)
        yield "a group below zero", with_last(tensor, -1)


def with_last(tensor, value):
    spoilt_tensor = tensor.copy().reshape(-1)
    spoilt_tensor[-1] = value
    return spoilt_tensor.reshape(tensor.shape)


@pytest.mark.parametrize("name", FORMATS)
def test_a_tensor_of_another_form_is_named_with_its_file(tmp_path, name):
    folder, _ = write_format(tmp_path, name)
    fields = settings(name)
    file = folder / "model.safetensors"
    reader = SafetensorsWeights(folder)
    tensors = {key: np.array(reader.read_codes(key)) for key in reader.names() if ".layers.1." in key}
    bad = []
    for stored in [stored for stored in tensors if stored.startswith(DOWN)]:
        part = stored.removeprefix(f"{DOWN}.")
        for how, other in (("absent", None), *spoilt(part, tensors[stored])):
            changed = tensors | {stored: other}
            save_file({key: np.ascontiguousarray(a) for key, a in changed.items() if a is not None}, file)
            said = tensor_outcome(folder, fields)
            if said is not None and not (said == "is read" and allowed(part, how, tensors[stored])):
                bad.append(f"{part}, {how}: {said}")
    if name in ("FP8 dynamic", "fbgemm"):  # float8 may have one scale of the whole matrix instead
        bad = [said for said in bad if said != "weight_scale, no axis: is read"]
    assert not bad, "\n".join(bad)


def allowed(part, how, tensor):
    """Whether a form may be read: what no value depends on, a scale of a matrix with another number of axes, floats of
    another size, a code of a float that is no number, and orders that are in order."""
    if part in NOT_OF_THE_VALUES:
        return True
    if how in ("absent", "nan", "inf"):
        return part in ("g_idx", "weight_format") or (how != "absent" and part == "weight")
    return (how in ("no axis", "one column") and (tensor.size == 1 or part == "SCB")) or part == "weight_format"


def tensor_outcome(folder, fields):
    """Read a folder with these tensors; return what is wrong with how that ends, None = an error names them."""
    try:
        matrices(folder, fields)
    except ValueError as error:
        said = str(error)
        return None if str(folder) in said and DOWN in said else f"names no file and tensor: {said}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "is read"


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_that_is_cut_anywhere_is_named(tmp_path, name):
    folder, _ = write_format(tmp_path, name)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for size in (0, 7, 9, 200, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=re.escape(str(file))):
            SafetensorsWeights(folder)


@pytest.mark.parametrize("value", [None, 7, -1, "x", True, [1], [0, 4], [3, 3, 3], [1.5, 2], {"a": 1}])
@pytest.mark.parametrize("field", ["shape", "blocksize", "nested_blocksize", "nested_offset"])
def test_each_field_of_bitsandbytes_own_text_is_named_with_its_tensor(tmp_path, field, value):
    if field == "nested_offset" and value in (7, -1) and value is not True:
        pytest.skip("an offset")
    name = f"{DOWN}.weight.quant_state.bitsandbytes__nf4"

    def change(tensors):
        said = json.loads(tensors[name].tobytes()) | {field: value}
        tensors[name] = np.frombuffer(json.dumps(said).encode(), np.uint8)

    folder, _ = write_format(tmp_path, "NF4 double quantised", change=change)
    assert tensor_outcome(folder, settings("NF4 double quantised")) is None


@pytest.mark.parametrize("text", [b"", b"\xff\xfe", b"[1]", b"{", b"null"])
def test_a_text_of_bitsandbytes_that_is_no_json_is_named_with_its_tensor(tmp_path, text):
    name = f"{DOWN}.weight.quant_state.bitsandbytes__nf4"
    change = {name: np.frombuffer(text, np.uint8)}.items()
    folder, _ = write_format(tmp_path, "NF4", change=lambda tensors: tensors.update(change))
    assert tensor_outcome(folder, settings("NF4")) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", 7),
        ("dtype", None),
        ("shape", [-192, -320]),
        ("shape", [192.0, 320]),
        ("shape", "x"),
        ("shape", None),
        ("data_offsets", [-8, 245752]),
        ("data_offsets", [0]),
        ("data_offsets", [8, 0]),
        ("data_offsets", ["0", "8"]),
        ("data_offsets", None),
        ("data_offsets", [0.0, 245760.0]),
    ],
)
def test_each_field_of_a_safetensors_header_is_named_with_its_file(tmp_path, field, value):
    folder, _ = write_format(tmp_path, "LLM.int8")
    file = folder / "model.safetensors"
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header[f"{DOWN}.SCB"][field] = value
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    with pytest.raises(ValueError, match=re.escape(str(file))):
        open_coded(SafetensorsWeights(folder), method_of(SimpleNamespace(quantization_config=settings("LLM.int8"))))
