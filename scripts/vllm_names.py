"""Lists vLLM's public names, found in its source without importing it: tests/vllm_names.json.

    pip download --no-deps --no-binary :all: vllm==0.32.0    # leave the archive of sources unpacked in FOLDER
    python scripts/vllm_names.py FOLDER --write

The test tests/test_vllm_names.py then checks that each of them works here or says what to use.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PLACE = Path(__file__).parents[1] / "tests" / "vllm_names.json"
ENTRY = "vllm.entrypoints"
CLASSES = {
    "LLM": f"{ENTRY}.llm",
    "AsyncLLM": "vllm.v1.engine.async_llm",
    "EngineArgs": "vllm.engine.arg_utils",
    "AsyncEngineArgs": "vllm.engine.arg_utils",
    "SamplingParams": "vllm.sampling_params",
    "StructuredOutputsParams": "vllm.sampling_params",
    "BeamSearchParams": "vllm.sampling_params",
    "RequestOutputKind": "vllm.sampling_params",
    "PoolingParams": "vllm.pooling_params",
    "LoRARequest": "vllm.lora.request",
    "RequestOutput": "vllm.outputs",
    "CompletionOutput": "vllm.outputs",
    "PoolingRequestOutput": "vllm.outputs",
    "EmbeddingOutput": "vllm.outputs",
    "ClassificationOutput": "vllm.outputs",
    "ScoringOutput": "vllm.outputs",
    "BeamSearchOutput": f"{ENTRY}.generate.beam_search.utils",
    "BeamSearchSequence": f"{ENTRY}.generate.beam_search.utils",
    "Logprob": "vllm.logprobs",
    "RequestStateStats": "vllm.v1.metrics.stats",
    "TextPrompt": "vllm.inputs.llm",
    "TokensPrompt": "vllm.inputs.llm",
    "Counter": "vllm.v1.metrics.reader",
    "Gauge": "vllm.v1.metrics.reader",
    "Histogram": "vllm.v1.metrics.reader",
    "Vector": "vllm.v1.metrics.reader",
}
"""Classes that a user holds, by their modules."""
_WITH_CALLS = ("LLM", "AsyncLLM")
"""Those of whose methods the arguments are listed too."""
BODIES = {
    "/v1/chat/completions": ("ChatCompletionRequest", f"{ENTRY}.openai.chat_completion.protocol"),
    "/v1/completions": ("CompletionRequest", f"{ENTRY}.openai.completion.protocol"),
    "/v1/responses": ("ResponsesRequest", f"{ENTRY}.openai.responses.protocol"),
    "/v1/embeddings": ("EmbeddingCompletionRequest", f"{ENTRY}.pooling.embed.protocol"),
    "/classify": ("ClassificationCompletionRequest", f"{ENTRY}.pooling.classify.protocol"),
    "/score": ("ScoreTextRequest", f"{ENTRY}.pooling.scoring.protocol"),
    "/rerank": ("RerankRequest", f"{ENTRY}.pooling.scoring.protocol"),
    "/tokenize": ("TokenizeCompletionRequest", f"{ENTRY}.serve.tokenize.protocol"),
    "/tokenize (messages)": ("TokenizeChatRequest", f"{ENTRY}.serve.tokenize.protocol"),
    "/detokenize": ("DetokenizeRequest", f"{ENTRY}.serve.tokenize.protocol"),
}
"""Each body of its server, as its class and module."""
_FILES_OF_FLAGS = {
    "serve": ("entrypoints/cli/serve.py", "entrypoints/launchers/cli_args.py"),
    "chat": ("entrypoints/cli/openai.py",),
    "run-batch": ("entrypoints/cli/run_batch.py", "entrypoints/launchers/run_batch.py"),
    "bench serve": ("benchmarks/serve.py", "benchmarks/datasets"),
    "bench throughput": ("benchmarks/throughput.py", "benchmarks/datasets"),
    "bench latency": ("benchmarks/latency.py",),
}
_CLASSES_OF_FLAGS = (
    ("EngineArgs", "vllm.engine.arg_utils"),
    ("AsyncEngineArgs", "vllm.engine.arg_utils"),
    ("FrontendArgs", f"{ENTRY}.launchers.cli_args"),
)


class Source:
    """vLLM's files as trees of syntax, in which names are followed through imports."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cache  # noqa: B019  the source lives as long as the script
    def tree(self, module: str) -> ast.Module | None:
        """Return a module's tree; None = it is not in the source."""
        path = self.folder.joinpath(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return ast.parse(file.read_text())
        return None

    def find(self, module: str, name: str) -> tuple[str, ast.ClassDef] | None:
        """Return a class and the module that defines it, or None."""
        for node in ast.walk(tree) if (tree := self.tree(module)) else ():
            if isinstance(node, ast.ClassDef) and node.name == name:
                return module, node
            if isinstance(node, ast.ImportFrom):
                for each in node.names:
                    if (each.asname or each.name) == name and (home := self._absolute(module, node)).startswith("vllm"):
                        return self.find(home, each.name)
        return None

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = module.split(".")
        if not self.folder.joinpath(*package, "__init__.py").is_file():
            package = package[:-1]
        return ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])

    def classes(self, module: str, name: str) -> Iterator[ast.ClassDef]:
        """Yield a class and those that it inherits from, as far as they are vLLM's."""
        if (found := self.find(module, name)) is None:
            return
        home, node = found
        yield node
        for base in node.bases:
            plain = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(plain, ast.Name):
                yield from self.classes(home, plain.id)

    def fields(self, module: str, name: str) -> set[str]:
        """Return the annotated fields of a class."""
        return {
            each.target.id
            for node in self.classes(module, name)
            for each in node.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and each.target.id[0] != "_"
            if "ClassVar" not in ast.unparse(each.annotation)
        }

    def methods(self, module: str, name: str) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
        """Return the methods of a class, the inherited ones too."""
        found: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = {}
        for node in self.classes(module, name):
            for each in node.body:
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.setdefault(each.name, each)
        return found

    def members(self, module: str, name: str) -> set[str]:
        """Return all public members: fields, methods, constants, and what the constructor stores."""
        found = {*self.fields(module, name), *self.methods(module, name)}
        for node in self.classes(module, name):
            for each in ast.walk(node):
                if isinstance(each, ast.Assign) and each in node.body:
                    found |= {target.id for target in each.targets if isinstance(target, ast.Name)}
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    found |= {
                        each.attr
                        for each in ast.walk(method)
                        if isinstance(each, ast.Attribute)
                        and isinstance(each.ctx, ast.Store)
                        and isinstance(each.value, ast.Name)
                        and each.value.id == "self"
                    }
        return {each for each in found if not each.startswith("_")}


def arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Return the names of a method's arguments but the first."""
    given = function.args
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]


def programs(folder: Path) -> Iterator[ast.Module]:
    """Yield the trees of the examples, and of the pieces of Python in the documentation."""
    for file in sorted((folder / "examples").rglob("*.py")):
        yield ast.parse(file.read_text())
    for page in sorted((folder / "README.md", *(folder / "docs").rglob("*.md"), *(folder / "examples").rglob("*.md"))):
        for code in re.findall(r"```(?:python|py)[^\n]*\n(.*?)```", page.read_text(), re.DOTALL):
            lines = code.splitlines()
            indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
            text = "\n".join(line[indent:] for line in lines)
            try:
                yield ast.parse(text)
            except SyntaxError:  # a piece that leaves something out; its imports are whole lines
                kept = re.findall(r"^(?:from|import) vllm[^\n(]*(?:\([^)]*\))?", text, re.MULTILINE)
                yield from (ast.parse(line) for line in kept)


def imports(trees: list[ast.Module], source: Source) -> dict[str, list[str]]:
    """Return the modules that programs import, with the names that they take out of them."""
    found: dict[str, set[str]] = defaultdict(set)
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                for each in node.names:
                    found[node.module or ""].add(each.name)
            elif isinstance(node, ast.Import):
                for each in node.names:
                    if each.name.split(".")[0] == "vllm":
                        found[each.name] |= set()
    listed = source.tree("vllm")
    for node in listed.body if listed else ():
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            found["vllm"] |= set(ast.literal_eval(node.value))
    for name, module in CLASSES.items():
        found[module].add(name)
    return {module: sorted(names) for module, names in sorted(found.items())}


