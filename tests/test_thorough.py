"""A commit's run compiles quickly, with flags that this jaxlib knows."""

import os

import thorough
from thorough import QUICK, quick_compiler_flags


def test_this_jaxlib_knows_every_flag():
    """Else a commit's run takes longer without a word."""
    assert quick_compiler_flags() == [f"--{name}={value}" for name, value in QUICK.items()]


def test_a_flag_that_this_jaxlib_lacks_is_left_out(monkeypatch):
    monkeypatch.setitem(QUICK, "xla_cpu_of_another_version", "true")
    assert len(quick_compiler_flags()) == len(QUICK) - 1


def test_a_commits_run_has_the_flags():
    assert thorough.NIGHTLY or set(quick_compiler_flags()) <= set(os.environ["XLA_FLAGS"].split())
