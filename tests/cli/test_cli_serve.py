"""`jpaged serve` and `jpaged run-batch` check what they are told before a model is loaded, and hand it on."""

import json
import logging
import socket
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from jpaged.claims import FILES, claim_folder, holds_folder
from jpaged.cli.main import app
from jpaged.config import EngineConfig
from jpaged.server.batch import Unanswered
from jpaged.text.answer_choice import chosen_formats


@pytest.fixture
def tell(monkeypatch):
    """Runs a command up to the engine; tells what it said, and the engine's settings if it came so far."""
    built = []

    def build(model, **settings):
        built.append(EngineConfig(model=model, **settings))
        raise ValueError("no model today")

    monkeypatch.setattr("jpaged.llm.LLM", build)

    def run(*command):
        built.clear()
        result = CliRunner().invoke(app, list(command))
        assert result.exit_code == 2
        return " ".join(result.output.replace("\u2502", "").split()), built[0] if built else None

    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield run
    root.handlers[:], root.level = handlers, level
    for name in ("jpaged", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.NOTSET)


def test_settings_of_the_engine_are_options_of_the_server(tell):
    said, config = tell(
        "serve", "some/model", "--max-num-seqs", "3", "--scheduling-policy", "priority", "--dtype", "half"
    )
    assert "no model today" in said
    assert (config.model, config.max_num_seqs, config.scheduling_policy) == ("some/model", 3, "priority")
    assert config.dtype == "float16"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-loras", "2"], "--max-loras 2 needs --enable-lora"),
        (["--max-lora-rank", "8"], "--max-lora-rank 8 needs --enable-lora"),
        (["--save-every", "5"], "--save-every 5 needs --state-dir"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(options, message, tell):
    said, config = tell("serve", "some/model", *options)
    assert message in said and config is None


def test_images_come_from_folders_and_hosts_that_are_named_and_from_nowhere_else(tell, tmp_path):
    requests = tmp_path / "in.jsonl"
    requests.write_text(json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}) + "\n")
    commands = ["serve", "some/model"], ["run-batch", str(requests), str(tmp_path / "out"), "--model", "some/model"]
    for command in commands:
        _, config = tell(*command)
        assert (config.images.folders, config.images.hosts, config.language_model_only) == ((), (), False)
        named = ["--allowed-local-media-path", str(tmp_path), "--allowed-media-domains", "a.example"]
        _, config = tell(*command, *named, "--allowed-media-domains", "b.example:8080", "--language-model-only")
        assert config.images.folders == (tmp_path,) and config.language_model_only
        assert config.images.hosts == ("a.example", "b.example:8080")
        said, config = tell(*command, "--allowed-local-media-path", str(tmp_path / "none"))
        assert "is not a folder" in said and config is None


def test_adapters_are_given_by_name_to_all_commands_whose_requests_may_name_one(tell, tmp_path):
    requests = tmp_path / "in.jsonl"
    requests.write_text(json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}) + "\n")
    for command in (["serve", "m"], ["run-batch", str(requests), str(tmp_path / "out"), "--model", "m"]):
        _, config = tell(*command, "--lora-modules", "a=/x", "--lora-modules", "b=/y", "--max-loras", "2")
        assert (config.lora_modules, config.enable_lora, config.max_loras) == ({"a": "/x", "b": "/y"}, True, 2)
        said, config = tell(*command, "--lora-modules", "a")
        assert "must be name=folder" in said and config is None


def test_every_option_of_a_model_is_one_of_all_commands_that_run_one(tell):
    for command in (["serve", "m"], ["generate", "a", "--model", "m"], ["bench", "throughput", "--model", "m"]):
        _, config = tell(*command, "--quantization", "int8", "--max-model-len", "77", "--language-model-only")
        assert (config.quantization, config.max_model_len, config.language_model_only) == ("int8", 77, True)
        assert config.dtype == ("float32" if command[0] == "bench" else "auto")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--host", "0.0.0.0"], "--allow-anonymous"),
        (["--tool-parser", "xml"], "--tool-parser 'xml'"),
        (["--api-key", ""], "non-empty"),
        (["--log-level", "loud"], "--log-level 'loud'"),
        (["--request-timeout", "0"], "--request-timeout 0"),
    ],
)
def test_what_the_server_cannot_do_is_told_before_the_model_is_loaded(tell, options, said):
    told, config = tell("serve", "some/model", *options)
    assert said in told and config is None


