"""A file of requests is answered once, whatever interrupts it."""

import asyncio
import json

import pytest

from jpaged import AsyncLLM
from jpaged.server.app import create_app
from jpaged.server.batch import answered, read_requests, run_batch
from jpaged.server.settings import ServerSettings

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def line(custom_id, url=TEXT, **body):
    base = {"messages": [{"role": "user", "content": "hello"}]} if url == CHAT else {"prompt": "the cab"}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": base | {"max_tokens": 4, "seed": 1} | body}


def write(file, lines):
    file.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return file


def run(llm, requests, output, advance=lambda: None):
    async def main():
        async with AsyncLLM.from_llm(llm) as engine:
            app = create_app(engine, ServerSettings(model="tiny"))
            return await run_batch(app, requests, output, concurrency=3, advance=advance)

    return asyncio.run(asyncio.wait_for(main(), 60))


def answers(output):
    return {one["custom_id"]: one["response"] for one in map(json.loads, output.read_text().splitlines())}


def test_every_line_gets_an_answer_and_bad_ones_their_error(tiny_llm, tmp_path):
    lines = [line("a"), line("b", CHAT), line("c", temperature=-1), line("d", seed=2)]
    output = tmp_path / "out.jsonl"
    assert run(tiny_llm, read_requests(write(tmp_path / "in.jsonl", lines)), output) == 1
    found = answers(output)
    assert [found[name]["status_code"] for name in "abcd"] == [200, 200, 400, 200]
    assert found["c"]["body"]["error"]["param"] == "temperature"
    assert found["a"]["body"]["choices"][0]["text"] != found["d"]["body"]["choices"][0]["text"]


def test_a_run_that_was_killed_goes_on_where_it_was(tiny_llm, tmp_path):
    requests = read_requests(write(tmp_path / "in.jsonl", [line(f"r{i}", seed=i) for i in range(8)]))
    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    run(tiny_llm, requests, whole)
    count = iter(range(100))

    def die():
        if next(count) == 3:
            raise RuntimeError("killed")

    with pytest.raises(ExceptionGroup):
        run(tiny_llm, requests, output, die)
    with output.open("a") as file:
        file.write('{"custom_id": "r7", "respo')  # cut off in the middle of a line
    done = answered(output)
    assert 3 <= len(done) < 8
    left = [request for request in requests if request.custom_id not in done]
    asked = []
    run(tiny_llm, left, output, lambda: asked.append(1))
    assert len(asked) == 8 - len(done)
    texts = {name: one["body"]["choices"][0]["text"] for name, one in answers(output).items()}
    assert texts == {name: one["body"]["choices"][0]["text"] for name, one in answers(whole).items()}


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([line("a"), line("a")], "line 2: custom_id='a'"),
        ([line("")], "custom_id=''"),
        ([line("a", stream=True)], "stream=true"),
        ([line("a") | {"url": "/metrics"}], "url='/metrics'"),
        ([line("a") | {"method": "GET"}], "method='GET'"),
        ([line("a") | {"more": 1}], "more"),
        ([[]], "line 1 must be an object"),
    ],
)
def test_a_file_that_is_no_batch_is_refused_before_anything_runs(tmp_path, lines, said):
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        read_requests(write(tmp_path / "in.jsonl", lines))


def test_a_file_of_something_else_is_not_written_over(tmp_path):
    output = tmp_path / "notes.txt"
    output.write_text("my notes\n")
    with pytest.raises(ValueError, match=r"line 1 is no answer"):
        answered(output)
    assert output.read_text() == "my notes\n"
