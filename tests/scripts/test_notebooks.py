"""The notebooks of scripts/colab: in step with their scripts, and each runs from its first cell to its last.

They run on small parameters, in kernels of their own, with the demo model; the nightly tests run them as they are. No
cell may write to standard error, warn, or show a figure with a fault that `figure_checks` finds.
"""

from __future__ import annotations

import asyncio
import importlib.util
import re
import resource
import warnings
from functools import partial
from pathlib import Path

import figure_checks
import jupytext
import nbformat
import pytest
from matplotlib.figure import Figure
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[2] / "scripts" / "colab"
SMALL = {
    "1_first_answers": {"MAX_TOKENS": 12, "MAX_NUM_SEQS": 4, "STORY_TOKENS": 400},
    "2_sharing": {"MAX_TOKENS": 20, "BEAM_TOKENS": 8},
    "3_jenga": {"OUTPUT_TOKENS": 24, "REQUESTS": 6},
    "4_serving": {"MAX_TOKENS": 8, "VISITORS": 4},
    "5_grpo": {"STEPS": 2, "PROMPTS": 2, "SAMPLES": 2},
    "6_first_run": {"MINUTES": 5},
    "7_reader": {"STEPS": 8, "NUMBERS": 4},
}
"""Parameters for a commit's tests; the story is long, so that it can be interrupted."""

WATCH = f"import sys; sys.path.append({str(Path(__file__).parent)!r}); import figure_checks; figure_checks.watch()"
"""A cell that has every figure checked before it is shown."""
SECONDS = 300
"""Seconds of two processors that a notebook may take."""

SCRIPTS = sorted(FOLDER.glob("[0-9]_*.py"))
NAMES = [script.stem for script in SCRIPTS]
ADDRESS = "https://github.com/some-one/paged"


@pytest.fixture(autouse=True)
def checkout(monkeypatch):
    """Say where the notebooks' jpaged is, as their folder is none of the repository."""
    monkeypatch.setenv("JPAGED_SOURCE", str(FOLDER.parents[1]))


@pytest.fixture(scope="module")
def sync():
    spec = importlib.util.spec_from_file_location("sync_notebooks", FOLDER / "sync.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def tagged(cell: nbformat.NotebookNode, tag: str) -> bool:
    return tag in cell.metadata.get("tags", [])


def execute(notebook: nbformat.NotebookNode, small: dict[str, int], folder: Path) -> nbformat.NotebookNode:
    """Run all cells with `small` instead of the parameters of those names.

    The cell tagged ``interrupt`` is interrupted once it has said something. A cell that raises fails the test.
    """
    (place,) = [number for number, cell in enumerate(notebook.cells) if tagged(cell, "parameters")]
    given = set(re.findall(r"^([A-Z_]+) = ", notebook.cells[place].source, re.MULTILINE))
    assert set(small) <= given, f"{set(small) - given} are no parameters"
    lines = "\n".join(f"{name} = {value}" for name, value in small.items())
    notebook.cells.insert(place + 1, nbformat.v4.new_code_cell(lines))
    notebook.cells.insert(1, nbformat.v4.new_code_cell(WATCH))
    client = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}})

    async def run() -> None:
        async with client.async_setup_kernel():
            for number, cell in enumerate(notebook.cells):
                running = asyncio.ensure_future(client.async_execute_cell(cell, number))
                if tagged(cell, "interrupt"):
                    while not running.done() and not cell.outputs:
                        await asyncio.sleep(0.01)
                    assert not running.done(), "the cell ended before it could be interrupted"
                    await client.km.interrupt_kernel()
                await running

    asyncio.run(run())
    return notebook


def pictures(notebook: nbformat.NotebookNode) -> int:
    """Count the outputs that are images or drawings of the pool."""
    shown = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])]
    return sum("image/png" in data or "<svg" in str(data.get("text/html", "")) for data in shown)


def check_outputs(notebook: nbformat.NotebookNode) -> None:
    """Check that no cell warns or writes to standard error, and that nothing shown has an empty name."""
    for number, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", []):
            assert output.get("name") != "stderr", (number, output.text)
            assert "Warning" not in output.get("text", ""), (number, output.text)
            assert not NAMELESS.search(str(output.get("data", {}).get("text/html", ""))), number


NAMELESS = re.compile(r"<(\w+)[^>]*>\s*</\1>|(?:title|aria-label)=\"\s*\"|</span>\s*</td>")
"""An element of a drawing without a text, or a group without a name."""


def printed(notebook: nbformat.NotebookNode) -> str:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.get("text", "") for output in outputs if output.output_type == "stream")


