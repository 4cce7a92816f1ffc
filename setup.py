"""Finds the packages to install, so that none can be forgotten, and builds the same bytes from the same files.

A find directive of pyproject.toml names a package after its folder. The families lie in ``models`` and install as
``jpaged_models``, which only code can say. Everything else about the packages stands in pyproject.toml.
"""

from __future__ import annotations

import gzip
import os
import tarfile
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.sdist import sdist

FAMILIES = "jpaged_models"

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


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return the member without what differs from one checkout to the next."""
    member.mtime = int(os.environ["SOURCE_DATE_EPOCH"])
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
    return member


setup(
    cmdclass={"sdist": ReproducibleSdist},
    packages=[
        *find_packages(include=["jpaged", "jpaged.*", "pallas_kernels", "pallas_kernels.*"]),
        FAMILIES,
        *(f"{FAMILIES}.{name}" for name in find_packages("models")),
    ],
    package_dir={FAMILIES: "models"},
)
