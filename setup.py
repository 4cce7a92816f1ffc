"""Finds the packages to install, so that none can be forgotten, and builds the same bytes from the same files.

A find directive of pyproject.toml names a package after its folder. The families lie in ``models`` and install as
``jpaged_models``, which only code can say. Everything else about the packages stands in pyproject.toml.

The environment variable ``JPAGED_OBJECTS`` names a folder of CPU loops that ``python -m pallas_kernels.build_objects``
compiled. The wheel then has them, is for the platform that they were compiled for, and needs no Numba for the extra
``cpu``; without it the wheel is for any.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tarfile
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

FAMILIES = "jpaged_models"
OBJECTS = os.environ.get("JPAGED_OBJECTS")

# Wheels date their files by this variable, and give those that a build writes the rights that the umask leaves.
os.environ.setdefault("SOURCE_DATE_EPOCH", "1580601600")  # 2020-02-02, as other build backends have it
os.umask(0o022)


class ReproducibleSdist(sdist):
    """Writes the archive with sorted names, one date, no owner and the rights that git knows."""

    def make_archive(self, base_name, format, root_dir=None, base_dir=None, owner=None, group=None):
        """Return the path of the archive; refuses every format but ``gztar``, the one that PyPI takes."""
        if format != "gztar":
            raise ValueError(f"format={format!r} is not reproducible here: only 'gztar' is")
        top = Path(root_dir or ".", base_dir or ".")
        path = Path(f"{base_name}.tar.gz")
        with (
            path.open("wb") as file,
            gzip.GzipFile("", "wb", mtime=0, fileobj=file) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT, dereference=True) as archive,
        ):
            for member in sorted([top, *top.rglob("*")]):
                archive.add(member, Path(top.name, member.relative_to(top)), recursive=False, filter=_plain)
        return str(path)


class BuildWithObjects(build_py):
    """Adds the libraries of `OBJECTS` to the packages."""

    def run(self):
        super().run()
        folder = Path(self.build_lib, "pallas_kernels", "objects")
        if OBJECTS:
            folder.mkdir(parents=True, exist_ok=True)
            for described in _described():
                for file in (described, described.with_suffix(".so")):
                    shutil.copy(file, folder)


class DistributionOfOnePlatform(Distribution):
    """Describes files of one platform, which Python installs in a folder of their own."""

    def has_ext_modules(self):
        return True

    def parse_config_files(self, *args, **kwargs):
        """Read pyproject.toml, which is right for the sdist, whose loops Numba compiles; here it need not."""
        super().parse_config_files(*args, **kwargs)
        self.extras_require["cpu"] = []


class WheelOfOnePlatform(bdist_wheel):
    """Says that the wheel is for the platform of its libraries and any Python, see PEP 600."""

    def get_tag(self):
        """Raise ValueError where the libraries are of several platforms."""
        described = [json.loads(file.read_text()) for file in _described()]
        machines = sorted({one["processor"]["machine"] for one in described})
        if len(machines) != 1:
            raise ValueError(f"JPAGED_OBJECTS={OBJECTS!r} has libraries of {' and '.join(machines)}: a wheel has one")
        glibc = max(tuple(map(int, one["glibc"].split("."))) for one in described)
        return "py3", "none", f"manylinux_{glibc[0]}_{glibc[1]}_{machines[0]}"


def _described() -> list[Path]:
    """Return what describes each library; raises ValueError where there is none."""
    found = sorted(Path(OBJECTS).glob("*.json"))
    if not found:
        raise ValueError(f"JPAGED_OBJECTS={OBJECTS!r} has no libraries: pallas_kernels.build_objects makes them")
    return found


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return the member without what differs from one checkout to the next."""
    member.mtime = int(os.environ["SOURCE_DATE_EPOCH"])
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
    return member


setup(
    cmdclass={
        "sdist": ReproducibleSdist,
        "build_py": BuildWithObjects,
        **({"bdist_wheel": WheelOfOnePlatform} if OBJECTS else {}),
    },
    distclass=DistributionOfOnePlatform if OBJECTS else Distribution,
    packages=[
        *find_packages(include=["jpaged", "jpaged.*", "pallas_kernels", "pallas_kernels.*"]),
        FAMILIES,
        *(f"{FAMILIES}.{name}" for name in find_packages("models")),
    ],
    package_dir={FAMILIES: "models"},
)
