"""What ARCHITECTURE.md and docs/architecture say of the code is there: names, threads, locks, signals, rooms and seams.

A name in backticks has to be one of the code's. One in parentheses after a file, as in "`a.py` (`B`)", is that file's.
"""

from __future__ import annotations

import ast
import builtins
import keyword
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from commands import ROOT, parse_jpaged

from jpaged.execution.caches.registry import KINDS

PAGES = ["ARCHITECTURE.md", *sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "docs/architecture").glob("*.md"))]
PRODUCT = [path for room in ("jpaged", "models", "pallas_kernels") for path in sorted((ROOT / room).rglob("*.py"))]
CODE = [*PRODUCT, *sorted((ROOT / "scripts").rglob("*.py")), *sorted((ROOT / "tests").rglob("*.py"))]
THREADS = (ROOT / "docs" / "architecture" / "10-threads-locks-signals.md").read_text()

OTHERS = {
    "asyncio",
    "fold_in",
    "jax",
    "jaxlib",
    "jnp",
    "jpaged_models",
    "lru",
    "os",
    "pytest",
    "quant_method",
    "shard_map",
}
"""Words in backticks that are not names of this code: modules, names of JAX, words of formats and settings."""


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


class Names(NamedTuple):
    """The names of some files.

    Attributes:
        all: every name that is defined, assigned, taken as an argument, or an attribute that something is given.
        members: the members of each class, those of its bases too.
    """

    all: set[str]
    members: dict[str, set[str]]


def made(node: ast.AST) -> str | None:
    """Return the name that a piece of code makes: defines, assigns, takes as an argument, gives or imports."""
    match node:
        case ast.Attribute(ctx=ast.Store()):
            return node.attr
        case ast.Name(ctx=ast.Store()):
            return node.id
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return node.name
        case ast.arg() | ast.keyword():
            return node.arg
        case ast.alias():
            return (node.asname or node.name).rpartition(".")[2]
    return None


def names_in(files: list[Path]) -> Names:
    """Return the names of files; a base class's members are found by its name, wherever it is."""
    own: dict[str, set[str]] = defaultdict(set)
    bases: dict[str, set[str]] = defaultdict(set)
    every: set[str] = set()

    def collect(node: ast.AST, classes: tuple[str, ...]) -> None:
        name = made(node)
        if name is not None:
            every.add(name)
            for one in classes:
                own[one].add(name)
        if isinstance(node, ast.ClassDef):
            classes = (*classes, node.name)
            bases[node.name].update(re.findall(r"\w+", " ".join(map(ast.unparse, node.bases))))
        for child in ast.iter_child_nodes(node):
            collect(child, classes)

    for path in files:
        every.update((path.stem, path.parent.name))
        collect(tree(path), ())

    def inherited(name: str, seen: frozenset[str] = frozenset()) -> set[str]:
        above = (inherited(base, seen | {name}) for base in bases[name] - seen if base in bases)
        return own[name].union(*above)

    return Names(every, {name: inherited(name) for name in list(bases)})


@cache
def everywhere() -> Names:
    return names_in([*PRODUCT, *(ROOT / "scripts").glob("*.py")])


