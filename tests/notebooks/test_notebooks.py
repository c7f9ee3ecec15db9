"""The notebooks run from top to bottom, show what they say, and define no algorithm."""

import ast
import base64
import importlib.util
import json
import pathlib
import re
import runpy
import struct
import subprocess
import sys
import types
import zipfile

import nbformat
import pytest

from notebooks import environment, execute
from tfdpsq.run import pipeline

ROOT = pathlib.Path(__file__).resolve().parents[2]
NAMES = ("1_pairs", "2_finetune", "3_synthesize", "4_retrieve", "5_evaluate")
MOST_BYTES = 300_000
# What a machine, and not the work, says of itself.
OF_A_MACHINE = re.compile(r"/(root|home|Users|content)/|\.local/|0x[0-9a-f]{6,}")


# -- What the checks are made of: functions of a notebook ------------------------


def code_cells(notebook):
    """The sources of the code cells."""
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def definitions(source):
    """Lists what a cell defines: functions, classes, lambdas, however deep."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
    return [
        f"line {node.lineno}: {ast.unparse(node)[:60]}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, kinds)
    ]


def output_problems(notebook):
    """Lists what the outputs lack, or should not hold."""
    problems = []
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    counts = [cell.execution_count for cell in cells]
    if counts != list(range(1, len(cells) + 1)):
        problems.append(f"executed in the order {counts}")
    for number, cell in enumerate(cells, 1):
        for output in cell.outputs:
            if output.output_type == "error" or output.get("name") == "stderr":
                problems.append(f"cell {number}: {json.dumps(output)[:200]}")
            if OF_A_MACHINE.search(_text(output)):
                found = OF_A_MACHINE.search(_text(output)).group()
                problems.append(f"cell {number} names a place of a machine: {found}")
        if "plt.show()" in cell.source and not pictures(cell):
            problems.append(f"cell {number} shows no plot")
    return problems


def pictures(cell):
    """The PNG images that a cell has shown, as bytes."""
    return [
        base64.b64decode(output.data["image/png"])
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    ]


def _text(output):
    data = {k: v for k, v in output.get("data", {}).items() if k != "image/png"}
    return json.dumps([output.get("text", ""), data], ensure_ascii=False)


def test_the_small_job_of_the_notebooks_begins(tmp_path):
    found = runpy.run_path(str(ROOT / "configs" / "notebooks.py"))
    pipeline.open_job(found["get_config"]("small"), tmp_path / "work")


# -- The checks, on the notebooks as they are committed --------------------------


@pytest.fixture(scope="module")
def notebooks():
    return {
        path.stem: nbformat.read(path, as_version=nbformat.NO_CONVERT)
        for path in execute.paths()
    }


def test_there_are_five_and_all_are_valid(notebooks):
    assert tuple(notebooks) == NAMES
    for notebook in notebooks.values():
        nbformat.validate(notebook)


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_committed_and_tell_nothing_of_the_machine(notebooks, name):
    assert output_problems(notebooks[name]) == []
    path = ROOT / "notebooks" / f"{name}.ipynb"
    assert path.stat().st_size < MOST_BYTES


@pytest.mark.parametrize("name", NAMES)
def test_plots_are_of_a_size_that_can_be_read(notebooks, name):
    shown = [
        p for cell in notebooks[name].cells if "outputs" in cell for p in pictures(cell)
    ]

    assert shown
    for image in shown:
        assert image[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = struct.unpack(">II", image[16:24])
        assert 350 <= width <= 1200 and 180 <= height <= 600


@pytest.mark.parametrize("name", NAMES)
def test_they_import_and_plot_and_define_nothing(notebooks, name):
    found = [d for source in code_cells(notebooks[name]) for d in definitions(source)]

    assert found == []


def test_every_import_of_ours_is_of_a_public_name(notebooks):
    for name, notebook in notebooks.items():
        source = "\n".join(code_cells(notebook))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Attribute):
                assert not node.attr.startswith("_"), f"{name}: {ast.unparse(node)}"
            if isinstance(node, ast.ImportFrom):
                assert not any(alias.name[0] == "_" for alias in node.names), name


def test_all_begin_with_the_same_two_cells_but_for_their_imports(notebooks):
    first = {code_cells(notebook)[0] for notebook in notebooks.values()}
    second = {
        tuple(
            line
            for line in code_cells(notebook)[1].splitlines()
            if line and not line.startswith(("import ", "from "))
        )
        for notebook in notebooks.values()
    }

    assert len(first) == len(second) == 1
    for notebook in notebooks.values():
        kinds = [cell.cell_type for cell in notebook.cells[:3]]
        assert kinds == ["markdown", "code", "code"]
        assert "**Time:**" in notebook.cells[0].source
        assert "**Colab:**" in notebook.cells[0].source


def test_sources_are_formatted_and_linted():
    ruff = [sys.executable, "-m", "ruff"]
    options = ["--line-length", "88", "--target-version", "py39", "notebooks"]
    for command in (["format", "--check"], ["check", "--select", "E,F,I,B,UP"]):
        done = subprocess.run(
            [*ruff, *command, *options],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout


# -- The first cell ---------------------------------------------------------------


@pytest.fixture
def first_cell(notebooks, monkeypatch, tmp_path):
    """Runs the first cell somewhere; returns its names, and the commands it ran."""

    def run(where, source=""):
        commands = []

        def record(command, check):
            assert check
            commands.append(command)
            if command[0] == "git":
                _checkout(tmp_path / command[-1])

        monkeypatch.setattr(subprocess, "run", record)
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        monkeypatch.setenv("TFDPSQ_SOURCE", source)
        monkeypatch.chdir(where)
        names = {}
        exec(code_cells(notebooks["1_pairs"])[0], names)
        return names, commands

    return run


_PIP = [sys.executable, "-m", "pip", "install", "-q", "pandas", "matplotlib"]


def _checkout(directory):
    (directory / "configs").mkdir(parents=True)
    (directory / "configs" / "notebooks.py").touch()


def test_in_a_checkout_the_first_cell_uses_it(first_cell):
    names, commands = first_cell(ROOT / "notebooks")

    assert commands == [_PIP]
    assert names["CHECKOUT"] == ROOT
    assert sys.path[:2] == [str(ROOT), str(ROOT / "notebooks")]


def test_from_a_git_address_it_clones_once(first_cell, tmp_path):
    address = "https://example.org/tfdpsq.git"

    names, commands = first_cell(tmp_path, address)

    assert commands == [["git", "clone", "-q", address, "tfdpsq"], _PIP]
    assert names["CHECKOUT"] == tmp_path / "tfdpsq"
    assert first_cell(tmp_path, address)[1] == [_PIP]


@pytest.mark.parametrize("inside", ["", "tfdpsq-main/"])
def test_an_uploaded_archive_is_unpacked(first_cell, tmp_path, inside):
    with zipfile.ZipFile(tmp_path / "upload.zip", "w") as archive:
        archive.writestr(f"{inside}configs/notebooks.py", "")

    names, commands = first_cell(tmp_path, "upload.zip")

    assert names["CHECKOUT"] == tmp_path / "tfdpsq" / inside.rstrip("/")
    assert commands == [_PIP]


def test_without_a_checkout_the_first_cell_says_what_to_do(first_cell, tmp_path):
    with pytest.raises(FileNotFoundError, match="Set SOURCE to the address"):
        first_cell(tmp_path)


# -- The environment of the stages ------------------------------------------------


@pytest.fixture
def commands(monkeypatch, tmp_path):
    """Commands that `environment` runs; uv is there and makes what it is asked for."""
    ran = []

    def record(command, **options):
        ran.append(list(command))
        if command[1] == "venv":
            (pathlib.Path(command[-1]) / "bin").mkdir(parents=True)
            (pathlib.Path(command[-1]) / "bin" / "python").touch()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(environment.subprocess, "run", record)
    monkeypatch.setattr(environment.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TFDPSQ_PYTHON", raising=False)
    checkout = tmp_path / "checkout"
    (checkout / "tfdpsq").mkdir(parents=True)
    (checkout / "constraints.txt").write_text("numpy==1")
    (checkout / "tfdpsq" / "code.py").write_text("x = 1")
    return ran, checkout


def test_an_environment_is_made_once_and_again_for_other_code(commands):
    ran, checkout = commands
    python = environment.make(checkout)
    venv, install = ran
    assert venv[:5] == ["/bin/uv", "venv", "--quiet", "--python", "3.11"]
    assert install[-3:] == ["-c", f"{checkout}/constraints.txt", f"{checkout}[stack]"]
    assert install[install.index("--python") + 1] == python
    assert environment.make(checkout) == python and len(ran) == 2
    (checkout / "tfdpsq" / "code.py").write_text("x = 2")
    environment.make(checkout)
    assert [command[1] for command in ran[2:]] == ["pip"]


def test_without_a_network_it_says_what_to_do(commands, monkeypatch):
    ran, checkout = commands

    def fail(command, **options):
        return subprocess.CompletedProcess(command, 1, "", "error: no route to host")

    monkeypatch.setattr(environment.subprocess, "run", fail)
    with pytest.raises(RuntimeError, match="no route to host. It needs a network once"):
        environment.make(checkout)
    monkeypatch.setenv("TFDPSQ_PYTHON", "/some/python")
    assert environment.make(checkout) == "/some/python"


def test_a_command_that_fails_is_named():
    environment.run(sys.executable, "-c", "pass")
    with pytest.raises(RuntimeError, match="ended with exit status 3"):
        environment.run(sys.executable, "-c", "raise SystemExit(3)")


def test_knobs_are_lists_that_show_what_is_picked(monkeypatch):
    """The library's calls are recorded: nobody can pick in a test."""
    monkeypatch.setitem(sys.modules, "ipywidgets", None)  # not installed
    assert not environment.knobs(print, sep=["a"])
    shown = {}
    library = types.SimpleNamespace(
        Dropdown=lambda options, description: (description, options),
        interact=lambda show, **lists: shown.update({show: lists}),
    )
    monkeypatch.setitem(sys.modules, "ipywidgets", library)
    assert environment.knobs(print, sep=[("comma", ",")], end=(1, 2))
    assert shown == {print: {"sep": ("sep", [("comma", ",")]), "end": ("end", [1, 2])}}


