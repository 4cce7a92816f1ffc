import os

import numpy as np
import pytest

from jpaged.loading import remote_file
from jpaged.loading.remote_file import RemoteBlocks, RemoteFile, file_system, is_url, without_secrets
from scripts.benchmarks.range_server import serving


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(remote_file, "BLOCK", 1000)
    monkeypatch.setattr(remote_file, "_FIRST_PAUSE", 0.001)


@pytest.fixture
def server(tmp_path):
    with serving(tmp_path) as found:
        yield found


@pytest.fixture
def content(tmp_path):
    data = np.random.default_rng(0).integers(0, 256, 45_678, np.uint8)
    (tmp_path / "file.bin").write_bytes(data.tobytes())
    return data


def opened(server, name="file.bin"):
    url = f"{server.url}/{name}"
    return RemoteFile(url, file_system(url), RemoteBlocks())


@pytest.mark.parametrize(
    ("begin", "length"), [(0, 1), (0, 1000), (999, 2), (1000, 1000), (1, 45_677), (45_677, 1), (17, 20_000), (5, 0)]
)
def test_any_range_is_that_of_the_file(server, content, begin, length):
    np.testing.assert_array_equal(opened(server).read(begin, length), content[begin : begin + length])


def test_several_ranges_are_fetched_at_once(server, content):
    server.latency = 0.05
    opened(server).read(0, 20_000)
    assert 4 <= server.most_at_once <= 16


def test_neighbours_share_a_request(server, content):
    file = opened(server)
    for begin in range(0, 1000, 100):
        file.read(begin, 100)
    assert server.gets["file.bin"] <= 1 + remote_file.AHEAD


def test_blocks_that_were_forgotten_are_fetched_again(server, content, monkeypatch):
    monkeypatch.setattr(remote_file, "_KEPT", 2)
    file = opened(server)
    for begin in (0, 40_000, 0):
        np.testing.assert_array_equal(file.read(begin, 3000), content[begin : begin + 3000])


def test_a_broken_connection_is_asked_again(server, content):
    server.breaks = 3
    np.testing.assert_array_equal(opened(server).read(0, 10_000), content[:10_000])
    assert server.breaks == 0


def test_a_connection_that_always_breaks_is_named(server, content):
    server.breaks = 1000
    with pytest.raises(ValueError, match=rf"file\.bin cannot be read: .*, {remote_file.ATTEMPTS} times"):
        opened(server).read(0, 100)


def test_a_busy_server_is_asked_again_and_named(server, content):
    server.refused["file.bin"] = 503
    with pytest.raises(ValueError, match=r"file\.bin cannot be read: the server answered HTTP 503, 6 times"):
        opened(server).read(0, 100)


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refusal_in_the_middle_is_named(server, content, status):
    file = opened(server)
    server.refused["file.bin"] = status
    with pytest.raises(ValueError, match=rf"/file\.bin cannot be read: the server answered HTTP {status}"):
        file.read(0, 100)


def test_a_file_that_is_not_there_is_named(server):
    with pytest.raises(ValueError, match=r"/none\.bin cannot be read: the server answered HTTP 404"):
        opened(server, "none.bin")


def test_a_file_that_changes_while_it_is_read_is_refused(server, content, tmp_path):
    file = opened(server)
    (tmp_path / "file.bin").write_bytes(b"x" * len(content))
    os.utime(tmp_path / "file.bin", (1, 1))
    with pytest.raises(ValueError, match="it was changed while it was read"):
        file.read(0, 100)


def test_a_server_that_ignores_ranges_is_named(server, content):
    server.no_ranges = True
    with pytest.raises(ValueError, match=r"file\.bin cannot be read in parts: its server ignores the byte range"):
        opened(server).read(0, 100)


def test_a_server_that_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"127\.0\.0\.1:9/file\.bin cannot be read: .*, 6 times"):
        RemoteFile("http://127.0.0.1:9/file.bin", file_system("http://127.0.0.1:9"), RemoteBlocks())
    with pytest.raises(ValueError) as raised:
        RemoteFile("http://127.0.0.1:9/file.bin?signature=1", file_system("http://127.0.0.1:9"), RemoteBlocks())
    assert "signature" not in str(raised.value)


def test_other_file_systems_are_read_through_fsspec(content):
    files = file_system("memory://")
    files.pipe_file("memory://a/file.bin", content.tobytes())
    file = RemoteFile("memory://a/file.bin", files, RemoteBlocks())
    np.testing.assert_array_equal(file.read(1234, 5678), content[1234 : 1234 + 5678])


def test_messages_show_no_secrets():
    assert without_secrets("https://me:word@host/a/b.gguf?X-Amz-Signature=1") == "https://host/a/b.gguf"


def test_urls_are_told_from_paths_and_ids():
    assert is_url("s3://bucket/model") and is_url("https://host/m.gguf")
    assert not is_url("org/model") and not is_url("/folder") and not is_url("ftp://host/m")