def spans(text: str) -> list[str]:
    """Return what stands in backticks, outside code blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"(?ms)^```.*?^```", "", text))


def missing(span: str, names: Names) -> bool:
    """Tell whether a span is a name that none of the files has; anything else, as a command, is passed over."""
    name = re.sub(r"\(.*\)$", "", span).removesuffix("=")
    if not re.fullmatch(r"(?:with )?[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", name):
        return False
    first, *rest = name.removeprefix("with ").split(".")
    if rest and rest[-1] in ("py", "md", "svg", "toml", "yml"):  # a file
        return False
    if first in OTHERS or keyword.iskeyword(first) or hasattr(builtins, first):
        return False
    if first == "jpaged":
        return bool(rest) and rest[-1] not in names.all
    for member in rest:
        within = names.members.get(first, names.all)
        if member not in within:
            return True
        first = member
    return not rest and first not in names.all


def files_named(text: str) -> list[str]:
    """Return the Python files and folders that a text names in backticks; ``a/{b,c}.py`` are two, ``x*.py`` none."""
    found = []
    for span in spans(text):
        if not re.fullmatch(r"[\w./{},-]+\.(py|md|svg|toml|html|js)|[\w./]+/", span):
            continue
        head, brace, rest = span.partition("{")
        inner, _, tail = rest.partition("}")
        found += [head + one + tail for one in inner.split(",")] if brace else [span]
    return found


@cache
def all_paths() -> list[str]:
    folders = (ROOT / name for name in ("jpaged", "models", "pallas_kernels", "scripts", "tests", "docs"))
    paths = [path.relative_to(ROOT).as_posix() for folder in folders for path in folder.rglob("*")]
    return ["/" + path for path in [*paths, *(path.name for path in ROOT.iterdir())]]


def is_path(name: str) -> bool:
    """Tell whether a file or folder of the repository has a path that ends so."""
    return any(path.endswith("/" + name.rstrip("/")) for path in all_paths())


@pytest.mark.parametrize("page", PAGES)
def test_names_in_backticks_are_names_of_the_code(page):
    assert [span for span in spans(text_of(page)) if missing(span, everywhere())] == []


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_by_the_end_of_their_path_exist(page):
    assert [name for name in files_named(text_of(page)) if not is_path(name)] == []


def said_to_be_in() -> Iterator[tuple[str, str, str]]:
    """Yield (page, file, name) for each "`file.py` (`Name`, `name`)"."""
    for page in PAGES:
        for file, inner in re.findall(r"`([\w./]+\.py)` \(((?:`[^`]+`(?:, )?(?:and )?)+)", text_of(page)):
            yield from ((page, file, name) for name in re.findall(r"`([^`]+)`", inner))
        for name, file in re.findall(r"`([\w.]+)` \(`([\w./]+\.py)`\)", text_of(page)):
            yield page, file, name


def test_names_are_in_the_files_that_they_are_said_to_be_in():
    found = list(said_to_be_in())
    assert len(found) > 20
    wrong = []
    for page, file, name in found:
        files = [path for path in CODE if path.as_posix().endswith("/" + file)]
        if not any(not missing(name, names_in([path])) for path in files):
            wrong.append(f"{page}: {file} has no {name}")
    assert wrong == []


def test_a_name_that_is_gone_or_elsewhere_is_found():
    names = names_in([ROOT / "jpaged" / "memory" / "allocator.py"])
    assert not missing("BlockAllocator", names) and not missing("BlockAllocator.take(...)", names)
    assert missing("BlockAllocator.nonesuch", names) and missing("Scheduler", names)
    assert not missing("pip install x", names) and not missing("a/b", names)
    assert files_named("`jpaged/{llm,config}.py` `a.b` `x.py`") == ["jpaged/llm.py", "jpaged/config.py", "x.py"]
    assert is_path("memory/layout.py") and is_path("caches/") and not is_path("emory/layout.py")


# ------------------------------------------------------------------ threads, locks, signals

STARTERS = {"Thread", "ThreadPoolExecutor", "Timer"}


def called(call: ast.Call) -> str:
    """Return the last part of the name of what is called."""
    return ast.unparse(call.func).rpartition(".")[2]


def thread_names(source: ast.Module) -> list[str]:
    """Return the names of the threads that a file starts, one each time that it does, "" for one without a name."""
    found = []
    for part in ast.walk(source):
        if isinstance(part, ast.Call) and called(part) in STARTERS - {"Timer"}:
            given = {word.arg: word.value for word in part.keywords}
            name = given.get("name", given.get("thread_name_prefix"))
            found.append(name.value if isinstance(name, ast.Constant) else "")
        elif isinstance(part, ast.FunctionDef) and "Timer(" in ast.unparse(part):
            found += re.findall(r"\.name, .* = \(?'(.*?)'", ast.unparse(part)) or [""]
    return found


def test_every_thread_has_a_name_and_the_page_lists_them_all():
    starters = [path for path in PRODUCT if re.search("|".join(STARTERS), path.read_text())]
    started = {path.relative_to(ROOT).as_posix(): thread_names(tree(path)) for path in starters}
    unnamed = [path for path, names in started.items() if not all(re.match("jpaged-", name) for name in names)]
    assert unnamed == []
    assert {name for names in started.values() for name in names} == set(re.findall(r"`(jpaged-[\w-]+)`", THREADS))


def test_threads_stand_in_the_row_of_the_file_that_starts_them():
    rows = [row for row in THREADS.splitlines() if row.startswith("| `jpaged-") and ".py`" in row]
    assert len(rows) > 8
    for row in rows:
        files = [ROOT / file for file in re.findall(r"`([\w/]+\.py)`", row)]
        here = {name for file in files for name in thread_names(tree(file))}
        assert set(re.findall(r"`(jpaged-[\w-]+)`", row.split("|")[1])) <= here, row


def test_threads_without_a_name_are_found():
    source = "def f():\n    Thread(target=g, name='jpaged-x').start()\n    ThreadPoolExecutor(1)\n"
    assert thread_names(ast.parse(source)) == ["", "jpaged-x"]
    assert thread_names(ast.parse("def f():\n    t = Timer(1, g)\n    t.start()")) == [""]


def test_every_lock_is_in_a_row_of_the_page():
    """By the name of its class or variable, or by its folder or file."""
    section = THREADS.partition("## Locks")[2].partition("##")[0]
    rooms = tuple(re.findall(r"`((?:jpaged|pallas_kernels)[\w/.]*)`", section))
    for path in PRODUCT:
        for line in path.read_text().splitlines():
            if made := re.match(r"\s*([\w.]+) = (?:threading\.)?R?Lock\(\)", line):
                owner = {part.name for part in tree(path).body if isinstance(part, ast.ClassDef)} | {made[1]}
                listed = {span.partition(".")[0] for span in spans(section)}
                assert owner & listed or path.relative_to(ROOT).as_posix().startswith(rooms), f"{path}: {line}"


def test_deferred_signals_are_those_of_the_code():
    section = THREADS.partition("## Signals")[2].partition("##")[0]
    code = (ROOT / "jpaged" / "engine" / "interrupts.py").read_text()
    assert set(re.findall(r"\bSIG[A-Z]{3,}", section)) == set(re.findall(r"\bSIG[A-Z]{3,}", code))


# ------------------------------------------------------------------ rooms and walls

CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
LAYERS = [layer.split(" | ") for layer in next(c for c in CONTRACTS if c["type"] == "layers")["layers"]]


def module_of(room: str) -> str:
    return {"models": "jpaged_models"}.get(room, room.removesuffix(".py").replace("/", "."))


def height(room: str) -> int:
    return next(i for i, layer in enumerate(LAYERS) if module_of(room) in layer)


def test_rooms_stand_in_the_order_of_the_layers():
    block = text_of("ARCHITECTURE.md").partition("## Rooms")[2].partition("## Walls")[0]
    rooms = re.findall(r"^    (\S+) ", block, re.MULTILINE)
    listed = [room for room in rooms if any(module_of(room) in layer for layer in LAYERS)]
    packages = {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "jpaged").glob("*/__init__.py")}
    # `model_api` is in the row of other files: it is a contract, not a room.
    assert packages - {"jpaged/model_api"} <= set(rooms) and set(rooms) - set(listed) == {"jpaged"}
    heights = [height(room) for room in listed]
    assert heights == sorted(heights)
    host = {room for room, what in re.findall(r"^    (\S+) +(HOST)", block, re.MULTILINE)}
    assert {module_of(room) for room in host} == set(forbidden("never import jax")["source_modules"])


def forbidden(name: str) -> dict:
    return next(contract for contract in CONTRACTS if name in contract["name"])


def test_the_table_of_rooms_has_every_room_and_says_which_know_no_jax():
    table = text_of("docs/architecture/01-overview.md").partition("## Rooms")[2].partition("##")[0]
    rows = [[spans(cell) for cell in row.split("|")[1:4:2]] for row in table.splitlines() if row.startswith("| `")]
    rooms = {room for first, _ in rows for room in first if "/" in room or room in ("models", "pallas_kernels")}
    packages = {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "jpaged").glob("*/__init__.py")}
    assert rooms == packages - {"jpaged/model_api"} | {"models", "pallas_kernels"}
    without = [row.split("|")[1] for row in table.splitlines() if "no jax" in row]
    said = {module_of(room) for cell in without for room in spans(cell)}
    assert said == set(forbidden("never import jax")["source_modules"])


def test_every_contract_is_among_the_walls():
    walls = text_of("ARCHITECTURE.md").partition("## Walls")[2].partition("##")[0].lower()
    for word in ("layers above", "circles", "neither jax", "no policy", "not text", "public names", "arrays only", "no settings"):
        assert word in walls
    assert len(CONTRACTS) == 9, "a contract is new or gone: say so in ARCHITECTURE.md, and here"


def test_every_package_of_kernels_is_on_its_page():
    page = text_of("docs/architecture/08-kernels.md")
    packages = [path.parent.name for path in (ROOT / "pallas_kernels").glob("*/__init__.py")]
    assert len(packages) > 10 and [name for name in packages if f"`pallas_kernels/{name}`" not in page] == []


def test_every_reader_of_a_quantisation_is_on_its_page():
    page, folder = text_of("docs/architecture/06-weights-and-formats.md"), "jpaged/loading/weight_formats"
    named = {name.rpartition("/")[2] for name in files_named(page) if folder in name}
    helpers = {"__init__.py", "coded_folder.py", "on_load.py", "settings.py"}
    assert {path.name for path in (ROOT / folder).glob("*.py")} - helpers == named


def test_kinds_of_layers_are_known_by_class_only_where_the_interface_says_so():
    """See the head of `jpaged.execution.caches.base`: adapters, encoded images and, in training, states."""
    caches = ROOT / "jpaged" / "execution" / "caches"
    kinds = {kind.__name__ for kind in KINDS.values()} | {"EncodedCache"}
    found = defaultdict(set)
    for path in PRODUCT:
        if caches not in path.parents and "isinstance" in path.read_text():
            calls = [
                part for part in ast.walk(tree(path)) if isinstance(part, ast.Call) and called(part) == "isinstance"
            ]
            for name in kinds.intersection(re.findall(r"\w+", " ".join(map(ast.unparse, calls)))):
                found[name].add(path.relative_to(ROOT).parts[1])
    assert found.pop("StateCache") == {"training"}
    assert found.keys() == {"AdapterCache", "EncodedCache", "CrossAttentionCache"}


# ------------------------------------------------------------------ seams


def test_tables_of_seams_are_in_the_files_that_register():
    """Each upper-case name of the table stands, assigned, in a file that its row names."""
    rows = [row for row in text_of("ARCHITECTURE.md").partition("## Seams")[2].splitlines() if row.startswith("| ")]
    checked = 0
    for row in rows:
        register = row.rsplit(" | ", 1)[-1]
        files = [path for name in files_named(register) for path in CODE if path.as_posix().endswith("/" + name)]
        for name in re.findall(r"`(_?[A-Z][A-Z_]+)`", register):
            assert any(name in names_in([path]).all for path in files), (name, row)
            checked += 1
    assert checked > 12


def test_commands_that_pages_name_are_taken():
    for page in PAGES:
        for span in spans(text_of(page)):
            if span.startswith("jpaged ") and "..." not in span:
                try:
                    parse_jpaged(span)
                except Exception as error:
                    assert "Missing " in str(error) or "requires an argument" in str(error), f"{page}: {error}"
