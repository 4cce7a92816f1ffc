"""Progress bars on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

if TYPE_CHECKING:
    from jpaged.engine.stats import Counters
    from jpaged.execution.compile.program import Compilations
    from jpaged.scheduling import Request


NOTE_SECONDS = 0.2
"""Least seconds between two changes of a bar's note, which cost more than a step of a small model."""


class _Doing(ProgressColumn):
    """Shows the engine's current activity."""

    def __init__(self, compiling: Callable[[], str]) -> None:
        super().__init__()
        self._compiling = compiling

    def render(self, task: Task) -> Text:
        return Text(self._compiling() or task.description)


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
    """A progress bar of one call's finished requests, with its steps and output tokens, and the tokens of a prompt that
    is being read.

    Args:
        requests: the call's requests.
        total: how many of them are to finish.
        stats: the engine's counters; what they hold now belongs to earlier calls.
        compiling: describes the program that the engine is compiling, as for the first batch of a size; "" = none. The
            bar shows it.
    """

    def __init__(
        self, requests: Sequence[Request], total: int, stats: Counters, compiling: Callable[[], str] = lambda: ""
    ) -> None:
        self._progress = _bar(True, _Doing(compiling))
        self._task = self._progress.add_task("generating", total=total, note="")
        self._requests = requests
        self._stats = stats
        self._steps, self._tokens = stats.num_steps, stats.num_output_tokens
        self._start = self._noted = time.monotonic()

    def __enter__(self) -> GenerationProgress:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.update(self._task, note=self.note())
        self._progress.stop()

    def update(self, finished: int) -> None:
        """Count the requests that finished in a step."""
        now = time.monotonic()
        if finished or now - self._noted > NOTE_SECONDS:
            self._noted = now
            self._progress.update(self._task, advance=finished, note=self.note())

    def note(self) -> str:
        """Return what the call has done so far."""
        tokens, steps = self._stats.num_output_tokens - self._tokens, self._stats.num_steps - self._steps
        if not tokens and len(self._requests) == 1:
            total = len(self._requests[0].prompt_token_ids)
            read = max((seq.num_computed for seq in self._requests[0].sequences), default=0)
            return f"{min(read, total):,} of {total:,} prompt tokens, {steps} steps"
        seconds = max(time.monotonic() - self._start, 1e-9)
        return f"{tokens:,} output tokens, {tokens / seconds:.1f} a second, {steps} steps"


@contextmanager
def compilation_notes(compilations: Compilations) -> Iterator[None]:
    """Say on standard error which program a caller of steps waits for, while it is compiled.

    A terminal shows a line that goes again, and leaves the cursor where it was; elsewhere one line is written in all.
    """
    announced = shown = False

    def say(activity: str) -> None:
        nonlocal announced, shown
        if sys.stderr.isatty():
            # Save the cursor, write, and at the end restore it and erase: text before it stays.
            if activity:
                sys.stderr.write(f"\x1b7 {activity}")
            elif shown:
                sys.stderr.write("\x1b8\x1b[K")
            shown = bool(activity)
        elif activity and not announced:
            announced = True
            sys.stderr.write("compiling programs for the first answer; later ones begin at once\n")
        sys.stderr.flush()

    before, compilations.on_wait = compilations.on_wait, say
    try:
        yield
    finally:
        compilations.on_wait = before


@contextmanager
def warmup_progress(total: int, show: bool) -> Iterator[Callable[[str], None]]:
    """Show a bar over compiled shapes; yield a function to call with each shape's name."""
    progress = _bar(show)
    task = progress.add_task("compiling", total=total, note="")
    with progress:
        yield lambda name: progress.update(task, advance=1, note=name)
