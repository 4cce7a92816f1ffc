"""Engines of these tests compile few shapes, as the time of a test goes into compiling."""

from collections.abc import Iterator

import pytest

from jpaged.execution.runner import Runner


@pytest.fixture(scope="module", autouse=True)
def larger_shapes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let a step run in a larger shape that is compiled, as it does while a server compiles the rest in the background.

    A module whose subject is the shapes has the marker `each_shape`.
    """
    if request.node.get_closest_marker("each_shape"):
        yield
        return
    made = Runner.__init__

    def init(runner: Runner, *args: object, **settings: object) -> None:
        made(runner, *args, **settings)  # type: ignore[arg-type]
        runner.takes_larger = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "__init__", init)
        yield
