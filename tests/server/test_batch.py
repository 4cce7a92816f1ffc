"""A file of requests is answered once, whatever interrupts it."""

import asyncio
import json
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from live_server import make_llm, process_env, until

from jpaged import AsyncLLM
from jpaged.server.app import create_app
from jpaged.server.batch import TRIES_ALONE, Unanswered, answered, read_requests, run_batch
from jpaged.server.settings import ServerSettings

HERE = Path(__file__).parent
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

    return asyncio.run(asyncio.wait_for(main(), 300))


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
        file.write('{"id": "batch_req_7", "custom_id": "r7", "respo')  # cut off in the middle of a line
    done = answered(output)
    assert 3 <= len(done) < 8
    left = [request for request in requests if request.custom_id not in done]
    asked = []
    run(tiny_llm, left, output, lambda: asked.append(1))
    assert len(asked) == 8 - len(done)
    texts = {name: one["body"]["choices"][0]["text"] for name, one in answers(output).items()}
    assert texts == {name: one["body"]["choices"][0]["text"] for name, one in answers(whole).items()}


def texts(output):
    return {name: one["body"]["choices"][0]["text"] for name, one in answers(output).items()}


def undisturbed(llm, requests, folder):
    run(llm, requests, folder / "whole.jsonl")
    return texts(folder / "whole.jsonl")


def test_a_process_that_is_killed_between_two_answers_is_gone_on_with(tiny_llm, tiny_folder, tmp_path):
    source = write(tmp_path / "in.jsonl", [line(f"r{i}", seed=i, ignore_eos=True) for i in range(40)])
    requests, output = read_requests(source), tmp_path / "out.jsonl"
    process = subprocess.Popen(
        [sys.executable, str(HERE / "batch_process.py"), tiny_folder, str(source), str(output)],
        env=process_env(),
    )
    try:
        until(lambda: output.exists() and output.read_bytes().count(b"\n") >= 3, 120)
    finally:
        process.kill()  # SIGKILL: nothing of it runs any more
        process.wait()
    done = answered(output)
    assert 3 <= len(done) < 40
    asked = []
    run(tiny_llm, [one for one in requests if one.custom_id not in done], output, lambda: asked.append(1))
    assert len(asked) == 40 - len(done)
    assert texts(output) == undisturbed(tiny_llm, requests, tmp_path)


@pytest.mark.parametrize("room", [0, 700])
def test_a_disk_that_is_full_ends_a_run_and_the_next_one_goes_on(room, tiny_llm, tmp_path):
    requests = read_requests(write(tmp_path / "in.jsonl", [line(f"r{i}", seed=i) for i in range(6)]))
    output = tmp_path / "out.jsonl"
    before, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
        with pytest.raises(Unanswered, match=r"of 6 requests have no answer; .*/out\.jsonl cannot be written: "):
            run(tiny_llm, requests, output)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert output.stat().st_size == room
    done = answered(output)
    assert (len(done) > 0) == (room > 0)
    run(tiny_llm, [one for one in requests if one.custom_id not in done], output)
    assert texts(output) == undisturbed(tiny_llm, requests, tmp_path)


def test_a_device_that_fails_ends_a_run_and_the_next_one_goes_on(tiny_llm, tiny_folder, tmp_path):
    requests = read_requests(write(tmp_path / "in.jsonl", [line(f"r{i}", seed=i) for i in range(30)]))
    output, llm = tmp_path / "out.jsonl", make_llm(tiny_folder)
    dispatch, steps = llm.control.engine.runner.dispatch_all, iter(range(10**6))

    def failing(scheduled):
        if next(steps) >= 20:
            raise RuntimeError("the device fell off the bus")
        return dispatch(scheduled)

    llm.control.engine.runner.dispatch_all = failing
    with pytest.raises(Unanswered, match="got status 503: the engine has stopped"):
        run(llm, requests, output)
    done = answered(output)
    assert 3 <= len(done) < 30
    run(tiny_llm, [one for one in requests if one.custom_id not in done], output)
    assert texts(output) == undisturbed(tiny_llm, requests, tmp_path)


def test_what_an_engine_that_stopped_did_not_answer_is_no_answer(tiny_llm, tmp_path):
    requests = read_requests(write(tmp_path / "in.jsonl", [line(f"r{i}", seed=i) for i in range(30)]))
    output, asked = tmp_path / "out.jsonl", []

    async def main():
        engine = AsyncLLM.from_llm(tiny_llm)
        app = create_app(engine, ServerSettings(model="tiny"))
        stopping = []

        def advance():
            if len(asked) == 4:
                stopping.append(asyncio.get_running_loop().create_task(engine.shutdown()))
            asked.append(1)

        try:
            await run_batch(app, requests, output, concurrency=3, advance=advance)
        finally:
            await engine.shutdown()

    said = r"of 30 requests have no answer; 'r\d+' got status 503: the engine has stopped"
    with pytest.raises(Unanswered, match=said):
        asyncio.run(asyncio.wait_for(main(), 300))
    assert {one["status_code"] for one in answers(output).values()} == {200}
    done = answered(output)
    assert 4 <= len(done) == len(asked) < 30
    run(tiny_llm, [one for one in requests if one.custom_id not in done], output)
    assert texts(output) == undisturbed(tiny_llm, requests, tmp_path)


