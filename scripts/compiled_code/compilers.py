"""Runs a case in the environment of a compiler, and sets what the compiler reads before jax is imported."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = {"tpu": "libtpu", "cuda": "jax_cuda13_plugin"}


def need_compiler(target: str) -> None:
    """Run the same case again in the environment of a target's compiler, "tpu" or "cuda", unless this one has it.

    The environment is the folder of that name in ``$JPAGED_AOT_ENVS``, or in the user's cache. Sets JAX_PLATFORMS.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"  # read when jax is imported, as the next line does
    os.environ.setdefault("PALLAS_KERNELS_GPU", "triton")
    from jpaged.planning.child_process import environments_dir

    if find_spec(_PACKAGES[target]) is None:
        folder = environments_dir() / target
        make = ["bash", str(ROOT / "scripts" / "aot_env.sh"), target, str(folder)]
        subprocess.run(make, check=True, env=os.environ | {"PYTHON": sys.executable})
        python = str(folder / "bin" / "python")
        again = [python, "-m", __package__, *sys.argv[1:]]
        os.execve(python, again, os.environ | {"PYTHONPATH": str(ROOT)})


@contextmanager
def schedule_dumps() -> Iterator[Path]:
    """Have libtpu write its schedules into a folder, which is yielded; enter it before jax is imported."""
    from jpaged.planning.target_mesh import TPU_HOST

    with tempfile.TemporaryDirectory() as folder:
        # The passes after scheduling only: a compilation that dumps every pass takes three times as long.
        passes = "--xla_jf_dump_llo_pass_label_regex=packed-bundles-post-ra"
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true {passes}"
        os.environ.update(TPU_HOST, LIBTPU_INIT_ARGS=flags)
        yield Path(folder)


def empty(folder: Path) -> None:
    """Delete the files of a folder."""
    for file in folder.iterdir():
        file.unlink()


def chosen(option: str, names: Sequence[str], known: Mapping[str, T]) -> dict[str, T]:
    """Return the values of some names.

    Raises:
        ValueError: unknown name; lists those that are known.
    """
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{option}={unknown} are none of {', '.join(known)}")
    return {name: known[name] for name in names}
