"""Prints an encoder's vectors as JSON: run it with the checkpoint's folder and a tensor-parallel size."""

import json
import sys

from encoder_prompts import SETTINGS, plain, prompts

from jpaged import LLM

if __name__ == "__main__":
    folder, devices = sys.argv[1:]
    with LLM(folder, tensor_parallel_size=int(devices), **SETTINGS) as llm:
        outputs = llm.embed(prompts(), False, plain("mean"))
    print(json.dumps([output.outputs.embedding for output in outputs]))