def used(trees: list[ast.Module]) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Return the members, and the keywords by method, that programs use of objects of `CLASSES`.

    An object is a variable to which the program assigns a call of such a class, or of its ``from_...``. Keywords of the
    class itself are members; those of an engine are members of `EngineArgs`.
    """
    members: dict[str, set[str]] = defaultdict(set)
    keywords: dict[str, set[str]] = defaultdict(set)
    for tree in trees:
        nodes = list(ast.walk(tree))
        kinds: dict[str, str] = {}
        for node in nodes:
            if isinstance(node, ast.Assign) and (name := _class_of(node.value)):
                kinds |= {target.id: name for target in node.targets if isinstance(target, ast.Name)}
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in kinds:
                members[kinds[node.value.id]].add(node.attr)
            if not isinstance(node, ast.Call):
                continue
            given = {each.arg for each in node.keywords if each.arg}
            if isinstance(node.func, ast.Name) and (name := _class_of(node)):
                members["EngineArgs" if name in _WITH_CALLS else name] |= given
            elif isinstance(node.func, ast.Attribute) and (name := kinds.get(ast.unparse(node.func.value), "")):
                keywords[f"{name}.{node.func.attr}"] |= given
    return members, keywords


def _class_of(node: ast.expr) -> str | None:
    """Return the class of `CLASSES` that a call makes an object of, or None."""
    if not isinstance(node, ast.Call):
        return None
    called = node.func
    if isinstance(called, ast.Attribute) and called.attr.startswith("from_"):
        called = called.value
    name = {"AsyncLLMEngine": "AsyncLLM"}.get(ast.unparse(called), ast.unparse(called))
    return name if name in CLASSES else None


def flags(folder: Path, source: Source) -> dict[str, list[str]]:
    """Return the flags of the commands; those of an engine's settings count as of ``serve``."""
    found: dict[str, set[str]] = defaultdict(set)
    for command, files in _FILES_OF_FLAGS.items():
        for name in files:
            path = folder / "vllm" / name
            for file in sorted(path.rglob("*.py")) if path.is_dir() else [path] if path.is_file() else []:
                found[command] |= _added(ast.parse(file.read_text()))
    found["serve"] |= _added(source.tree("vllm.engine.arg_utils"))
    for name, module in _CLASSES_OF_FLAGS:
        found["serve"] |= {f"--{each.replace('_', '-')}" for each in source.fields(module, name)}
    found["run-batch"] |= {
        f"--{each.replace('_', '-')}" for each in source.fields(f"{ENTRY}.launchers.run_batch", "BatchFrontendArgs")
    }
    for command in found.keys() - {"serve"}:
        found[command] -= found["serve"]
    return {command: sorted(found[command]) for command in sorted(found)}


def _added(tree: ast.Module | None) -> set[str]:
    return {
        str(each.value)
        for node in (ast.walk(tree) if tree else ())
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument"
        for each in node.args
        if isinstance(each, ast.Constant) and str(each.value).startswith("-")
    }


def routes(folder: Path) -> list[str]:
    """Return the server's routes, each as its method and path."""
    found = set()
    for file in (folder / "vllm" / "entrypoints").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            for each in getattr(node, "decorator_list", ()):
                called = each.func if isinstance(each, ast.Call) else None
                path = each.args[0] if isinstance(each, ast.Call) and each.args else None
                if not (isinstance(called, ast.Attribute) and isinstance(path, ast.Constant)):
                    continue
                if called.attr in ("get", "post", "put", "delete", "websocket"):
                    found.add(f"{called.attr.upper()} {path.value!s}")
    return sorted(found)


def commands(folder: Path) -> list[str]:
    """Return the names of the commands."""
    found = set()
    for file in (folder / "vllm" / "entrypoints" / "cli").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            for each in node.body if isinstance(node, ast.ClassDef) else ():
                if not (isinstance(each, ast.Assign) and isinstance(each.value, ast.Constant)):
                    continue
                if ast.unparse(each.targets[0]) == "name":
                    name = str(each.value.value)
                    found.add(f"bench {name}" if file.parent.name == "benchmark" and name != "bench" else name)
    return sorted(found)


def names(folder: Path) -> dict[str, object]:
    """Return all names that the source in `folder` has, by their kind."""
    source, trees = Source(folder), list(programs(folder))
    using, keywords = used(trees)
    version = re.search(r"^Version: (\S+)", (folder / "PKG-INFO").read_text(), re.MULTILINE)
    members = {
        name: sorted(source.members(module, name) | {each for each in using[name] if each[0] != "_"})
        for name, module in CLASSES.items()
    }
    called = {
        f"{name}.{method}": sorted({*arguments(function), *keywords[f"{name}.{method}"]})
        for name in _WITH_CALLS
        for method, function in sorted(source.methods(CLASSES[name], name).items())
        if not method.startswith("_") and arguments(function)
    }
    return {
        "version": version[1] if version else None,
        "imports": imports(trees, source),
        "members": members,
        "arguments": called,
        "commands": commands(folder),
        "flags": flags(folder, source),
        "routes": routes(folder),
        "fields": {route: sorted(source.fields(module, name)) for route, (name, module) in BODIES.items()},
    }


def main() -> None:
    """Print the names, or write them to `PLACE`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    lines = json.dumps(names(given.folder), indent=1)
    text = re.sub(r"\[\s+([^][]*?)\s+\]", lambda found: "[" + re.sub(r"\s+", " ", found[1]) + "]", lines) + "\n"
    if given.write:
        PLACE.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
