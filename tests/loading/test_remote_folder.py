import json
import os
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf_files import write_quantised_llama
from tiny_folders import write_llama

from jpaged.loading import load_model, remote_file, remote_folder
from jpaged.loading.open_checkpoint import describe_model, open_model
from jpaged.loading.remote_file import file_system
from jpaged.loading.source import resolve_source
from jpaged.loading.tokenizer import find_tokenizer
from scripts.benchmarks.range_server import serving


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(remote_file, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(remote_file, "BLOCK", 20_000)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A checkpoint of several shards."""
    folder = write_llama(tmp_path_factory.mktemp("written"), torch.bfloat16)
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.fixture
def server(written, tmp_path):
    shutil.copytree(written, tmp_path / "served" / "org" / "model")
    with serving(tmp_path / "served") as found:
        found.model = found.folder / "org" / "model"
        found.model_url = found.url + "/org/model/"
        found.shard = min(found.model.glob("*.safetensors"))
        yield found


def equal(first, second):
    leaves = zip(jax.tree.leaves(first.params), jax.tree.leaves(second.params), strict=True)
    assert all(np.array_equal(a, b) for a, b in leaves)


def test_a_model_at_a_url_is_that_on_disk(server, written):
    server.breaks = 3
    found, expected = load_model(server.model_url), load_model(written)
    equal(found, expected)
    assert server.breaks == 0
    text = "A town by the sea"
    assert found.tokenizer.encode(text) == expected.tokenizer.encode(text)
    assert found.eos_token_ids == expected.eos_token_ids


def test_weights_are_fetched_once_and_not_kept(server, tmp_path):
    load_model(server.model_url)
    for file in server.model.glob("*.safetensors"):
        assert server.sent[f"org/model/{file.name}"] == file.stat().st_size
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_a_second_start_fetches_only_small_files_that_changed(server):
    open_model(server.model_url)
    server.gets.clear()
    config = server.model / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    assert open_model(server.model_url).config.rms_norm_eps == 1e-5
    assert {name for name in server.gets if name.endswith(".json")} == {"org/model/config.json"}


def test_a_small_file_that_is_gone_is_not_used(server, tmp_path):
    open_model(server.model_url)
    (server.model / "generation_config.json").unlink()
    assert not (open_model(server.model_url).source.path / "generation_config.json").exists()


def test_a_file_for_which_a_drafter_is_refused_is_fetched(server):
    (server.model / "mask_embedding.pt").write_bytes(b"some")
    files = file_system("memory://")
    for file in server.model.iterdir():
        files.pipe_file(f"memory://drafters/model/{file.name}", file.read_bytes())
    for url in (server.model_url, "memory://drafters/model"):
        assert (remote_folder.open_remote(url).folder / "mask_embedding.pt").read_bytes() == b"some"


def test_a_gguf_file_at_a_url_is_that_on_disk(server, monkeypatch):
    path = write_quantised_llama(server.folder / "model.gguf", GGMLQuantizationType.Q8_0)
    monkeypatch.setattr("jpaged.loading.gguf.reader._BEGINNING", 64)
    expected = load_model(path)
    equal(load_model(f"{server.url}/model.gguf?signature=1"), expected)
    for name in ("model.GGUF", "blobs/sha256-0"):
        other = path.parent / name
        other.parent.mkdir(exist_ok=True)
        path = path.rename(other)
        for url in (f"{server.url}/{name}", f"{server.url}/{name}?signature=1"):
            assert set(open_model(url).reader.names()) == set(expected.tensor_shapes)
            with pytest.raises(ValueError, match="plans are made of GGUF files on disk"):
                describe_model(url)


def test_a_model_in_another_file_system_is_listed(written):
    files = file_system("memory://")
    for file in written.iterdir():
        files.pipe_file(f"memory://bucket/model/{file.name}", file.read_bytes())
    remote = remote_folder.open_remote("memory://bucket/model")
    assert {file.name for file in remote.files} == {file.name for file in written.glob("*.safetensors")}
    names = {file.name for file in remote.folder.iterdir()} - {".fetched"}
    assert names == {file.name for file in written.iterdir() if file.suffix != ".safetensors"}


def test_a_half_file_is_named(server):
    with server.shard.open("rb+") as stream:
        stream.truncate(server.shard.stat().st_size // 2)
    with pytest.raises(ValueError, match=rf"{server.model_url}{server.shard.name} is damaged: tensor .* does not fit"):
        load_model(server.model_url)


@pytest.mark.parametrize("name", ["config.json", "shard"])
def test_an_error_page_instead_of_a_file_is_named(server, name):
    file = server.shard if name == "shard" else server.model / name
    file.write_text("<!DOCTYPE html><html>Sign in</html>")
    with pytest.raises(ValueError, match=rf"{server.model_url}{file.name} is .*web page"):
        load_model(server.model_url)


def test_a_shard_that_is_not_there_is_named(server):
    server.shard.unlink()
    with pytest.raises(ValueError, match=rf"{server.shard.name} cannot be read: the server answered HTTP 404"):
        load_model(server.model_url)


def test_a_refusal_after_the_headers_fails_the_load(server):
    opened = open_model(server.model_url)
    server.refused[f"org/model/{server.shard.name}"] = 403
    opened.source.remote.blocks.close()
    with pytest.raises(ValueError, match=rf"{server.shard.name} cannot be read: the server answered HTTP 403"):
        for name in opened.reader.names():
            opened.reader.read(name)


def test_a_url_of_no_model_is_named(server):
    with pytest.raises(ValueError, match=r"/org/config\.json is not there: the URL is of no model's folder"):
        load_model(server.url + "/org")


def test_an_index_names_no_files_elsewhere(server):
    index = server.model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../../secret.safetensors"}}))
    with pytest.raises(ValueError, match=r"index\.json is damaged"):
        load_model(server.model_url)


def test_the_bytes_are_shown_on_standard_error(server, capsys):
    load_model(server.model_url)
    shown = capsys.readouterr()
    assert "Fetching model" in shown.err and not shown.out


def test_a_revision_needs_a_hub_id(server):
    with pytest.raises(ValueError, match="revision='main' needs a hub id"):
        load_model(server.model_url, revision="main")


def test_a_model_at_a_url_is_described_without_its_weights(server):
    assert describe_model(server.model_url).config.hidden_size == 48
    assert not any(name.endswith(".safetensors") for name in server.gets)
    server.gets.clear()
    describe_model(server.model_url)
    assert not server.gets  # what has not changed is not fetched again


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_a_bucket_that_may_not_be_listed_refuses_what_it_does_not_have(server, name):
    (server.model / name).unlink()
    server.absent = 403
    if name == "config.json":
        with pytest.raises(ValueError, match=r"config\.json cannot be read: the server answered HTTP 403"):
            open_model(server.model_url)
    else:
        assert not (open_model(server.model_url).source.path / name).exists()


def test_a_scheme_without_its_package_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    with pytest.raises(ValueError, match=r"s3:// needs a package that is not installed .*pip install '\.\[remote\]'"):
        load_model("s3://bucket/model")


def test_a_tokenizer_at_a_url_is_that_on_disk(server, written):
    text = "A town by the sea"
    expected = find_tokenizer(str(written)).encode(text)
    assert find_tokenizer(server.model_url).encode(text) == expected
    shutil.copy(resolve_source("smollm2-135m").path, server.folder / "demo.gguf")
    assert find_tokenizer(f"{server.url}/demo.gguf").encode(text) == expected


HUB = """
from jpaged.loading.open_checkpoint import open_model
print(open_model("org/model").config.hidden_size)
"""


@pytest.fixture
def hub(written, tmp_path):
    """A mirror of the hub that has the checkpoint, and the environment of a process that asks it."""
    served = tmp_path / "hub"
    commit = "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(written, served / "org/model/resolve" / commit)
    about = served / "api/models/org/model/revision/main"
    about.parent.mkdir(parents=True)
    files = [{"rfilename": file.name} for file in written.iterdir()]
    tree = served / "api/models/org/model/tree" / commit
    tree.parent.mkdir()
    entries = [
        {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": f"{number:040x}"}
        for number, file in enumerate(written.iterdir())
    ]
    tree.write_text(json.dumps(entries))
    about.write_text(json.dumps({"id": "org/model", "sha": commit, "siblings": files}))
    variables = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    with serving(served) as mirror:
        mirror.headers = {"X-Repo-Commit": commit}
        yield mirror, variables | {"HF_ENDPOINT": mirror.url}


def opened_from(variables):
    return subprocess.run([sys.executable, "-c", HUB], env=variables, capture_output=True, text=True)


def test_a_mirror_of_the_hub_is_asked_once_and_then_needs_no_network(hub):
    mirror, variables = hub
    for offline in ("0", "1"):
        done = opened_from(variables | {"HF_HUB_OFFLINE": offline})
        assert done.stdout == "48\n", done.stderr
        asked = sum(mirror.gets.values())
        assert (asked > 0) == (offline == "0")
        mirror.gets.clear()


def test_a_gated_model_needs_the_token_that_the_environment_holds(hub):
    mirror, variables = hub
    mirror.authorization = "Bearer hf_of_a_test"
    refused = opened_from(variables)
    assert refused.returncode == 1 and "401" in refused.stderr and "org/model" in refused.stderr
    assert not mirror.gets
    done = opened_from(variables | {"HF_TOKEN": "hf_of_a_test"})
    assert done.stdout == "48\n", done.stderr
