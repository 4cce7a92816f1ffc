"""Reads the schedule of a TPU kernel, which libtpu dumps as ``*-packed-bundles-post-ra.txt``, for `scalar_core` to run.

Each line is a bundle of instructions that are issued together:

    0x13 LB: > { %s1_s4 = sld [smem:[#allocation8 + %s2_s3]]  ;;  %9 = sbr.rel (%p3_p0) target bundleno = 42 (0x2a) }

A core has no interlocks, so a bundle is a cycle, those without an instruction (``{}``) too: they are the latency that
the compiler could not fill. The later dump ``*-final_bundles.txt`` has them folded away and says less than what runs.

``%s1_s4`` is the value s1 in the register s4. Vector instructions take their cycle and nothing else of them is known;
all others are listed here, and one that is not is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

DUMP = "packed-bundles-post-ra"
"""The pass of libtpu whose dump has all bundles."""

Values = list[Any]
"""Values of an instruction's names, by the numbers that `Names` gives them."""
Get = Callable[[Values], Any]

ADDRESS = 1 << 40
"""Addresses are multiples of it, one for each allocation and operand, plus an offset; numbers are below."""


class Unknown:
    """Is a value that the schedule does not tell, as one that comes from a vector; `why` says where it comes from.

    Arithmetic with it is unknown too. To decide by it is an error: Python raises a TypeError wherever it would have to.
    """

    __slots__ = ("why",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, why: str) -> None:
        self.why = why

    def __eq__(self, other: object) -> bool:
        raise TypeError(self.why)

    def __bool__(self) -> bool:
        raise TypeError(self.why)


class Write(NamedTuple):
    """Writes a register: `value`, or where `condition` is false `otherwise`, or nothing.

    Attributes:
        kind: "phi" takes the register as it is before the bundle; "alias" names what its bundle has just written; "set"
            is arithmetic, "load" a load from scalar memory, "core" the core's number, "pop" what a queue has.
    """

    kind: str
    name: int
    register: int
    condition: Get | None
    value: Get
    otherwise: Get | None = None


class Effect(NamedTuple):
    """Does what is no write of a register.

    Attributes:
        kind: "store", "branch", "copy", "wait", "add" to a semaphore, "scope" begins or ends the use of one, "flag"
            reads one, "divide" or "halt".
        given: what it takes, by name.
        what: its text, for errors.
    """

    kind: str
    condition: Get | None
    given: dict[str, Any]
    what: str


class Operand(NamedTuple):
    """Describes an argument of the kernel: its place, shape and dtype, memory, and the register with its address."""

    index: int
    shape: tuple[int, ...]
    dtype: str
    memory: str
    is_output: bool
    name: int
    register: int


class Bundle(NamedTuple):
    """Holds the instructions of a cycle that the scalar core runs; `is_empty`: there is none, of vectors neither."""

    writes: tuple[Write, ...]
    effects: tuple[Effect, ...]
    is_empty: bool


class Schedule(NamedTuple):
    """Holds a kernel's bundles, its operands, and how many names and registers they use."""

    bundles: list[Bundle]
    operands: list[Operand]
    names: list[str]
    registers: int
    asks_core: bool
    """Whether the kernel asks for the number of its core."""


_LINE = re.compile(r"^\s*(?:0x)?([0-9a-f]+)\s+(?:LB|LH|LE|PB|PF|CT)?\s*:\s*[>\s]*\{(.*)$")
_LABEL = re.compile(r"/\*(\w+)=\*/\s*((?:\[[^\]]*\]|[^,;}/])+)")
_COMMENT = re.compile(r"/\*.*?\*/")
_INSTRUCTION = re.compile(r"^(?:(.*?) = )?([A-Za-z_][\w.]*(?:<[^>]*>)?)\s*(.*)$")
_NAME = re.compile(r"%([sp]\d+)_([sp]\d+)")
_CONDITION = re.compile(r"\((!?)(%p\d+_p\d+)(?:, (%s\w+|\d+))?\)")
_OPERAND = re.compile(r"\[shape: (\w+)\[([\d,]*)\][^,\]]*, index: (\d+), kind: (\w+)")
_SPACES = ("smem:", "vmem:", "sflag:", "hbm:")
_COPY_LABELS = ("hbm", "vmem", "smem", "src", "dst", "size_in_granules", "dst_syncflagno")
_IDLE = ("sfence", "nop", "snop", "compiler-scheduling-barrier", "setvm", "rsetvm", "scheck", "strace", "trace")
"""Instructions of the scalar unit without an effect on what is simulated, by how they begin."""


