"""Log-probabilities of prompts and outputs, a few and all."""

import json
import sys

from vllm import LLM, SamplingParams

MODEL, SETTINGS = sys.argv[1], json.loads(sys.argv[2])
llm = LLM(model=MODEL, max_logprobs=-1, **SETTINGS)
sampling_params = SamplingParams(max_tokens=3, logprobs=5, prompt_logprobs=0, ignore_eos=True)
(output,) = llm.generate("The sea is", sampling_params)
RESULT = []
for token_id, position in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True):
    entry = position[token_id]
    RESULT.append((entry.logprob <= 0, entry.rank >= 1, isinstance(entry.decoded_token, str), len(position) in (5, 6)))
RESULT.append(output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(output.prompt_token_ids))
(output,) = llm.generate("The sea is", SamplingParams(max_tokens=1, logprobs=-1, ignore_eos=True))
RESULT.append(len(output.outputs[0].logprobs[0]))
EXPECTED = [(True,) * 4] * 3 + [True, llm.vocab_size]
