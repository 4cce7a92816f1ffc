import contextlib
import json

import huggingface_hub
import pytest
from gguf import GGMLQuantizationType
from gguf_files import write_quantised_llama
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects

from jpaged import LLM
from jpaged.loading import convert_checkpoint, load_model
from jpaged.loading.open_checkpoint import describe_model, open_model
from jpaged.loading.quantised_folder import quantise_folder
from jpaged.loading.source import resolve_source
from jpaged.loading.tokenizer import find_tokenizer


def test_the_alias_is_the_demo_model():
    source = resolve_source("smollm2-135m")
    assert (source.name, source.kind, source.path.suffix) == ("smollm2-135m", "gguf", ".gguf")


NAMES = ("m.gguf", "m.GGUF", "m.Gguf", "m.bin", "m.json", "m.safetensors", "m", f"sha256-{'0' * 64}", "m.gguf.bak")


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    return write_quantised_llama(tmp_path_factory.mktemp("gguf") / "m.gguf", GGMLQuantizationType.Q8_0)


@pytest.mark.parametrize("name", NAMES)
def test_a_gguf_file_is_known_by_its_content_whatever_its_name(tmp_path, gguf, name):
    path = tmp_path / name
    path.symlink_to(gguf)
    assert resolve_source(path).kind == "gguf"
    assert open_model(path).config.model_type == "llama"
    assert describe_model(path).gguf == path
    assert find_tokenizer(str(path)).encode("ab") == [10]
    with contextlib.chdir(tmp_path):
        assert resolve_source(name).kind == "gguf"


def test_a_blob_without_a_suffix_is_loaded_converted_and_quantised(tmp_path, gguf):
    path = tmp_path / f"sha256-{'0' * 64}"
    path.symlink_to(gguf)
    assert load_model(path).tokenizer.encode("ab") == [10]
    convert_checkpoint(path, tmp_path / "orbax")
    quantise_folder(path, tmp_path / "codes", group_size=32)
    assert {resolve_source(tmp_path / name).kind for name in ("orbax", "codes")} == {"orbax", "safetensors"}


def test_a_file_that_is_called_gguf_says_what_is_wrong_with_it(tmp_path):
    for name in ("m.gguf", "m.GGUF"):
        (tmp_path / name).write_bytes(b"PK".ljust(64))
        with pytest.raises(ValueError, match=rf"{name} is not a GGUF file: it starts with b'PK"):
            open_model(tmp_path / name)