def parse(dump: str) -> Schedule:
    """Return the schedule that a ``*-packed-bundles-post-ra.txt`` has.

    Raises:
        ValueError: no line of it is a bundle, or an instruction is unknown.
    """
    reader = _Reader()
    bundles = []
    for line in dump.splitlines():
        if (match := _LINE.match(line)) is None:
            continue
        if int(match[1], 16) != len(bundles):
            raise ValueError(f"bundle {match[1]} comes as number {len(bundles):#x}: a part of the dump is missing")
        bundles.append(reader.bundle(match[2]))
    if not bundles:
        raise ValueError(f"no bundles in what should be a dump of {DUMP}")
    return Schedule(bundles, reader.operands, reader.names, len(reader.registers), reader.asks_core)


class _Reader:
    """Turns texts of instructions into what they do, and numbers the names and registers that it meets."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.registers: dict[str, int] = {}
        self.operands: list[Operand] = []
        self.asks_core = False
        self._number_of: dict[str, int] = {}
        self._bases: dict[str, int] = {}

    def bundle(self, text: str) -> Bundle:
        instructions = text[: text.rindex("}")] if "}" in text else text
        writes: list[Write] = []
        effects: list[Effect] = []
        for part in instructions.split(";;"):
            raw = re.sub(r"\s+", " ", part).strip()
            if not raw or not _COMMENT.sub("", raw).strip():
                continue
            try:
                done = self._instruction(raw)
            except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"unknown instruction: {raw[:160]} ({error})") from error
            if isinstance(done, Write):
                writes.append(done)
            elif done is not None:
                effects.append(done)
        return Bundle(tuple(writes), tuple(effects), not instructions.strip())

    def _instruction(self, raw: str) -> Write | Effect | None:
        """Return what an instruction does; None: only its cycle."""
        labels = dict(_LABEL.findall(raw))
        match = _INSTRUCTION.match(re.sub(r"\s+", " ", _COMMENT.sub("", raw)).strip())
        if match is None:
            raise ValueError("no instruction")
        results, op, rest = match[1] or "", match[2], match[3]
        found = _NAME.match(results)
        own = self._name(found[0]) if found else None
        if own is None and (results.startswith(("%v", "(%v")) or (op.startswith("v") and op not in _FLAGS)):
            return None
        if op == "scalar_select":
            chosen, a, b = (self._value(part) for part in _split(rest))
            name, register = self._own(own)
            return Write("set", name, register, chosen, a, b)
        condition, otherwise, rest = self._condition(rest)
        if own is not None and op.startswith("v") and op not in _FLAGS:
            why = Unknown(f"{results} comes from a vector")
            return Write("set", *own, condition, lambda _: why, otherwise)
        if op.startswith("inlined_call_operand"):
            return self._argument(op, raw, self._own(own))
        if op in ("sbr.rel", "sbr.abs"):
            target = re.search(r"bundleno = (\d+)", raw)
            if target is None:
                raise ValueError("a branch without the number of a bundle")
            return Effect("branch", condition, {"target": int(target[1])}, raw[:160])
        if op == "sphi":
            name, register = self._own(own)
            return Write("phi", name, register, None, lambda _: None)
        if op.startswith("int_to_ptr."):
            value = self._value(_split(re.sub(r"^\[resolvable:\$\w+\]\s*", "", rest))[0])
            return Write("alias", *self._own(own), condition, value)
        if op == "sld":
            if "core id" in raw:
                self.asks_core = True
                return Write("core", *self._own(own), condition, lambda _: 0, otherwise)
            return Write("load", *self._own(own), condition, self._address(rest), otherwise)
        if op in ("spop", "spop.drf", "vpop.sfrf", "spop.sfrf"):
            queue = re.search(r"(%\w+)$", rest.strip())
            return Write("pop", *self._own(own), condition, lambda _, name=queue[1]: name)
        if own is not None:
            return Write("set", *own, condition, self._arithmetic(op, rest), otherwise)
        return self._effect(op, raw, results, condition, rest, labels)

    def _effect(
        self, op: str, raw: str, results: str, condition: Get | None, rest: str, labels: dict[str, str]
    ) -> Effect | None:
        def effect(kind: str, **given: Any) -> Effect:
            return Effect(kind, condition, given, raw[:160])

        parts = _split(rest)
        if op == "sst":
            if len(parts) == 1:
                parts = list(re.match(r"(\[.*\]\]?)\s+(.*)", rest).groups())
            return effect("store", address=self._address(parts[0]), value=self._value(parts[1].lstrip(", ")))
        if op.startswith("sdivrem."):
            number, by = (self._value(part) for part in parts[:2])
            kinds = [kind for kind in _QUOTIENTS if f"/* {kind} */" in raw]
            if not kinds:
                raise ValueError("a division without its kind")
            return effect("divide", name=results.strip(), number=number, by=by, remainders=_QUOTIENTS[kinds[0]])
        if op.rstrip(".") == "dma.done.wait":
            return effect("wait", flag=self._value(parts[0]), amount=self._value(parts[1]))
        if op.startswith("dma."):
            route = op.removeprefix("dma.")
            if route != "general" and not set(route.split("_to_")) <= {"hbm", "vmem", "smem"}:
                raise ValueError(f"a DMA from and to {route}")
            given = {label: self._value(labels[label].strip()) for label in _COPY_LABELS if label in labels}
            return effect("copy", route=route, strided="steps_per_stride" in labels, **given)
        if op == "vsyncadd":
            return effect("add", flag=self._value(parts[0]), amount=self._value(parts[1]))
        if op == "vsyncpa":
            return effect("scope", flag=self._value(parts[0]))
        if op == "vsyncmov":
            return effect("flag", name=results.strip(), flag=self._value(parts[0]))
        if op == "shalt.err":
            return effect("halt")
        if op.startswith(_IDLE):
            return None
        raise ValueError(f"{op} is none that is known")

    def _argument(self, op: str, raw: str, own: tuple[int, int]) -> None:
        found = _OPERAND.search(raw)
        shape = tuple(int(n) for n in found[2].split(",") if n)
        memory = re.sub(r"[<>]", "", op.partition(".")[2])
        memory = "value" if "no memory space" in raw else memory
        self.operands.append(Operand(int(found[3]), shape, found[1], memory, found[4] == "output", *own))

    def _own(self, own: tuple[int, int] | None) -> tuple[int, int]:
        if own is None:
            raise ValueError("it writes no register")
        return own

    def _name(self, text: str) -> tuple[int, int]:
        """Return the number of a name like ``%s1_s4``, and that of its register."""
        if text not in self._number_of:
            self._number_of[text] = len(self.names)
            self.names.append(text)
        register = _NAME.match(text)[2]
        return self._number_of[text], self.registers.setdefault(register, len(self.registers))

    def _condition(self, rest: str) -> tuple[Get | None, Get | None, str]:
        """Return an instruction's condition, what it writes where that is false, and the text without them."""
        match = _CONDITION.search(rest)
        if match is None:
            return None, None, rest
        number, _ = self._name(match[2])
        condition: Get = (lambda v: not v[number]) if match[1] else (lambda v: v[number])
        otherwise = self._value(match[3]) if match[3] else None
        rest = (rest[: match.start()] + rest[match.end() :]).strip().lstrip(",").strip()
        rest = re.sub(r"\s*,\s*,\s*", ", ", rest)
        return condition, otherwise, re.sub(r"\]\s+,", "],", rest)

    def _arithmetic(self, op: str, rest: str) -> Get:
        rest = re.sub(r"^\[resolvable:\$\w+\]\s*", "", rest)
        given = [self._value(part) for part in _split(rest)]
        if op.startswith("scmp."):
            _, relation, dtype = op.split(".")[:3]
            compare = _COMPARISONS[relation]
            if dtype.startswith("u"):
                return _known(lambda a, b: int(compare(_unsigned(a), _unsigned(b))), *given)
            return _known(lambda a, b: int(compare(a, b)), *given)
        if op in _LOGIC:
            return _logic(*_LOGIC[op], given[0], given[1])
        if op in _UNARY:
            return _known(_UNARY[op], given[0])
        return _known(_BINARY[op], given[0], given[1])

    def _value(self, text: str) -> Get:
        """Return a function of all values to that of an operand."""
        text = text.strip()
        if not text.startswith("["):
            text = re.sub(r"\s+\[#allocation\w+\]$", "", text)
        if _NAME.fullmatch(text):
            number, _ = self._name(text)
            return lambda v: v[number]
        constant = _constant(text)
        if constant is not None:
            return lambda _: constant
        if text.startswith(("[", "#allocation", *_SPACES)):
            return self._address(text)
        raise ValueError(f"operand {text!r}")

    def _address(self, text: str) -> Get:
        """Return a function of all values to an address like ``[smem:[#allocation8 + %s1_s2]]``."""
        text, before = text.strip(), None
        while text != before:
            before = text
            for space in _SPACES:
                text = text.removeprefix(space).strip()
            if text.startswith("[") and text.endswith("]"):
                text = text[1:-1].strip()
        parts: list[Get] = []
        for part in re.split(r"\s\+\s", text):
            part = part.strip()
            if part.startswith("#allocation"):
                base = ADDRESS * self._bases.setdefault(part, 1 + len(self._bases))
                parts.append(lambda _, base=base: base)
            elif part.startswith("["):
                parts.append(self._address(part))
            else:
                parts.append(self._value(part.split(" ")[0].rstrip(",")))
        if len(parts) == 1:
            return parts[0]
        first, *others = parts
        for other in others:
            first = _known(lambda a, b: a + b, first, other)
        return first


