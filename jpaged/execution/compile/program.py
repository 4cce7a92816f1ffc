"""Compiles the shapes of a jitted function one by one, and knows them by name.

Compiling ahead of the first call runs nothing, so a warm-up costs no step, needs no pool, and hands the compiler to
a second thread while the next shape is traced. Several threads may compile at once, each shape in one of them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import jax

from jpaged.execution.compile.buckets import Bucket
from jpaged.execution.compile.recent import CompiledProgram, recent_programs, signature
from jpaged.execution.compile.store import ProgramStore, program_name

logger = logging.getLogger(__name__)


class Compilations:
    """Counts and times compilations, from `begin` and `end` of each. Safe in threads.

    Attributes:
        warm: from now on a compilation counts as a recompile.
        num_recompiles: shapes compiled since; each is logged as a warning.
        seconds: time that tracing and compiling took, added up over shapes.
        background: the thread that compiles in the background, see `threading.get_ident`; None = none does.
        num_in_background: shapes that it compiled, or began to.
        num_to_come: shapes that it will look at yet.
        num_padded: steps and draws that ran in a larger shape than theirs, which was not compiled yet.
        lacking: how many of them lack a shape that is not compiled yet, by the shape's name.
        on_wait: called with `activity` when a step waits for a shape to be compiled, and with "" at the end.
    """

    def __init__(self) -> None:
        self.warm = False
        self.num_recompiles = 0
        self.seconds = 0.0
        self.background: int | None = None
        self.num_in_background = 0
        self.num_to_come = 0
        self.num_padded = 0
        self.lacking: Counter[str] = Counter()
        self.on_wait: Callable[[str], None] = _silent
        self._shapes: set[Hashable] = set()
        self._running: Counter[Hashable] = Counter()
        self._since: dict[Hashable, float] = {}  # of shapes that are being compiled: when that began
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        """Return how many shapes were compiled so far, those that are being compiled included."""
        return len(self._shapes)

    @property
    def running(self) -> bool:
        """Tell whether a shape is being compiled right now."""
        return bool(self._running)

    def activity(self) -> str:
        """Describe the program that is being compiled, with the seconds that all programs took; "" if none is.

        There is no total: a step compiles the shape that it meets, and which shapes the requests will meet depends on
        how they run together and on how long their outputs become.
        """
        running = tuple(self._since.items())  # no lock: a garbage collection in here may call `end`
        if not running:
            return ""
        shape, since = running[0]
        seconds = self.seconds + time.monotonic() - since
        return f"compiling program {self.count} ({described(shape)}) and its kernels, {seconds:.0f} s so far"

    def lacked(self, name: str) -> None:
        """Note that a step or draw runs in a larger shape than this one, which is not compiled yet."""
        self.num_padded += 1
        self.lacking[name] += 1

    def begin(self, shape: Hashable) -> None:
        """Note that a shape is about to be traced and compiled."""
        with self._lock:
            waits = not self._running and threading.get_ident() != self.background
            self._shapes.add(shape)
            self._running[shape] += 1
            self._since.setdefault(shape, time.monotonic())
            self.num_recompiles += self.warm
            self.num_in_background += threading.get_ident() == self.background
        if waits:
            self.on_wait(self.activity())
        if self.warm:
            logger.warning("compiling %s after warm-up (number %d)", shape, self.num_recompiles)

    def end(self, shape: Hashable, seconds: float) -> None:
        """Note that a shape is compiled, or could not be, after `seconds` of tracing and compiling."""
        with self._lock:
            self.seconds += seconds
            self._running -= Counter([shape])
            if shape not in self._running:
                self._since.pop(shape, None)
        if threading.get_ident() != self.background and not self._running:
            self.on_wait("")
        logger.debug("compiled %s in %.2f s", shape, seconds)


def described(shape: Hashable) -> str:
    """Return a short description of a shape for people: of a step its bucket, of others the kind only.

    >>> described(("step", Bucket(tokens=4, seqs=4, decode_only=True)))
    'decode step, 4 tokens'
    >>> described(("sample", 4, False, 0))
    'sample'
    """
    kind, *sizes = shape if isinstance(shape, tuple) else (shape,)
    bucket = next((size for size in sizes if isinstance(size, Bucket)), None)
    return str(kind) if bucket is None else bucket.name


def _silent(activity: str) -> None:
    """Say nothing about a compilation."""


def _noop(key: Hashable, seconds: float) -> None:
    """Do nothing at the end of a compilation."""


def _no_work() -> None:
    """Do nothing: the shape is compiled."""


class Program:
    """Compiles a function once for each key. Safe in threads.

    Args:
        function: jitted; static arguments are given by name.
        on_compile: called with each new key when its tracing begins.
        on_compiled: called with the key and the seconds of tracing and compiling at the end, also after a failure.
        made_of: everything that `function` was made of, if it can be compared: then programs that this process compiled
            for an equal function are taken from `recent_programs`. The callbacks run as if they had been compiled.
        kind: which of its engine's functions it is, unique there; "" = one that is not kept in `store`.
        store: where programs are loaded from, or collected for; None = neither.

    Attributes:
        out_info: shapes of what the function gives back, as last traced.
    """

    out_info: Any

    def __init__(
        self,
        function: jax.stages.Wrapped,
        on_compile: Callable[[Hashable], None],
        on_compiled: Callable[[Hashable, float], None] = _noop,
        made_of: Hashable | None = None,
        *,
        kind: str = "",
        store: ProgramStore | None = None,
    ) -> None:
        self._function = function
        self._on_compile = on_compile
        self._on_compiled = on_compiled
        self._made_of = made_of
        self._kind = kind
        self._store = store if kind else None
        self._compiled: dict[Hashable, jax.stages.Compiled] = {}
        self._begun: dict[Hashable, threading.Event] = {}  # by key: set when the compilation is over
        self._lock = threading.RLock()  # a compilation may end in the garbage collector

    def __call__(self, key: Hashable, *args: Any, **static: Any) -> Any:
        """Call the function; all calls with one key have the same shapes and static arguments."""
        while (compiled := self._compiled.get(key)) is None:
            self.prepare(key, *args, **static)()
        return compiled(*args)

    def has(self, key: Hashable) -> bool:
        """Tell whether a call with this key finds its shape compiled."""
        return key in self._compiled

    def prepare(self, key: Hashable, *args: Any, **static: Any) -> Callable[[], None]:
        """Trace the function for `args`, arrays or their shapes; return a call that compiles it, in any thread.

        Where another thread has begun with the key, nothing is traced, and what is returned waits for the end of that,
        good or bad.
        """
        if key in self._compiled:
            return _no_work
        over = threading.Event()
        compilation = _Compilation(lambda seconds: self._end(key, over, seconds))
        with self._lock:
            begun = self._begun.setdefault(key, over)
        if begun is not over:
            compilation.forget()
            return lambda: _wait_for(begun)
        self._on_compile(key)
        try:
            work = self._traced(key, args, static)
        except BaseException:
            compilation.end()
            raise
        if work is None:
            compilation.end()
            return _no_work
        return compilation.of(work)

    def _traced(self, key: Hashable, args: tuple[Any, ...], static: dict[str, Any]) -> Callable[[], None] | None:
        """Trace the function and return a call that compiles it; None if the program is known, which is then used."""
        name = None if self._made_of is None else signature(self._made_of, args, static)
        stored = "" if self._store is None else program_name(self._kind, key, args, static)
        if (known := self._known(name, stored, args)) is not None:
            self._compiled[key], self.out_info = known
            return None
        lowered = self._function.lower(*args, **static)
        self.out_info = lowered.out_info
        # A trace takes megabytes and is not needed again. What `jax.jit` returns has more than its type says.
        self._function.clear_cache()  # type: ignore[attr-defined]

        def compile_it() -> None:
            self._compiled[key] = executable = lowered.compile()
            program = CompiledProgram(executable, lowered.out_info)
            recent_programs.keep(name, program)
            if self._store is not None and self._store.collects:
                self._store.keep(stored, program)

        return compile_it

    def _known(self, name: Hashable | None, stored: str, args: tuple[Any, ...]) -> CompiledProgram | None:
        """Return the program if there is no need to compile it."""
        if self._store is not None and self._store.collects:
            return None  # only what the compiler gives can be written
        known = recent_programs.find(name)
        if known is None and self._store is not None and (known := self._found(self._store, stored, args)) is not None:
            recent_programs.keep(name, known)
        return known

    def _found(self, store: ProgramStore, stored: str, args: tuple[Any, ...]) -> CompiledProgram | None:
        try:
            return store.find(stored, args)
        except ValueError as error:  # `jpaged compile` may replace the folder while requests run, which must not end
            # A folder that was replaced lacks every program: one warning is enough.
            logger.log(logging.DEBUG if store.failed else logging.WARNING, "%s: it is compiled instead", error)
            store.failed = True
            return None

    def _end(self, key: Hashable, over: threading.Event, seconds: float) -> None:
        with self._lock:
            if self._begun.get(key) is over:
                del self._begun[key]
        over.set()
        self._on_compiled(key, seconds)

    def forget(self) -> None:
        """Release all compiled programs; a later call compiles again."""
        self._compiled.clear()


class _Compilation:
    """Compiles what was traced. It is over when that has ended, or when the last reference to it is gone: the thread
    that traced it may have been interrupted, and others wait.

    Args:
        ended: called once with the seconds of tracing and compiling.
    """

    def __init__(self, ended: Callable[[float], None]) -> None:
        self._ended: Callable[[float], None] | None = ended
        self._work: Callable[[], None] = _no_work
        self._seconds = 0.0
        self._since: float | None = time.perf_counter()

    def of(self, work: Callable[[], None]) -> _Compilation:
        """Set the call that compiles, once tracing is done; the time until the call does not count."""
        self._work, self._seconds, self._since = work, self._so_far, None
        return self

    @property
    def _so_far(self) -> float:
        return self._seconds + (0.0 if self._since is None else time.perf_counter() - self._since)

    def __call__(self) -> None:
        self._since = time.perf_counter()
        try:
            self._work()
        finally:
            self.end()

    def end(self) -> None:
        """Tell of the end, the first time."""
        ended, self._ended = self._ended, None
        if ended is not None:
            ended(self._so_far)

    def forget(self) -> None:
        """Cancel: another thread is already compiling this shape."""
        self._ended = None

    def __del__(self) -> None:
        self.end()


def _wait_for(over: threading.Event) -> None:
    over.wait()
