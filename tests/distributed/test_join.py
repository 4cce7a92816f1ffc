"""Who may join a run: whoever knows its secret, and has the settings of process 0."""

from __future__ import annotations

import json
import socket
import threading

import pytest

from jpaged.distributed.connection import read_frame, write_frame
from jpaged.distributed.join import _greet

TOKEN = "0123456789abcdef"


def greeted(first_message: bytes) -> tuple[int | None, bytes]:
    """Greet somebody who begins with this message; return who it is taken for, and the answer, if there was one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        stranger = socket.create_connection(server.getsockname())
        peer, _ = server.accept()
    with stranger, peer:
        write_frame(stranger, first_message, threading.Lock())
        process = _greet(peer, TOKEN, "settings")
        return process, b"" if process is None else read_frame(stranger, 3)


def test_a_follower_that_knows_the_secret_is_greeted():
    process, answer = greeted(json.dumps([TOKEN, 2, "settings"]).encode())
    assert process == 2 and json.loads(answer) == [True, "settings"]


def test_a_follower_of_other_settings_is_refused_by_both():
    with pytest.raises(ValueError, match="process 2 was given others, process 0 settings"):
        greeted(json.dumps([TOKEN, 2, "others"]).encode())


@pytest.mark.parametrize(
    "message",
    [
        b"GET / HTTP/1.1",
        b"\xff",
        b"[1, 2, 3]",
        b"5",
        b"null",
        b"{}",
        b'"abc"',
        b"[]",
        '["é", 1, "x"]'.encode(),
        b'["\\ud800", 1, "x"]',
        b'["guessed", 1, "x"]',
        json.dumps([TOKEN, "2", "settings"]).encode(),
        json.dumps([TOKEN, 2, None]).encode(),
        b"[" * 60_000,
    ],
)
def test_strangers_are_hung_up_on_whatever_they_say(message):
    assert greeted(message) == (None, b"")