_QUOTIENTS = {"kDiv": (False,), "kRem": (True,), "kDivAndRem": (False, True)}
"""Says by a division's kind what its pops get, in their order: the quotient, or (True) the remainder."""
_FLAGS = ("vsyncadd", "vsyncpa", "vsyncmov", "vpop.sfrf")
"""Instructions of the vector unit's name that work on semaphores."""


def _split(text: str) -> list[str]:
    """Return operands, which commas part that are in no bracket."""
    parts, depth, part = [], 0, ""
    for letter in text:
        depth += (letter in "[(") - (letter in "])")
        if letter == "," and depth == 0:
            parts.append(part.strip())
            part = ""
        else:
            part += letter
    return [*parts, part.strip()] if part.strip() else parts


def _constant(text: str) -> int | float | None:
    if re.fullmatch(r"-?\d+", text):
        return wrap(int(text))
    if re.fullmatch(r"\$?0x[0-9a-f]+", text):
        return wrap(int(text.lstrip("$"), 16))
    if text.lstrip("$") in ("true", "false"):
        return int(text.endswith("true"))
    return float(text) if re.fullmatch(r"-?[\d.]+(e[-+]?\d+)?", text) else None


def _known(function: Callable[..., Any], *given: Get) -> Get:
    """Return a function of all values, whose result is unknown where one of those given is."""
    if len(given) == 1:
        (a,) = given

        def unary(v: Values) -> Any:
            x = a(v)
            return x if type(x) is Unknown else function(x)

        return unary
    a, b = given

    def binary(v: Values) -> Any:
        x, y = a(v), b(v)
        if type(x) is Unknown:
            return x
        return y if type(y) is Unknown else function(x, y)

    return binary


