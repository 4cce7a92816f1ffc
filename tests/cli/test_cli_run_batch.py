"""`jpaged run-batch` refuses files that it would destroy, and its exit status tells what OUT has."""

import json

import pytest
from typer.testing import CliRunner

from jpaged.claims import InUse, claim_file
from jpaged.cli.main import app

REQUEST = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """A file of one request; no engine can be built."""
    monkeypatch.setattr("jpaged.llm.LLM", lambda *_, **__: pytest.fail("built an engine"))
    file = tmp_path / "in.jsonl"
    file.write_text(json.dumps(REQUEST))
    return file


def run(*arguments):
    result = CliRunner().invoke(app, ["run-batch", *map(str, arguments)])
    return result.exit_code, " ".join(result.output.split())


def test_requests_and_answers_in_one_file_are_refused(asked, tmp_path):
    (tmp_path / "link").symlink_to(asked)
    for output in (asked, tmp_path / "link"):
        status, said = run(asked, output)
        assert status == 2 and "is the file of requests" in said
    assert json.loads(asked.read_text()) == REQUEST


def test_a_missing_folder_is_told_before_a_model_is_loaded(asked, tmp_path):
    status, said = run(asked, tmp_path / "missing" / "out.jsonl")
    assert status == 2 and "OUT" in said and "there is no folder" in said


@pytest.mark.parametrize(("code", "status"), [(200, 0), (400, 1)])
def test_the_status_is_that_of_all_answers_though_nothing_was_left_to_ask(code, status, asked, tmp_path):
    answer = {"id": "batch_req_0", "custom_id": "a", "response": {"status_code": code}}
    (tmp_path / "out.jsonl").write_text(json.dumps(answer) + "\n")
    found, said = run(asked, tmp_path / "out.jsonl")
    assert found == status and ("1 request was refused" in said) == bool(status)


UNFINISHED = [
    json.dumps({"id": "batch_req_0", "custom_id": "a", "response": {"status_code": 500}}) + "\n",
    json.dumps({"id": "batch_req_1", "custom_id": "b", "response": {"status_code": 200}}) + "\n",
    '{"id": "batch_req_2", "custom',
]


def test_answers_that_another_run_writes_are_refused_and_left_as_they_are(asked, tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text("".join(UNFINISHED))
    with claim_file(out):
        status, said = run(asked, out)
    assert status == 2 and "out.jsonl is used by another process" in said
    assert out.read_text() == "".join(UNFINISHED)


def test_an_answer_that_was_cut_off_goes_though_nothing_is_left_to_ask(asked, tmp_path):
    """Its request may have been taken out of the file of requests since."""
    answer = json.dumps({"id": "batch_req_0", "custom_id": "a", "response": {"status_code": 200}}) + "\n"
    (tmp_path / "out.jsonl").write_text(answer + UNFINISHED[-1])
    assert run(asked, tmp_path / "out.jsonl")[0] == 0
    assert (tmp_path / "out.jsonl").read_text() == answer


@pytest.mark.parametrize("error", [ValueError("no such model"), OSError(28, "full"), KeyboardInterrupt()])
def test_a_run_whose_model_cannot_be_loaded_leaves_the_answers_as_they_were(error, asked, tmp_path, monkeypatch):
    out = tmp_path / "out.jsonl"
    out.write_text("".join(UNFINISHED))

    def fails(*args, **settings):
        with pytest.raises(InUse):
            claim_file(out)
        raise error

    monkeypatch.setattr("jpaged.llm.LLM", fails)
    status, _ = run(asked, out)
    assert status != 0 and out.read_text() == "".join(UNFINISHED)
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl"}
