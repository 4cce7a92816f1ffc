"""Reads a folder of compressed-tensors with that package, in an environment that has it (vLLM's), for `vllm_judge`.

    python compressed_values.py FOLDER OUT.safetensors

OUT gets the values of every quantised matrix, in float32, by the names of plain checkpoints. Scales are widened before
they multiply, so that nothing is rounded. It imports nothing of jpaged.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file


def main() -> None:
    folder, out = map(Path, sys.argv[1:])
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    scheme = QuantizationScheme(**said["config_groups"]["group_0"])
    compressor = BaseCompressor.get_value_from_registry(said["format"])
    modules = defaultdict(dict)
    for file in folder.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            owner, _, part = name.rpartition(".")
            modules[owner][part] = tensor
    values = {}
    for owner, parts in modules.items():
        if "weight_scale" in parts:
            parts["weight_scale"] = parts["weight_scale"].float()
            values[f"{owner}.weight"] = compressor.decompress(parts, scheme)["weight"].float().contiguous()
    save_file(values, out)


if __name__ == "__main__":
    main()
