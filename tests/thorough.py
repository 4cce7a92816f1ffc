"""How thorough a run of the tests is: all that a commit has to pass, or with ``--nightly`` all there is."""

NIGHTLY = False
"""Whether ``--nightly`` was given; set before any test module is imported."""


def examples(nightly: int) -> int:
    """Return how many examples a property is tried on, a third of them where the run is not nightly."""
    return nightly if NIGHTLY else -(-nightly // 3)