def _logic(decisive: bool, result: int, a: Get, b: Get) -> Get:
    """Return a function of all values that has `result` where `a` or `b` is `decisive`, the other known or not."""

    def logic(v: Values) -> Any:
        x, y = a(v), b(v)
        unknown = [value for value in (x, y) if type(value) is Unknown]
        if any(type(value) is not Unknown and bool(value) == decisive for value in (x, y)):
            return result
        return unknown[0] if unknown else 1 - result

    return logic


def wrap(x: int) -> int:
    """Return a number as 32 bits hold it with a sign; an address stays as it is."""
    if not -ADDRESS < x < ADDRESS:
        return x
    x &= 0xFFFFFFFF
    return x - (1 << 32) if x >> 31 else x


def _unsigned(x: int) -> int:
    return x & 0xFFFFFFFF if -ADDRESS < x < ADDRESS else x


def _shifted_left(x: int, by: int) -> int:
    """Shift a number, or the offset of an address: units of an address change, what it is of does not."""
    if by >= 32:
        return 0
    if -ADDRESS < x < ADDRESS:
        return wrap(x << by)
    base, offset = divmod(x, ADDRESS)
    return base * ADDRESS + (offset << by)


def _shifted_right(x: int, by: int) -> int:
    if by >= 32:
        return 0
    if -ADDRESS < x < ADDRESS:
        return wrap(_unsigned(x) >> by)
    base, offset = divmod(x, ADDRESS)
    return base * ADDRESS + (offset >> by)


