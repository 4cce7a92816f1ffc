"""Files of responses: any name, what was not written to its end, and what cannot be written or removed."""

from __future__ import annotations

import json
from urllib.parse import quote

import pytest

from jpaged.server.openai.responses.kept_files import KeptFiles

ODD = ("resp_" + ":" * 128, "../" * 60, "é\ud800", "a/b", "")


def record(response_id, key=""):
    return {"key": key, "id": response_id, "response": None}


@pytest.mark.parametrize("name", ODD)
def test_names_of_any_length_and_letters_are_kept_and_removed(tmp_path, name):
    files = KeptFiles(tmp_path)
    for key in ODD:
        files.write(record(name, key))
        files.log(key, name).append(b'event: a\ndata: {"n": 1}\n\n')
    assert sorted(one["key"] for one in files.read()) == sorted(ODD)
    assert all(files.events(key, name) == [b'event: a\ndata: {"n": 1}\n\n'] for key in ODD)
    for key in ODD:
        files.remove(key, name)
        files.remove(key, name)
    assert list(files.read()) == [] == list(tmp_path.iterdir())


def test_a_file_that_cannot_be_removed_is_told_to_the_log_and_to_nobody_else(tmp_path, caplog):
    files = KeptFiles(tmp_path)
    files.write(record("resp_1"))
    (file,) = tmp_path.iterdir()
    file.unlink()
    file.mkdir()
    files.remove("", "resp_1")
    assert "the file of a deleted response cannot be removed" in caplog.text


def test_files_named_as_before_are_read_under_their_new_names(tmp_path):
    old = tmp_path / f"{quote('a/b', safe='')}@resp_1.json"
    old.write_text(json.dumps(record("resp_1", "a/b")))
    files = KeptFiles(tmp_path)
    for _ in range(2):
        assert list(files.read()) == [record("resp_1", "a/b")]
        assert not old.exists()
    assert files.events("a/b", "resp_1") is None, "nobody knows what was told"
    files.remove("a/b", "resp_1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["[]", "3", "{}", '{"key": 1}', "{", "null"])
def test_what_is_no_record_is_left_out(tmp_path, content, caplog):
    (tmp_path / "odd.json").write_text(content)
    assert list(KeptFiles(tmp_path).read()) == []
    assert "a kept response is skipped: odd.json" in caplog.text


def test_an_event_that_was_not_written_to_its_end_is_cut_off_and_the_next_stands_in_its_place(tmp_path):
    files = KeptFiles(tmp_path)
    one, two, three = (b'event: a\ndata: {"n": %d}\n\n' % number for number in range(3))
    log = files.log("", "r")
    log.append(one)
    log.append(two[:-3])
    assert files.events("", "r") == [one]
    again = files.log("", "r")
    again.append(three)
    assert files.events("", "r") == [one, three]
    assert files.log("", "r", fresh=True) is not None and files.events("", "r") == []


def test_where_an_event_cannot_be_written_nobody_takes_the_others_for_all(tmp_path, caplog):
    class Full:
        closed = False

        def write(self, event):
            return len(event) - 1

        def close(self):
            self.closed = True

    files = KeptFiles(tmp_path)
    log = files.log("", "r")
    log.append(b'event: a\ndata: {"n": 1}\n\n')
    log._out.close()
    log._out = Full()
    log.append(b'event: a\ndata: {"n": 2}\n\n')
    log.append(b'event: a\ndata: {"n": 3}\n\n')
    assert files.events("", "r") is None and log._out.closed
    assert "events cannot be written and are lost at a restart" in caplog.text


def test_events_whose_record_is_gone_go_too(tmp_path):
    files = KeptFiles(tmp_path)
    files.log("", "r").append(b'event: a\ndata: {"n": 1}\n\n')
    assert list(files.read()) == [] == list(tmp_path.iterdir())


def test_without_a_folder_nothing_is_kept(tmp_path):
    files = KeptFiles(None)
    files.write(record("r"))
    files.remove("", "r")
    assert not files.used and files.log("", "r") is None and files.events("", "r") is None and list(files.read()) == []