def test_every_notebook_is_its_script(sync):
    assert [path.stem for path in sorted(FOLDER.glob("*.ipynb"))] == NAMES
    for script in sync.scripts():
        text = script.with_suffix(".ipynb").read_text(encoding="utf-8")
        assert text == sync.notebook(script, sync.repository()), f"run python scripts/colab/sync.py: {script.name}"


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_of_its_script_cell_by_cell(name, sync):
    """Read both by the libraries' own means, which do not depend on how `sync.py` writes them."""
    cells = [(cell.cell_type, cell.source) for cell in jupytext.read(FOLDER / f"{name}.py").cells]
    bare = nbformat.reads(sync.notebook(FOLDER / f"{name}.py", ""), as_version=4)
    assert [(cell.cell_type, cell.source) for cell in bare.cells] == cells
    assert [(cell.cell_type, cell.source) for cell in read(name).cells[2:]] == cells[2:]
    assert not any(cell.get("outputs") for cell in read(name).cells)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_has_a_badge_and_an_address_if_one_is_configured(name, sync):
    placed = nbformat.reads(sync.notebook(FOLDER / f"{name}.py", ADDRESS), as_version=4)
    first, install = (cell.source for cell in placed.cells[:2])
    assert f"/github/some-one/paged/blob/main/scripts/colab/{name}.ipynb" in first
    assert f'SOURCE = "{ADDRESS}"' in install and "JPAGED_SOURCE" in install
    bare = nbformat.reads(sync.notebook(FOLDER / f"{name}.py", ""), as_version=4)
    assert "colab.research" not in bare.cells[0].source and "github.com" not in str(bare)
    assert bare.cells[1].source == read_first_install(sync)


def read_first_install(sync) -> str:
    """The installing cell, which all notebooks share."""
    return nbformat.reads(sync.notebook(SCRIPTS[0], ""), as_version=4).cells[1].source


