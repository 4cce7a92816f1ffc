"""A model is given functions, a call of it is answered, and it goes on."""

import json
import sys

from vllm import LLM
from vllm.sampling_params import SamplingParams

MODEL, SETTINGS = sys.argv[1], json.loads(sys.argv[2])
sampling_params = SamplingParams(max_tokens=8, temperature=0.0)
llm = LLM(model=MODEL, tokenizer_mode="auto", load_format="auto", **SETTINGS)
template = (
    "{{ tools | tojson }}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls %}{{ call.function.arguments.city }}{% endfor %}{% endfor %}"
)
tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
messages = [{"role": "user", "content": "Rain in Ulm?"}]
outputs = llm.chat(messages, sampling_params=sampling_params, tools=tools, chat_template=template)
output = outputs[0].outputs[0].text.strip()
call = {"id": "a1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
messages.append({"role": "assistant", "content": output, "tool_calls": [call]})
messages.append({"role": "tool", "content": "It rains.", "tool_call_id": "a1", "name": "weather"})
outputs = llm.chat(messages, sampling_params, tools=tools, chat_template=template)
RESULT = outputs[0].prompt.partition("[user]")[2]
EXPECTED = f"Rain in Ulm?[assistant]{output}Ulm[tool]It rains."
