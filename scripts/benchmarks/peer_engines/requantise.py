"""Writes a GGUF file's matrices in Q8_0, all else in float32: python requantise.py MODEL.gguf OUT.gguf"""

import sys

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize

OWN = ("general.architecture", "general.file_type", "general.quantization_version")
Q8_0_FILE = 7
reader = GGUFReader(sys.argv[1])
writer = GGUFWriter(sys.argv[2], reader.fields["general.architecture"].contents())
for name, field in reader.fields.items():
    if not name.startswith("GGUF.") and name not in OWN:
        kind = field.types[0]
        writer.add_key_value(name, field.contents(), kind, field.types[-1] if kind == GGUFValueType.ARRAY else None)
writer.add_file_type(Q8_0_FILE)
writer.add_quantization_version(2)
for tensor in reader.tensors:
    values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(tensor.shape[::-1].tolist())
    if values.ndim == 1:
        writer.add_tensor(tensor.name, values)
    else:
        form = GGMLQuantizationType.Q8_0
        writer.add_tensor(tensor.name, quantize(values, form), raw_dtype=form)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
