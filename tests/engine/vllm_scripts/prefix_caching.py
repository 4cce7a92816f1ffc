"""Prompts that begin alike give the same texts with and without the cache, which is used."""

import json
import sys

from vllm import LLM, SamplingParams

MODEL, SETTINGS = sys.argv[1], json.loads(sys.argv[2])
prefix = "You run a small school. You wrote down, one by one, what each of the pupils there is to do today. "
prompts = [prefix + prompt for prompt in ("First", "The cab", "Then they", "At last")]
sampling_params = SamplingParams(temperature=0.0, max_tokens=8)
regular_llm = LLM(model=MODEL, gpu_memory_utilization=0.4, enable_prefix_caching=False, **SETTINGS)
outputs = regular_llm.generate(prompts, sampling_params)
regular = [output.outputs[0].text for output in outputs]
del regular_llm
prefix_cached_llm = LLM(model=MODEL, enable_prefix_caching=True, gpu_memory_utilization=0.4, **SETTINGS)
prefix_cached_llm.generate(prompts[0], sampling_params)
outputs = prefix_cached_llm.generate(prompts, sampling_params)
cached = [output.outputs[0].text for output in outputs]
RESULT = [cached, all(output.num_cached_tokens > 0 for output in outputs)]
EXPECTED = [regular, True]
