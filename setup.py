"""Finds the packages to install, so that none can be forgotten; everything else about them stands in pyproject.toml.

A find directive of pyproject.toml names a package after its folder. The families lie in ``models`` and install as
``jpaged_models``, which only code can say.
"""

from setuptools import find_packages, setup

FAMILIES = "jpaged_models"

setup(
    packages=[
        *find_packages(include=["jpaged", "jpaged.*", "pallas_kernels", "pallas_kernels.*"]),
        FAMILIES,
        *(f"{FAMILIES}.{name}" for name in find_packages("models")),
    ],
    package_dir={FAMILIES: "models"},
)
