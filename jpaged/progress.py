"""Progress bars on standard error."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from jpaged.engine import EngineStats
    from jpaged.scheduling import Request


def _bar(show: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=Console(stderr=True),
        disable=not show,
        refresh_per_second=5,
    )


class GenerationProgress:
    """Finished requests out of all, with the rate of output tokens."""

    def __init__(self, total: int, show: bool) -> None:
        self._progress = _bar(show)
        self._task = self._progress.add_task("generating", total=total, note="")
        self._start = time.monotonic()
        self._output_tokens = 0

    def __enter__(self) -> GenerationProgress:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def update(self, finished: list[Request], stats: EngineStats) -> None:
        """Count requests that finished in one step."""
        if not finished:
            return
        for request in finished:
            self._output_tokens += sum(len(seq.output_token_ids) for seq in request.sequences)
        seconds = max(time.monotonic() - self._start, 1e-9)
        note = f"{self._output_tokens / seconds:.1f} output tokens/s, {stats.num_steps} steps"
        self._progress.update(self._task, advance=len(finished), note=note)


@contextmanager
def warmup_progress(total: int, show: bool) -> Iterator[Callable[[str], None]]:
    """A bar over compiled shapes; yields a function to call with each shape's name."""
    progress = _bar(show)
    task = progress.add_task("compiling", total=total, note="")
    with progress:
        yield lambda name: progress.update(task, advance=1, note=name)
