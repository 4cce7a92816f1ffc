"""A claim keeps all others from a folder or file, leaves nothing of its own, and ends with its process."""

import gc
import os
import subprocess
import sys

import pytest

from jpaged.claims import FILES, InUse, claim_file, claim_folder, holds_folder, writing

HOLD = """
import sys
from pathlib import Path
from jpaged.claims import claim_file, claim_folder
claim = (claim_folder if sys.argv[1] == "folder" else claim_file)(Path(sys.argv[2]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def held():
    """Starts processes that claim something until they are killed."""
    started = []

    def hold(kind, path):
        command = [sys.executable, "-c", HOLD, kind, str(path)]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout.readline() == "held\n"
        return started[-1]

    yield hold
    for process in started:
        process.kill()
        process.communicate()


def test_a_folder_of_another_process_is_refused_by_its_number_until_that_is_killed(held, tmp_path):
    process = held("folder", tmp_path / "state")
    for refused in (claim_folder, writing):
        with pytest.raises(InUse, match=rf"/state is used by process {process.pid}: "), refused(tmp_path / "state"):
            pytest.fail("it was claimed twice")
    process.kill()
    process.wait()
    with claim_folder(tmp_path / "state"):
        assert {path.name for path in (tmp_path / "state").iterdir()} == FILES
    assert not list((tmp_path / "state").iterdir())


def test_a_file_of_another_process_is_refused_by_every_name_until_that_is_killed(held, tmp_path):
    process = held("file", tmp_path / "out")
    (tmp_path / "link").symlink_to("out")
    for name in ("out", "link"):
        with pytest.raises(InUse, match="/out is used by another process"):
            claim_file(tmp_path / name)
    process.kill()
    process.wait()
    with claim_file(tmp_path / "link"):
        assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


def test_the_process_that_claimed_a_folder_writes_to_it_and_no_second_part_claims_it(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "state")
    with claim_folder(tmp_path / "state"), writing(tmp_path / "link"):
        assert holds_folder(tmp_path / "link")
        with pytest.raises(InUse, match=f"process {os.getpid()}"):
            claim_folder(tmp_path / "state")
    assert not holds_folder(tmp_path / "state")
    with writing(tmp_path / "state"):
        assert not holds_folder(tmp_path / "state"), "this claim is another's"
        with pytest.raises(InUse), writing(tmp_path / "state"):
            pytest.fail("two wrote at once")


def test_a_claim_that_nothing_refers_to_has_ended(tmp_path):
    claim = claim_folder(tmp_path)
    del claim
    gc.collect()
    assert not holds_folder(tmp_path)
    claim_folder(tmp_path).release()


def test_a_folder_that_cannot_be_claimed_is_named_and_left_to_others(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(NotADirectoryError, match="/file' is a file"):
        claim_folder(tmp_path / "file")

    def full(path, text):
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.write_text", full)
        with pytest.raises(OSError, match=r"No space left on device: .*/state/\.owner"):
            claim_folder(tmp_path / "state")
    claim_folder(tmp_path / "state").release()