@pytest.mark.parametrize("content", [b"", b"GGU", b"gguf" * 9, b"PK".ljust(64), b"\x08".ljust(8, b"\0") + b"{}" * 9])
@pytest.mark.parametrize("name", ["m.bin", "m.safetensors", "m"])
def test_a_file_of_another_content_is_no_model(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    for entry in (resolve_source, describe_model, load_model):
        with pytest.raises(ValueError, match=rf"{name}' is a file that is no GGUF file; accepted are: .*a GGUF file"):
            entry(tmp_path / name)


def test_folders_are_told_apart_by_the_marker(tmp_path):
    (tmp_path / "config.json").touch()
    assert resolve_source(tmp_path).kind == "safetensors"
    (tmp_path / "jpaged.json").touch()
    assert resolve_source(tmp_path).kind == "orbax"


@pytest.mark.parametrize("name", ["/no/such/folder", "./none", "none.gguf", "a/b.GGUF", "~/none"])
def test_a_path_that_does_not_exist_is_named_without_asking_the_hub(name, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    with pytest.raises(ValueError, match=f"model='{name}' does not exist; accepted are: 'smollm2-135m'"):
        resolve_source(name)


def test_a_home_that_is_not_known_is_refused_by_the_name():
    with pytest.raises(ValueError, match="model='~nobody-is-called-so/m' cannot be read "):
        resolve_source("~nobody-is-called-so/m")


def test_a_folder_without_a_config_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json; accepted"):
        resolve_source(tmp_path)


def test_a_hub_id_is_downloaded_without_pytorch_files(tmp_path, monkeypatch):
    asked = {}

    def download(repo_id, allow_patterns, ignore_patterns):
        asked.update(repo_id=repo_id, patterns=allow_patterns)
        (tmp_path / "config.json").touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    source = resolve_source("org/model")
    assert (source.name, source.kind, source.path) == ("org/model", "safetensors", tmp_path)
    assert asked["repo_id"] == "org/model"
    assert "*.safetensors" in asked["patterns"]
    assert not any(".bin" in pattern for pattern in asked["patterns"])


@pytest.mark.parametrize("own", [("model.safetensors",), ("model-00001-of-00002.safetensors",), ()])
def test_weights_are_downloaded_once_though_a_repository_has_copies(own, tmp_path, monkeypatch):
    copies = [f"{folder}/model.safetensors" for folder in ("original", "metal", "onnx", "a/b")]
    copies += ["onnx/model.json", "original/tokenizer.model"]
    needed = ["config.json", "modules.json", "1_Pooling/config.json", "tokenizer.model", *own]

    def download(repo_id, allow_patterns, ignore_patterns):
        names = [*needed, *copies, "consolidated.00.safetensors"]
        for name in filter_repo_objects(names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
            (tmp_path / name).touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    resolve_source("org/model")
    found = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {*needed, *(() if own else ("consolidated.00.safetensors",))}


def test_weights_of_the_modules_after_a_transformer_are_downloaded(tmp_path, monkeypatch):
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    names = ["config.json", "modules.json", "model.safetensors", "1_Pooling/config.json", "2_Dense/config.json"]
    names += ["2_Dense/model.safetensors", "onnx/model.safetensors"]

    def download(repo_id, allow_patterns, ignore_patterns=None):
        for name in filter_repo_objects(names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(json.dumps(modules))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_source("org/model").path == tmp_path
    found = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {*names} - {"onnx/model.safetensors"}


def test_a_repository_without_a_config_is_named_as_it_was_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *given, **more: str(tmp_path))
    with pytest.raises(ValueError, match=r"model='org/model-GGUF' has no config\.json; .*Of GGUF files, the file"):
        resolve_source("org/model-GGUF")


def test_a_revision_and_a_folder_for_downloads_are_passed_on(tmp_path, monkeypatch):
    asked = {}

    def download(repo_id, **settings):
        asked.update(settings)
        (tmp_path / "config.json").touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    resolve_source("org/model", revision="v2", download_dir=tmp_path)
    assert (asked["revision"], asked["cache_dir"]) == ("v2", tmp_path)


def test_a_revision_of_what_is_no_hub_id_is_refused(tmp_path):
    for name in (tmp_path, "smollm2-135m"):
        with pytest.raises(ValueError, match=f"revision='v2' needs a hub id, and model='{name}' is none"):
            resolve_source(name, revision="v2")


def test_an_unreachable_hub_is_said_as_no_internet(tmp_path, monkeypatch):
    def download(repo_id, allow_patterns, ignore_patterns, cache_dir=None):
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ValueError, match=r"'org/none' is no local .*no internet .*no connection.*accepted are"):
        resolve_source("org/none")
    with pytest.raises(ValueError, match=r"did you mean smollm2-135m\?"):
        resolve_source("smolm2-135m")
    (tmp_path / "models--Qwen--Qwen3-0.6B").mkdir()
    with pytest.raises(ValueError, match=r"did you mean Qwen/Qwen3-0.6B\?"):
        resolve_source("Qwen/Qwen3-06B", download_dir=tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"HF_HUB_OFFLINE=1 forbids"):
        resolve_source("org/none")


def test_a_path_that_is_misspelt_names_its_neighbour(tmp_path):
    (tmp_path / "smollm2-orbax").mkdir()
    with pytest.raises(ValueError, match=r"smolm2-orbax' does not exist; did you mean smollm2-orbax\?"):
        resolve_source(tmp_path / "smolm2-orbax")


def test_what_cannot_be_a_hub_id_is_named():
    with pytest.raises(ValueError, match=r"model='not a model' is no local"):
        resolve_source("not a model")


@pytest.mark.parametrize("name", ["", "  ", None, 7])
@pytest.mark.parametrize("entry", [resolve_source, describe_model, LLM])
def test_what_is_no_name_is_refused_with_what_a_model_may_be(name, entry):
    with pytest.raises(ValueError, match=f"model={name!r} is no name or path; accepted are: .*by `jpaged convert` or"):
        entry(name)
