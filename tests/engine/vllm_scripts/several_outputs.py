"""More outputs than run at once, with texts and tokens that end them."""

import json
import sys

from vllm import LLM, SamplingParams

MODEL, SETTINGS = sys.argv[1], json.loads(sys.argv[2])
llm = LLM(model=MODEL, trust_remote_code=False, enable_chunked_prefill=True, dtype="float", **SETTINGS)
params = SamplingParams(n=10, temperature=1.0, seed=5, max_tokens=12, stop=["a", "e"], min_tokens=2)
(output,) = llm.generate(["The sea is"], params)
RESULT = [len(output.outputs), [completion.index for completion in output.outputs]]
RESULT.append(all(c.finish_reason in ("stop", "length") for c in output.outputs))
RESULT.append({c.stop_reason for c in output.outputs if c.finish_reason == "stop"} <= {"a", "e", None})
long = SamplingParams(truncate_prompt_tokens=-1, max_tokens=4, skip_special_tokens=False)
long.spaces_between_special_tokens = False
RESULT.append(len(llm.generate("The sea is so wide. " * 90, long)[0].prompt_token_ids))
EXPECTED = [10, list(range(10)), True, True, llm.max_model_len - 4]