# -- They run ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Executes a notebook at the small scale, in a directory that all of them share."""
    directory = tmp_path_factory.mktemp("notebooks") / "work"
    environment = {
        "PYTHONPATH": str(ROOT),
        "TFDPSQ_NOTEBOOK_DIR": str(directory),
        "TFDPSQ_NOTEBOOK_SCALE": "small",
        "TFDPSQ_PYTHON": sys.executable,
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }

    def of(name):
        path = ROOT / "notebooks" / f"{name}.ipynb"
        before = path.read_bytes()
        notebook = execute.execute(path, environment)
        assert path.read_bytes() == before
        # Of all places of a machine, only the directory of this test may stand there.
        for cell in notebook.cells:
            for output in cell.get("outputs", []):
                if "text" in output:
                    output["text"] = output["text"].replace(str(directory), "WORK")
        assert output_problems(notebook) == []
        return notebook, directory

    return of


def _printed(notebook):
    return "".join(
        output.get("text", "")
        for cell in notebook.cells
        for output in cell.get("outputs", [])
    )


@pytest.mark.slow
def test_the_first_notebook_runs_in_this_interpreter(run):
    notebook, directory = run("1_pairs")

    assert re.search(r"\d+ public documents", _printed(notebook))
    assert (directory / "release" / "prepare" / "stage.json").is_file()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_others_run_one_after_the_other_and_share_every_stage(run):
    made = {}
    for name in NAMES[1:]:
        notebook, directory = run(name)
        for path, before in made.items():
            assert path.read_bytes() == before, f"{name} made {path} again"
        made = {p: p.read_bytes() for p in directory.glob("*/*/stage.json")}
        printed = _printed(notebook)
        if name == "2_finetune":
            assert "holds: it agrees with itself and with the ledger" in printed
            assert "guarantee.epsilon is 1.0, but what was run gives" in printed
    assert (directory / "private" / "audit_eps8" / "audit.json").is_file()


