"""Progress bars on standard error."""

from __future__ import annotations

import sys
import threading
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


LINE_SECONDS = 10.0
"""Seconds between two lines about a program that is still being compiled, where there is no terminal."""


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


class _Notes:
    """Writes on standard error which program is being compiled. Safe in threads.

    A terminal shows one line, which is rewritten every second and erased at the end: text before it stays. Elsewhere
    each program is one line, and another one every `LINE_SECONDS` that it takes.
    """

    def __init__(self, activity: Callable[[], str]) -> None:
        self._activity = activity
        self._shown = False
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._ticking = threading.Thread(target=self._tick, name="jpaged-compilation-notes", daemon=True)

    def say(self, activity: str) -> None:
        """Show what is compiled from now on; "" = nothing is."""
        with self._lock:
            self._say(activity)

    def _say(self, activity: str) -> None:
        if not sys.stderr.isatty():
            sys.stderr.write(f"{activity}\n" if activity else "")
        elif activity:  # save the cursor, write, and later restore it and erase
            sys.stderr.write(f"{ERASE if self._shown else ''}\x1b7 {activity}")
        elif self._shown:
            sys.stderr.write(ERASE)
        self._shown = bool(activity)
        sys.stderr.flush()

    def start(self) -> None:
        """Rewrite a terminal's line every second until `stop`, or repeat it elsewhere."""
        self._ticking.start()

    def stop(self) -> None:
        """Erase the line, and rewrite it no more."""
        self._ended.set()
        with self._lock:
            if self._shown and sys.stderr.isatty():
                self._say("")

    def _tick(self) -> None:
        while not self._ended.wait(1.0 if sys.stderr.isatty() else LINE_SECONDS):
            with self._lock:
                if self._shown and not self._ended.is_set() and (activity := self._activity()):
                    self._say(activity)


ERASE = "\x1b8\x1b[K"
"""Brings a terminal's cursor back to where it was saved, and erases the line from there."""


@contextmanager
def compilation_notes(compilations: Compilations) -> Iterator[None]:
    """Say on standard error which program a caller of steps waits for, while it is compiled, and for how long."""
    notes = _Notes(compilations.activity)
    before, compilations.on_wait = compilations.on_wait, notes.say
    notes.start()
    try:
        yield
    finally:
        compilations.on_wait = before
        notes.stop()


@contextmanager
def warmup_progress(total: int, show: bool) -> Iterator[Callable[[str], None]]:
    """Show a bar over compiled shapes; yield a function to call with each shape's name."""
    progress = _bar(show)
    task = progress.add_task("compiling", total=total, note="")
    with progress:
        yield lambda name: progress.update(task, advance=1, note=name)
