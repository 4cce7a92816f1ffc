"""One conversation, several at once, and a template of one's own."""

import json
import sys

from vllm import LLM

MODEL, SETTINGS = sys.argv[1], json.loads(sys.argv[2])
llm = LLM(model=MODEL, **SETTINGS)
sampling_params = llm.get_default_sampling_params()
sampling_params.max_tokens = 6
conversation = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! What now?"},
    {"role": "user", "content": "A verse on cabs."},
]
outputs = llm.chat(conversation, sampling_params, use_tqdm=False)
outputs += llm.chat([conversation for _ in range(3)], sampling_params, True)
template = "{% for message in messages %}({{ message['role'] }}) {{ message['content'] }}{% endfor %}{{ suffix }}"
outputs += llm.chat(
    conversation,
    sampling_params,
    use_tqdm=False,
    chat_template=template,
    chat_template_kwargs={"suffix": "!"},
    add_generation_prompt=False,
    tokenization_kwargs={"add_special_tokens": False},
)
begun = [*conversation, {"role": "assistant", "content": "O cab"}]
outputs += llm.chat(begun, sampling_params, add_generation_prompt=False, continue_final_message=True)
RESULT = [len(outputs), outputs[4].prompt[-22:], outputs[5].prompt[-16:], len(outputs[0].outputs)]
EXPECTED = [6, "user) A verse on cabs.!"[-22:], "assistant: O cab", 1]
