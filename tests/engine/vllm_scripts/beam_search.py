"""The best of several texts."""

import json
import sys

from vllm import LLM
from vllm.sampling_params import BeamSearchParams

MODEL, SETTINGS = sys.argv[1], json.loads(sys.argv[2])
llm = LLM(model=MODEL, **SETTINGS)
params = BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True)
outputs = llm.beam_search([{"prompt": "The sea is"}, {"prompt": "A cab is"}], params)
RESULT = []
for output in outputs:
    best = output.sequences[0]
    RESULT.append(len(output.sequences))
    RESULT.append(best.text == llm.get_tokenizer().decode(best.tokens))
    RESULT.append(best.cum_logprob >= output.sequences[-1].cum_logprob)
    RESULT.append(len(best.tokens) - len(output.prompt_token_ids))
EXPECTED = [3, True, True, 5] * 2