def test_a_key_of_the_command_line_keeps_its_name_whatever_others_there_are(tell, monkeypatch):
    told = []
    monkeypatch.setattr("jpaged.server.settings.check_address", lambda settings: told.append(settings.keys))
    tell("serve", "some/model", "--api-key", "one", "--api-key", "two", "--admin-api-key", "three")
    tell("serve", "some/model", "--api-key", "two", "--admin-api-key", "one")
    (one, two, three), (same, other) = told
    assert two == same and len({one.name, two.name, three.name, other.name}) == 4
    assert "two" not in two.name and three.admin and not two.admin
    said, _ = tell("serve", "some/model", "--api-key", "one", "--api-key", "one")
    assert one.name in said and len(told) == 2


def test_a_port_that_is_taken_is_told_before_the_model_is_loaded(tell):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        told, config = tell("serve", "some/model", "--port", str(taken.getsockname()[1]))
    assert "cannot be listened on" in told and config is None


def test_a_folder_of_another_server_is_refused_before_the_model_is_loaded_and_left_as_it_is(tell, tmp_path):
    state = tmp_path / "state"
    with claim_folder(state):
        (state / "000001").mkdir()
        said, config = tell("serve", "some/model", "--port", "0", "--state-dir", str(state))
        assert config is None and f"--state-dir '{state}' is used by process" in said
        assert {path.name for path in state.iterdir()} == {"000001", *FILES}
    (tmp_path / "file").touch()
    said, config = tell("serve", "some/model", "--port", "0", "--state-dir", str(tmp_path / "file"))
    assert config is None and "/file' is a file" in said


@pytest.mark.parametrize("error", [ValueError("bad"), OSError(28, "full"), KeyboardInterrupt(), MemoryError()])
def test_a_model_that_cannot_be_loaded_leaves_the_saved_state_to_another_server(error, tmp_path, monkeypatch):
    (tmp_path / "000001").mkdir()
    (tmp_path / "000001" / "state.json").write_text("{}")

    def fails(*args, **settings):
        assert holds_folder(tmp_path)
        raise error

    monkeypatch.setattr("jpaged.llm.LLM", fails)
    result = CliRunner().invoke(app, ["serve", "some/model", "--port", "0", "--state-dir", str(tmp_path)])
    assert result.exit_code != 0 and not holds_folder(tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == ["000001", "state.json"]


def test_a_file_of_requests_is_read_before_the_model_is_loaded(tell, tmp_path):
    requests, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_text("{}\n")
    said, config = tell("run-batch", str(requests), str(answers), "--model", "some/model")
    assert "line 1" in said and config is None
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
    requests.write_text(json.dumps(line) + "\n")
    said, config = tell("run-batch", str(requests), str(answers), "--model", "some/model", "--block-size", "8")
    assert "no model today" in said and config.block_size == 8


def test_a_run_that_has_not_answered_all_says_so_and_exits_with_75(monkeypatch, tmp_path):
    config = SimpleNamespace(max_num_seqs=4)
    llm = SimpleNamespace(config=config, answer_formats=lambda tools, thoughts: chosen_formats(None))
    requests = tmp_path / "in.jsonl"
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
    requests.write_text(json.dumps(line) + "\n")

    async def stopped(*args):
        raise Unanswered("1 of 1 requests have no answer")

    monkeypatch.setattr("jpaged.llm.LLM", lambda model, **settings: llm)
    monkeypatch.setattr("jpaged.cli.run_batch._answer", stopped)
    result = CliRunner().invoke(app, ["run-batch", str(requests), str(tmp_path / "out.jsonl"), "--model", "some/model"])
    assert result.exit_code == 75 and "start this command again" in result.output
