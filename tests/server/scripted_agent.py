"""A server with a scripted model that plays a coding agent: it reads a file, mends it, runs its test and says so.

``PYTHONPATH=tests/server:tests/engine:tests/models python tests/server/scripted_agent.py PORT FOLDER`` serves it. What
it writes must be allowed by the grammar of the request, whose tools are the agent's own.
"""

from __future__ import annotations

import json
import sys

from llguidance import LLMatcher, LLTokenizer
from scripted_model import Script, ScriptedModel

from jpaged.server.process import run_server
from jpaged.server.settings import ServerSettings

FILE, TEST = "sums.py", "test_sums.py"
DONE = "The sum is mended and its test passes."
_RUN = f"python3 {TEST}"


def steps(tools, folder):
    """Return what the model writes turn by turn: calls of the tools that it has, and a text."""
    if "Edit" in tools:  # Claude Code
        path = f"{folder}/{FILE}"
        edit = {"file_path": path, "old_string": "a - b", "new_string": "a + b"}
        calls = [
            ("Read", {"file_path": path}),
            ("Edit", edit),
            ("Bash", {"command": _RUN, "description": "Run the test"}),
        ]
    else:
        name = next((one for one in ("bash", "shell", "exec_command") if one in tools), "bash")
        commands = [f"cat {FILE}", f"sed -i 's/a - b/a + b/' {FILE}", _RUN]
        if name == "bash":  # mini-swe-agent ends with a command
            commands.append("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
        key = "cmd" if name == "exec_command" else "command"
        calls = [(name, {key: command}) for command in commands]
    made = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    return [*(f"<tool_call>\n{one}\n</tool_call>" for one in made), DONE]


class Agent(ScriptedModel):
    """Writes the next step of a conversation: one for each result that it has.

    Args:
        folder: where the agent works.
    """

    max_model_len = 2**20

    def __init__(self, folder: str) -> None:
        super().__init__({})
        self._folder = folder
        backend = self.tokenizer.backend_tokenizer.to_str()
        self._tokens = LLTokenizer(backend, n_vocab=len(self.tokenizer), eos_token=self.tokenizer.eos_token_id)

    def chat_prompt(self, messages, **options):
        tools = [tool["function"]["name"] for tool in options.get("tools") or ()]
        number = sum(message["role"] == "tool" for message in messages)
        written = steps(tools, self._folder)
        text = written[min(number, len(written) - 1)] if tools else "A title"
        name = f"step {len(self.scripts)}"
        self.scripts[name] = Script(tuple(text[at : at + 7] for at in range(0, len(text), 7)))
        made = super().chat_prompt([{"role": "user", "content": f"#{name}#"}])
        return {**made, "prompt_token_ids": list(range(sum(len(str(one)) for one in messages) // 4))}

    async def generate(self, prompt, params, name, **options):
        text = "".join(self.scripts[str(prompt["prompt"]).split("#")[1]].pieces)
        if params.structured_outputs is not None:
            matcher = LLMatcher(self._tokens, LLMatcher.grammar_from_lark(params.structured_outputs.grammar))
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            if matcher.try_consume_tokens(ids) < len(ids) or not matcher.is_accepting():
                raise ValueError(f"the grammar does not allow {text!r}: {matcher.get_error()}")
        async for output in super().generate(prompt, params, name, **options):
            yield output

    async def check_health(self, timeout=None):
        pass

    async def shutdown(self):
        pass


if __name__ == "__main__":
    settings = ServerSettings(
        model="demo", port=int(sys.argv[1]), aliases=("*",), tool_parser="hermes", reasoning_parser="think"
    )
    run_server(Agent(sys.argv[2]), settings)
