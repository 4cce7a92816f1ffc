"""Texts go on from a few prompts."""

import json
import sys

from vllm import LLM, SamplingParams

MODEL, SETTINGS = sys.argv[1], json.loads(sys.argv[2])
prompts = ["The capital of Peru is", "A cab is", "My name is", "The sea is"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)


def main():
    llm = LLM(model=MODEL, **SETTINGS)
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt: {prompt!r}, Output: {generated_text!r}")
    return [(output.prompt, len(output.outputs[0].token_ids) <= 16, output.finished) for output in outputs]


RESULT = main()
EXPECTED = [(prompt, True, True) for prompt in prompts]