# -- Each check can fail: small planted violations --------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "def f(): pass",
        "class A: pass",
        "f = lambda x: x",
        "if True:\n    def f(): pass",
    ],
)
def test_a_definition_is_found(source):
    assert len(definitions(source)) == 1
    assert definitions("x = [y for y in range(3)]\nfor z in x:\n    print(z)") == []


def test_progress_bars_are_left_out_of_outputs_and_nothing_else():
    bars = (
        "embeddings: 0text [00:00, ?text/s]\rembeddings: 64text [00:01, 51.2text/s]\n"
        "generator:  50%|##   | 1/2 [00:03<00:03,  3.1s/step, loss=4.2]\n"
    )

    assert execute.without_progress(bars) == ""
    assert execute.without_progress(bars + "W1122 [1, 2] odd\n") == "W1122 [1, 2] odd"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"execution_count": 3}, "executed in the order"),
        ({"outputs": []}, "shows no plot"),
        ({"text": "/home/someone/x"}, "names a place of a machine"),
        ({"name": "stderr", "text": "W1122 04:18"}, "stderr"),
    ],
)
def test_outputs_that_are_wrong_are_found(notebooks, change, problem):
    notebook = nbformat.from_dict(json.loads(nbformat.writes(notebooks["1_pairs"])))
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if "outputs" in change:
        cell = next(cell for cell in cells if "plt.show()" in cell.source)
        cell.outputs = []
    elif "text" in change:
        stream = {"output_type": "stream", "name": "stdout", **change}
        cells[0].outputs.append(nbformat.from_dict(stream))
    else:
        cells[0].update(change)

    (found,) = output_problems(notebook)

    assert problem in found
