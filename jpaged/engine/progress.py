"""Progress bars on standard error."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

if TYPE_CHECKING:
    from jpaged.engine.stats import Counters
    from jpaged.scheduling import Request


class _Doing(ProgressColumn):
    """Shows the engine's current activity."""

    def __init__(self, compiling: Callable[[], bool]) -> None:
        super().__init__()
        self._compiling = compiling

    def render(self, task: Task) -> Text:
        return Text("compiling" if self._compiling() else task.description)


def _bar(show: bool, first: ProgressColumn | None = None) -> Progress:
    return Progress(
        first or TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=Console(stderr=True),
        disable=not show,
        refresh_per_second=5,
    )


class GenerationProgress:
    """A progress bar of finished requests, with the rate of output tokens.

    Args:
        total: number of requests.
        show: whether the bar is drawn at all.
        compiling: returns whether the engine is compiling a program, as for the first batch of a size; the bar shows
            it.
    """

    def __init__(self, total: int, show: bool, compiling: Callable[[], bool] = lambda: False) -> None:
        self._progress = _bar(show, _Doing(compiling))
        self._task = self._progress.add_task("generating", total=total, note="")
        self._start = time.monotonic()
        self._output_tokens = 0

    def __enter__(self) -> GenerationProgress:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def update(self, finished: list[Request], stats: Counters) -> None:
        """Count requests that finished in one step."""
        if not finished:
            return
        for request in finished:
            for part in request.all_requests:
                self._output_tokens += sum(len(seq.output_token_ids) for seq in part.sequences)
        seconds = max(time.monotonic() - self._start, 1e-9)
        note = f"{self._output_tokens / seconds:.1f} output tokens/s, {stats.num_steps} steps"
        self._progress.update(self._task, advance=len(finished), note=note)


@contextmanager
def warmup_progress(total: int, show: bool) -> Iterator[Callable[[str], None]]:
    """Show a bar over compiled shapes; yield a function to call with each shape's name."""
    progress = _bar(show)
    task = progress.add_task("compiling", total=total, note="")
    with progress:
        yield lambda name: progress.update(task, advance=1, note=name)
