"""Kernels of others: a row's ratio, and the reason where one is not compiled."""

from __future__ import annotations

import sys

from scripts.compiled_code import tpu_peers
from scripts.compiled_code.tpu_recompiled import stub_package


def rows(monkeypatch, tmp_path, make):
    monkeypatch.setattr(tpu_peers, "need_compiler", lambda _: None)
    monkeypatch.setattr(tpu_peers, "PEERS", {"theirs": (make, None)})
    for name in ("tpu_inference", "tpu_inference.logger"):
        monkeypatch.setitem(sys.modules, name, None)
    return list(tpu_peers.peers(tmp_path, targets=["v6e"]))


def test_a_kernel_that_is_not_compiled_keeps_its_row_with_the_reason(monkeypatch, tmp_path):
    def refuse(*_):
        raise ValueError("too  wide")

    (row,) = rows(monkeypatch, tmp_path, refuse)
    assert row["why not"] == "ValueError: too wide" and row["ratio"] is None


def test_a_ratio_above_one_says_that_ours_takes_less(monkeypatch, tmp_path):
    monkeypatch.setattr(
        tpu_peers, "_times", lambda launches, *_: (12.0, 10.0, 0.1) if launches == ["a"] else (8.0, 8.0, 0.2)
    )
    (row,) = rows(monkeypatch, tmp_path, lambda *_: tpu_peers.Peer(["a"], ["b"], "sizes"))
    assert (row["ratio"], row["plain"], row["why not"]) == (1.5, 1.25, "")


def test_the_stub_has_the_logger_that_modules_of_the_package_ask_for(monkeypatch, tmp_path):
    for name in ("tpu_inference", "tpu_inference.logger"):
        monkeypatch.setitem(sys.modules, name, None)
    stub_package(tmp_path)
    sys.modules["tpu_inference.logger"].init_logger("a").warning_once("said %s", "once")
