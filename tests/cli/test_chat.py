"""`jpaged chat` on a terminal and in a pipe."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import pytest
from renderings import tokenizer_with
from typer.testing import CliRunner

from jpaged.cli.chat import Conversation
from jpaged.cli.main import app
from jpaged.outputs import StreamDelta
from jpaged.sampling_params import SamplingParams
from jpaged.text.detokenizer import IncrementalDecoder

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # tests are imported by their paths
from scripted_chat import Scripted  # noqa: E402
from terminal import Terminal  # noqa: E402

PAGE = HERE.parents[1] / "docs" / "chat.md"
PROMPT = "\n>"


def test_the_transcript_of_the_docs_is_what_a_terminal_shows(tmp_path):
    paths = os.pathsep.join([str(HERE.parents[1]), *sys.path])
    env = {**os.environ, "PYTHONPATH": paths, "HOME": str(tmp_path)}
    env.pop("NO_COLOR", None)
    terminal = Terminal([sys.executable, str(HERE / "scripted_chat.py")], env)
    terminal.wait_for("/bye leaves")
    terminal.wait_for(PROMPT)
    for line in (
        "/help",
        "Name a rover.\x1b[D\x1b[D\x1b[D\x1b[D\x7fi",  # four left, and another letter: a line can be edited
        "/system Answer in one sentence.",
        "/set temperature 0.7",
        "/set temperatur 1",
        "And a longer one?",
    ):
        terminal.type(line + "\r")
        terminal.wait_for(PROMPT)
    terminal.type("Count to a thousand.\r")
    terminal.wait_for("1 2 3 4 5")
    terminal.type("\x03")
    terminal.wait_for(PROMPT)
    terminal.type("\x1b[A\x1b[A\x1b[B\x01\x0bWhich was the first?\r")  # up through the history and back
    terminal.wait_for(PROMPT)
    for line in ("/save ~/rivers.json", "/clear", "/by"):
        terminal.type(line + "\r")
        terminal.wait_for(PROMPT)
    terminal.type("/bye\r")
    assert terminal.end() == 0
    shown = terminal.screen.text.replace(str(tmp_path), "/home/me").strip()
    transcript = f"```text\n{shown.replace('«', '').replace('»', '')}\n```"
    if os.environ.get("WRITE_TRANSCRIPT"):
        before, _, rest = PAGE.read_text().partition("```text\n")
        PAGE.write_text(before + transcript + rest.partition("\n```")[2])
    assert transcript in PAGE.read_text()
    assert "«Longer than 1,094 km.»" in shown  # a thought is dimmed, and its answer is not
    assert "\nThe **Danube**, 2,850 km." in shown
    saved = tmp_path / "rivers.json"
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
    assert json.loads(saved.read_text())[-1] == {"role": "assistant", "content": "I no longer see it."}


def piped(monkeypatch, text):
    monkeypatch.setattr("jpaged.llm.LLM", Scripted)
    return CliRunner().invoke(app, ["chat"], input=text)


def test_a_pipe_reads_the_answers_alone(monkeypatch):
    result = piped(monkeypatch, "Name a river.\n\n/set top_k 3\ntwo\n/bye\nthree\n")
    assert result.exit_code == 0
    assert result.stdout == "The **Elbe**.\ntwo\n" and ">" not in result.stderr
    assert "/bye leaves" in result.stderr and "top_k 3" in result.stderr


def test_a_conversation_goes_on_after_a_message_that_is_refused(monkeypatch):
    result = piped(monkeypatch, "one\n" + "x " * 40 + "\ntwo\n")
    assert result.exit_code == 0 and "refused: the prompt has 41 tokens" in result.stderr
    assert result.stdout.splitlines() == ["one", "two"]


def test_two_slashes_say_a_line_that_begins_with_one(monkeypatch):
    result = piped(monkeypatch, "//etc/hosts\n///\n//\n // so\n")
    assert result.stdout.splitlines() == ["/etc/hosts", "//", "/", " // so"] and "no command" not in result.stderr


def test_the_last_line_of_a_pipe_needs_no_line_end(monkeypatch):
    assert piped(monkeypatch, "one\r\ntwo").stdout.splitlines() == ["one", "two"]


@pytest.mark.parametrize(
    ("settings", "question", "answer", "mark"),
    [
        ("/set max_tokens 3\n", "a b c d e", "a b c", "[cut off] max_tokens is 3: /set max_tokens 6 allows more"),
        ("/set max_tokens 5\n", "a b c d e", "a b c d e", ""),
        ("", "w " * 19 + "w", "w " * 10 + "w", "[cut off] the context of 32 tokens is full"),
    ],
)
def test_an_answer_that_met_a_limit_is_marked(monkeypatch, settings, question, answer, mark):
    result = piped(monkeypatch, f"{settings}{question}\n")
    assert result.stdout == f"{answer}\n"
    assert mark in result.stderr and ("cut off" in result.stderr) is bool(mark)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/sett top_k 3", "/sett is no command; did you mean /set? /help lists them, // says"),
        ("/set top_p 3", "top_p=3"),
        ("/set top_kk 3", "did you mean top_k?"),
        ("/set n 3", "n has no place in a chat"),
        ("/save", "/save needs the name of a file"),
        ("/save /none/at/all", "No such file"),
        ("/system", "system message: none"),
    ],
)
def test_a_command_that_cannot_be_obeyed_says_why(monkeypatch, line, said):
    result = piped(monkeypatch, f"{line}\nstill here\n")
    assert said in result.stderr and result.stdout.splitlines()[-1] != "" and "still here" in result.stdout


def test_old_turns_make_room_and_the_system_message_stays():
    conversation = Conversation(Scripted("m"), SamplingParams(max_tokens=8), "be brief")
    for i in range(6):
        list(conversation.ask(f"question {i} of six"))
    assert conversation.num_dropped == 2 and conversation.all_messages[0]["role"] == "system"
    roles = [message["role"] for message in conversation.messages]
    assert roles == ["user", "assistant"] * (len(roles) // 2) and conversation.messages[-2]["content"].startswith(
        "question 5"
    )


def test_thoughts_are_read_in_the_form_of_the_models_template(monkeypatch):
    answer = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hi"
    llm = Scripted("m")
    llm.tokenizer = tokenizer_with("gpt_oss")
    ids = llm.tokenizer.encode(answer, add_special_tokens=False)
    decoder = IncrementalDecoder(llm.tokenizer)  # which hides the marks, as they are special tokens

    def deltas(prompt, params):
        for token in ids:
            text, spans = decoder.push_placed(token)
            yield StreamDelta(0, 0, text, [token], added_token_spans=spans)

    monkeypatch.setattr(llm, "stream", deltas)
    conversation = Conversation(llm, SamplingParams(max_tokens=8))
    assert "".join(f"<{text}>" if thought else text for text, thought in conversation.ask("hello")) == "<h><m>Hi"
    assert conversation.messages[-1] == {"role": "assistant", "content": "Hi"}


def test_an_answer_that_is_stopped_stays_as_far_as_it_came():
    conversation = Conversation(Scripted("m"), SamplingParams(max_tokens=8))
    pieces = conversation.ask("Count to a thousand.")
    assert [next(pieces)[0] for _ in range(3)] == ["1", " 2", " 3"]
    pieces.close()
    assert conversation.messages[-1] == {"role": "assistant", "content": "1 2 3"}
    pieces = conversation.ask("another")
    pieces.close()  # nothing was said: the question is gone too
    assert conversation.messages[-1]["role"] == "assistant"