@pytest.mark.parametrize("status", [500, 503, 504])
def test_what_may_yet_be_answered_has_no_line_and_the_rest_is_asked_unless_the_engine_is_gone(tmp_path, status):
    requests = read_requests(write(tmp_path / "in.jsonl", [line(f"r{i}") for i in range(6)]))
    output, asked = tmp_path / "out.jsonl", []

    async def app(scope, receive, send):
        asked.append(json.loads((await receive())["body"]))
        failed = len(asked) == 2
        body = {"error": {"message": "not now"}} if failed else {"id": "a"}
        await send({"type": "http.response.start", "status": status if failed else 200})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})

    with pytest.raises(Unanswered, match=rf"'r1' got status {status}: not now"):
        asyncio.run(run_batch(app, requests, output, concurrency=1))
    want = {"r0"} if status == 503 else {"r0", "r2", "r3", "r4", "r5"}
    assert answered(output) == set(answers(output)) == want and len(asked) == (2 if status == 503 else 6)


def run_with(requests, output, answer, concurrency=1):
    """Runs a batch on an app that answers with a status and the header Retry-After: 0; returns their seeds."""
    asked = []

    async def app(scope, receive, send):
        asked.append(json.loads((await receive())["body"]))
        status = await answer(asked)
        body = {"id": "a"} if status == 200 else {"error": {"message": "not now"}}
        await send({"type": "http.response.start", "status": status, "headers": [(b"retry-after", b"0")]})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})

    asyncio.run(asyncio.wait_for(run_batch(app, requests, output, concurrency=concurrency), 60))
    return [body["seed"] for body in asked]


def test_a_request_that_the_server_is_too_busy_for_is_asked_again_before_the_next(tmp_path):
    requests = read_requests(write(tmp_path / "in.jsonl", [line(f"r{i}", seed=i) for i in range(4)]))

    async def busy_twice(asked):
        return 429 if len(asked) in (2, 3) else 200

    assert run_with(requests, tmp_path / "out.jsonl", busy_twice) == [0, 1, 1, 1, 2, 3]
    assert answered(tmp_path / "out.jsonl") == {"r0", "r1", "r2", "r3"}


def test_requests_that_keep_each_other_out_are_asked_again_one_at_a_time(tmp_path):
    requests = read_requests(write(tmp_path / "in.jsonl", [line(f"r{i}", seed=i) for i in range(3)]))
    running = []

    async def room_for_one(asked):
        running.append(asked[-1])
        await asyncio.sleep(0.01)
        alone = len(running) == 1
        await asyncio.sleep(0.01)
        running.pop()
        return 200 if alone else 429

    run_with(requests, tmp_path / "out.jsonl", room_for_one, concurrency=3)
    assert answered(tmp_path / "out.jsonl") == {"r0", "r1", "r2"}


def test_a_request_that_never_finds_room_though_it_is_alone_is_given_up_and_the_rest_is_asked(tmp_path):
    requests = read_requests(write(tmp_path / "in.jsonl", [line(f"r{i}", seed=i) for i in range(3)]))
    count = []

    async def none_for_the_first(asked):
        count.append(asked[-1]["seed"])
        return 429 if asked[-1]["seed"] == 0 else 200

    with pytest.raises(Unanswered, match=r"1 of 3 requests have no answer; 'r0' got status 429: not now"):
        run_with(requests, tmp_path / "out.jsonl", none_for_the_first)
    assert count == [0] * (1 + TRIES_ALONE) + [1, 2]
    assert answered(tmp_path / "out.jsonl") == {"r1", "r2"}


def test_answers_that_do_not_count_are_taken_out_of_a_file(tmp_path):
    output = tmp_path / "out.jsonl"
    statuses = (200, 503, 400, 429)
    lines = [{"custom_id": f"r{i}", "response": {"status_code": status}} for i, status in enumerate(statuses)]
    write(output, lines)
    assert answered(output) == {"r0", "r2"}
    assert [json.loads(one) for one in output.read_text().splitlines()] == [lines[0], lines[2]]


def test_only_a_line_feed_ends_a_line(tmp_path):
    file, text = tmp_path / "in.jsonl", "a\u2028b\u2029c\x85d"
    lines = [json.dumps(line(name, prompt=text), ensure_ascii=False) for name in "ab"]
    file.write_bytes("\r\n".join(lines).encode())
    assert [request.body["prompt"] for request in read_requests(file)] == [text, text]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([line("a"), line("a")], "line 2: custom_id='a'"),
        ([line("")], "custom_id=''"),
        ([line("a", stream=True)], "stream=true"),
        ([line("a", "/v1/responses", background=True)], "background=true"),
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
    with pytest.raises(ValueError, match=r"line 1 is not an answer"):
        answered(output)
    assert output.read_text() == "my notes\n"


@pytest.mark.parametrize("text", ['{"my":"data"}', '{"id": "batch_7"}', "\n".join(["my notes", "more"])])
def test_a_file_of_something_else_that_ends_without_a_line_feed_is_not_cut(text, tmp_path):
    output = tmp_path / "out.json"
    output.write_text(text)
    with pytest.raises(ValueError, match=r"line 1 is not an answer"):
        answered(output)
    assert output.read_text() == text


@pytest.mark.parametrize("tail", ["{", '{"id": "bat', '{"id": "batch_req_7", "custom_id": "r'])
def test_an_answer_that_was_cut_off_anywhere_goes(tail, tmp_path):
    output = write(tmp_path / "out.jsonl", [{"custom_id": "r0", "response": {"status_code": 200}}])
    whole = output.read_text()
    output.write_text(whole + tail)
    assert answered(output) == {"r0"}
    assert output.read_text() == whole


def test_the_next_answer_has_a_line_of_its_own_behind_one_that_another_program_wrote(tmp_path):
    output = tmp_path / "out.jsonl"
    output.write_text('{"custom_id": "r0", "response": {"status_code": 200}}')
    assert answered(output) == {"r0"}
    assert output.read_text() == '{"custom_id": "r0", "response": {"status_code": 200}}\n'