_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "sadd.s32": lambda a, b: wrap(a + b),
    "ssub.s32": lambda a, b: wrap(a - b),
    "smul.u32": lambda a, b: wrap(a * b),
    "smul.s32": lambda a, b: wrap(a * b),
    "smulhi.u32": lambda a, b: wrap((_unsigned(a) * _unsigned(b)) >> 32),
    "sand.u32": lambda a, b: wrap(_unsigned(a) & _unsigned(b)),
    "sor.u32": lambda a, b: wrap(_unsigned(a) | _unsigned(b)),
    "sxor.u32": lambda a, b: wrap(_unsigned(a) ^ _unsigned(b)),
    "sshll.u32": _shifted_left,
    "sshllo.u32": lambda a, b: wrap((a << b) | ((1 << b) - 1)) if b < 32 else -1,
    "sshrl.u32": _shifted_right,
    "sshra.s32": lambda a, b: wrap(a >> min(b, 31)) if -ADDRESS < a < ADDRESS else _shifted_right(a, b),
    "smin.u32": lambda a, b: wrap(min(_unsigned(a), _unsigned(b))),
    "smax.u32": lambda a, b: wrap(max(_unsigned(a), _unsigned(b))),
    "smin.s32": min,
    "smax.s32": max,
    "scalar_lea.hbm": lambda a, b: a + b,
    "scalar_lea.vmem": lambda a, b: a + b,
    "scalar_lea.smem": lambda a, b: a + b,
    "scalar_lea.sflag": lambda a, b: a + b,
    "pxor": lambda a, b: int(bool(a) != bool(b)),
}
_LOGIC = {"pand": (False, 0), "pnand": (False, 1), "por": (True, 1), "pnor": (True, 0)}
"""Which operand decides a result alone, and that result."""
_UNARY: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("smov", "smov.u32", "smov.s32", "smov.f32", "pmov", "scopy"), lambda a: a),
    "pneg": lambda a: int(not a),
    **dict.fromkeys(("sclz", "sclz.u32"), lambda a: 32 - _unsigned(a).bit_length()),
    "sctz": lambda a: (_unsigned(a) & -_unsigned(a)).bit_length() - 1 if a else 32,
}
