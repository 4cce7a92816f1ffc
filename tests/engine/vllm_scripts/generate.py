"""The model's default parameters are changed in place, and prompts come in every form."""

import json
import sys

from vllm import LLM, TextPrompt, TokensPrompt

MODEL, SETTINGS = sys.argv[1], json.loads(sys.argv[2])
llm = LLM(model=MODEL, seed=1, gpu_memory_utilization=0.5, swap_space=0, enforce_eager=True, **SETTINGS)
sampling_params = llm.get_default_sampling_params()
sampling_params.max_tokens = 5
sampling_params.temperature = 0.0
sampling_params.top_k = 3
ids = llm.get_tokenizer().encode("The sea is")
outputs = llm.generate(
    [
        "The sea is",
        {"prompt": "The sea is"},
        TextPrompt(prompt="The sea is", multi_modal_data=None),
        TokensPrompt(prompt_token_ids=ids),
        {"prompt_token_ids": ids, "prompt": "The sea is"},
    ],
    sampling_params,
    False,
)
outputs += llm.generate(["The sea is"], sampling_params, use_tqdm=False, lora_request=None)
outputs += llm.generate(TokensPrompt(prompt_token_ids=ids), sampling_params.clone(), use_tqdm=True)
RESULT = {(tuple(output.prompt_token_ids), output.outputs[0].text) for output in outputs}
EXPECTED = {(tuple(ids), outputs[0].outputs[0].text)}