def test_the_address_is_that_of_pyproject(sync, tmp_path):
    def named(urls: str) -> str:
        (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "jpaged"\n{urls}')
        return sync.repository(tmp_path)

    assert named("") == ""
    assert named(f'urls = {{ Repository = "{ADDRESS}/" }}') == ADDRESS
    with pytest.raises(ValueError, match=r"'https://example\.com/x' in pyproject\.toml is not of the form"):
        named('urls = { Repository = "https://example.com/x" }')


@pytest.fixture
def installing(monkeypatch, tmp_path):
    """Return a function that runs an installing cell without jpaged, and returns the package that pip is to install."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.delenv("TPU_ACCELERATOR_TYPE", raising=False)
    monkeypatch.delenv("JPAGED_SOURCE")
    monkeypatch.chdir(tmp_path)

    def install(source: str, **variables: str) -> str:
        commands = []
        monkeypatch.setattr("subprocess.run", lambda command, **given: commands.append(command))
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        exec(source, {})
        ((*_, package),) = commands
        return package

    return install


def test_an_installed_package_is_not_installed_again(sync, monkeypatch):
    monkeypatch.setattr("subprocess.run", lambda *given, **more: pytest.fail("it is installed"))
    with warnings.catch_warnings(record=True) as seen:
        exec(read_first_install(sync), {})
        warnings.warn("IProgress not found. Please update jupyter", stacklevel=1)  # tqdm's
        warnings.warn('install "ipywidgets" for Jupyter support', stacklevel=1)  # rich's, at a download
    assert seen == []


def test_one_variable_says_where_to_install_from(sync, installing, tmp_path):
    """It may be written into the cell, be in the environment, come from pyproject.toml or be where the notebook is."""
    bare = read_first_install(sync)
    for wrong in ("", str(tmp_path / "gone.whl")):
        with pytest.raises(RuntimeError, match=rf"SOURCE='{wrong}': write an address, a checkout's folder or a wheel"):
            installing(bare.replace('SOURCE = ""', f'SOURCE = "{wrong}"'))
    placed = nbformat.reads(sync.notebook(SCRIPTS[0], ADDRESS), as_version=4).cells[1].source
    assert installing(placed) == f"jpaged[cpu,notebooks] @ git+{ADDRESS}"
    wheel = tmp_path / "jpaged-0-py3-none-any.whl"
    wheel.touch()
    for given in (wheel, tmp_path):
        assert installing(placed, JPAGED_SOURCE=str(given)) == f"jpaged[cpu,notebooks] @ {given.as_uri()}"
        written = bare.replace('SOURCE = ""', f'SOURCE = "{given}"')
        assert installing(written, JPAGED_SOURCE="") == f"jpaged[cpu,notebooks] @ {given.as_uri()}"


def test_a_checkout_around_the_notebook_is_found_and_goes_before_the_address(sync, installing, monkeypatch):
    placed = nbformat.reads(sync.notebook(SCRIPTS[0], ADDRESS), as_version=4).cells[1].source
    monkeypatch.chdir(FOLDER)
    assert installing(placed) == f"jpaged[cpu,notebooks] @ {FOLDER.parents[1].as_uri()}"
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert installing(placed).startswith("jpaged[cuda12,notebooks]")
    assert installing(placed, TPU_ACCELERATOR_TYPE="v5litepod-1").startswith("jpaged[tpu,notebooks]")


def test_a_tpu_is_known_by_its_device_too(sync, installing, monkeypatch):
    """Colab names it in a variable; a VM of v5e or v6e has its chips as groups of VFIO."""
    placed = nbformat.reads(sync.notebook(SCRIPTS[0], ADDRESS), as_version=4).cells[1].source
    for device in ("/dev/accel0", "/dev/vfio/0"):
        monkeypatch.setattr("os.path.exists", device.__eq__)
        assert installing(placed).startswith("jpaged[tpu,notebooks]")


def test_notebooks_read_no_other_variable():
    asked = {name for script in SCRIPTS for name in re.findall(r"environ\S*?[\[(]\"(\w+)\"", script.read_text())}
    assert asked == {"JPAGED_SOURCE"}


def used_blocks(notebook: nbformat.NotebookNode) -> list[list[int]]:
    """Return of each drawing of the pool the used blocks of each group."""
    shown = [
        output.get("data", {}).get("text/html", "") for cell in notebook.cells for output in cell.get("outputs", [])
    ]
    maps = [html for html in shown if "jpaged-memory-map" in html]
    return [[int(used) for used in re.findall(r"</span> [^<]*</td><td>(\d+)<", html)] for html in maps]


OFTEN = ("1_first_answers",)
RUN = [pytest.param(name, marks=() if name in OFTEN else pytest.mark.nightly) for name in NAMES]
"""The others come at night: each takes half a minute of CPU time."""


@pytest.mark.parametrize("name", RUN)
def test_a_notebook_runs_and_draws(name, tmp_path):
    done = execute(read(name), SMALL[name], tmp_path)
    check_outputs(done)
    assert pictures(done) >= 1
    if name == "2_sharing":
        assert "Alone, each with its own copy" in printed(done) and pictures(done) == 5
    if name == "3_jenga":
        assert pictures(done) == 4  # what is held, the waste, the pool, what it buys
        assert all(used > 0 for used in used_blocks(done)[0])
    if name == "6_first_run":
        assert "trial on a CPU" in printed(done) and "FAILED" not in printed(done) and "WRONG" not in printed(done)
    if name == "1_first_answers":
        (at_work,), (afterwards,) = used_blocks(done)
        assert at_work >= 3 and afterwards == 0, "the first map is of the stories, the second of the time after them"
        assert "(stopped)" in printed(done) and "Paris" in printed(done).rpartition("(stopped)")[2]


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_as_it_is_in_five_minutes_of_two_processors(name, tmp_path):
    before = processor_seconds()
    done = execute(read(name), {"STORY_TOKENS": 400} if name == "1_first_answers" else {}, tmp_path)
    assert processor_seconds() - before < 2 * SECONDS
    check_outputs(done)
    assert pictures(done) >= 1


def processor_seconds() -> float:
    """Return the seconds of processors that ended children took, which a busy machine does not lengthen."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_a_figure_is_checked_for_texts_that_collide_and_entries_without_names():
    def drawn(**names):
        figure = Figure(figsize=(4, 3), layout="constrained")
        axes = figure.subplots()
        bars = axes.bar(["one", "two"], [1, 2], label=names.pop("legend", "bars"))
        axes.margins(y=names.pop("margin", 0.2))
        axes.bar_label(bars)
        axes.set(**{"title": "Bars", "ylabel": "height"} | names)
        axes.legend(loc="upper left")
        return figure

    assert figure_checks.faults(drawn()) == []
    assert figure_checks.faults(drawn(margin=0.01)) == ["'2' crosses the frame"]
    assert "a legend's entry has no text" in figure_checks.faults(drawn(legend=" "))
    assert "a tick has no text" in figure_checks.faults(drawn(xticks=[0, 1], xticklabels=["one", ""]))
    assert "each of title and axes has no text" in figure_checks.faults(drawn(title="", ylabel=""))
    crowded = figure_checks.faults(drawn(xticks=[0, 0.02], xticklabels=["one", "two"]))
    assert crowded == ["'one' and 'two' overlap"]


def test_an_output_with_a_warning_or_an_empty_name_is_found():
    def of(*outputs):
        return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(outputs=list(outputs))])

    stream, shown = partial(nbformat.v4.new_output, "stream"), partial(nbformat.v4.new_output, "display_data")
    check_outputs(of(stream(text="all is well"), shown({"text/html": "<td><span>x</span> full</td>"})))
    for bad in (
        stream(name="stderr", text="anything"),
        stream(text="UserWarning: old"),
        shown({"text/html": "<th></th>"}),
        shown({"text/html": "<td><span>x</span> </td>"}),
    ):
        with pytest.raises(AssertionError):
            check_outputs(of(bad))
