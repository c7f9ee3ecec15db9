"""The notebooks run from top to bottom, and their committed outputs are clean."""

import importlib.util
import itertools
import json
import pathlib
import re
import subprocess
import sys

import nbformat
import pytest

from notebooks import environment, execute
from tfdpsq import data

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE, *NAMES = (path.stem for path in execute.paths())
MOST_BYTES = 300_000
# Places and addresses in memory, which say something about the machine.
OF_A_MACHINE = re.compile(r"/(root|home|Users|content)/|\.local/|0x[0-9a-f]{6,}")


def read(name):
    path = ROOT / "notebooks" / f"{name}.ipynb"
    return nbformat.read(path, as_version=nbformat.NO_CONVERT)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def check_outputs(notebook):
    """Requires outputs in order, without errors, and with a picture for each plot."""
    cells = code_cells(notebook)
    counts = [cell.execution_count for cell in cells]
    assert counts == list(range(1, len(cells) + 1))
    for cell in cells:
        pictures = 0
        for output in cell.outputs:
            assert output.output_type != "error" and output.get("name") != "stderr"
            data = dict(output.get("data", {}))
            pictures += data.pop("image/png", None) is not None
            text = json.dumps([output.get("text", ""), data], ensure_ascii=False)
            assert not OF_A_MACHINE.search(text)
        assert pictures or "plt.show()" not in cell.source


@pytest.mark.parametrize("name", [PAGE, *NAMES])
def test_committed_outputs_are_valid_and_do_not_name_the_machine(name):
    notebook = read(name)
    nbformat.validate(notebook)
    check_outputs(notebook)
    assert (ROOT / "notebooks" / f"{name}.ipynb").stat().st_size < MOST_BYTES


# -- The first cell ---------------------------------------------------------------


@pytest.fixture
def first_cell(monkeypatch, tmp_path):
    """Runs the first cell somewhere; returns its names, and the commands it ran."""

    def run(where, source=""):
        commands = []

        def record(command, check):
            assert check
            commands.append(command)
            if command[0] == "git":
                (tmp_path / command[-1] / "configs").mkdir(parents=True)
                (tmp_path / command[-1] / "configs" / "notebooks.py").touch()

        monkeypatch.setattr(subprocess, "run", record)
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        monkeypatch.setenv("TFDPSQ_SOURCE", source)
        monkeypatch.chdir(where)
        names = {}
        exec(code_cells(read(NAMES[0]))[0].source, names)
        return names["CHECKOUT"], commands

    return run


PIP = [sys.executable, "-m", "pip", "install", "-q", "pandas", "matplotlib"]


def test_first_cell_uses_the_checkout_or_clones_one(first_cell, tmp_path):
    assert first_cell(ROOT / "notebooks") == (ROOT, [PIP])
    assert sys.path[:2] == [str(ROOT), str(ROOT / "notebooks")]
    address = "https://example.org/tfdpsq.git"
    cloned = [["git", "clone", "-q", address, "tfdpsq"], PIP]
    assert first_cell(tmp_path, address) == (tmp_path / "tfdpsq", cloned)
    assert first_cell(tmp_path, address) == (tmp_path / "tfdpsq", [PIP])


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


def test_environment_is_made_once_and_again_for_other_code(commands):
    ran, checkout = commands
    python = environment.make(checkout)
    assert [command[1] for command in ran] == ["venv", "pip"]
    assert ran[1][-3:] == ["-c", f"{checkout}/constraints.txt", f"{checkout}[stack]"]
    assert environment.make(checkout) == python and len(ran) == 2
    (checkout / "tfdpsq" / "code.py").write_text("x = 2")
    environment.make(checkout)
    assert [command[1] for command in ran[2:]] == ["pip"]


def test_failing_commands_are_named():
    environment.run(sys.executable, "-c", "pass")
    with pytest.raises(RuntimeError, match="exit status 3"):
        environment.run(sys.executable, "-c", "raise SystemExit(3)")


def test_only_progress_bars_are_left_out_of_outputs():
    bars = (
        "embeddings: 0text [00:00, ?text/s]\rembeddings: 64text [00:01, 51.2text/s]\n"
        "generator:  50%|##   | 1/2 [00:03<00:03,  3.1s/step, loss=4.2]\n"
    )
    assert execute.without_progress(bars) == ""
    assert execute.without_progress(bars + "W1122 [1, 2] odd\n") == "W1122 [1, 2] odd"


# -- They run ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Executes a notebook at the small scale, in a directory that all of them share."""
    directory = tmp_path_factory.mktemp("notebooks") / "work"
    variables = {
        "PYTHONPATH": str(ROOT),
        "TFDPSQ_NOTEBOOK_DIR": str(directory),
        "TFDPSQ_NOTEBOOK_SCALE": "small",
        "TFDPSQ_PYTHON": sys.executable,
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }

    def of(name):
        notebook = execute.execute(ROOT / "notebooks" / f"{name}.ipynb", variables)
        printed = []
        # The directory of this test is the one place that may be named.
        for cell in code_cells(notebook):
            for output in cell.outputs:
                if "text" in output:
                    output["text"] = output["text"].replace(str(directory), "WORK")
                    printed.append(output["text"])
        check_outputs(notebook)
        return "".join(printed), directory

    return of


@pytest.mark.timeout(600)
def test_the_page_runs_and_readme_has_its_code(run, monkeypatch, tmp_path):
    """At a smaller size: on a corpus of 100 pairs."""
    code = "\n\n".join(cell.source for cell in code_cells(read(PAGE)))
    readme = (ROOT / "README.md").read_text("utf-8")
    assert re.sub("\n+", "\n", code) in re.sub("\n+", "\n", readme)
    pairs = list(itertools.islice(data.load("pydocs").pairs("train"), 100))
    documents = {pair.document_id: pair.document for pair in pairs}
    judged = [(pair.query_id, pair.document_id, 1) for pair in pairs]
    data.write_beir(
        tmp_path / "beir",
        [data.Document(name, "", text) for name, text in documents.items()],
        {pair.query_id: pair.query for pair in pairs}.items(),
        {"train": judged, "test": judged[:20]},
    )
    monkeypatch.setenv("TFDPSQ_CORPUS", str(tmp_path / "beir"))
    printed, _ = run(PAGE)
    assert len(re.findall(r"NDCG@10 [01]\.\d{4}", printed)) == 3


@pytest.mark.slow
def test_first_notebook_runs(run):
    printed, directory = run("1_pairs")
    assert re.search(r"\d+ public documents", printed)
    assert (directory / "release" / "prepare" / "stage.json").is_file()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_other_notebooks_run_in_order_and_share_every_stage(run):
    made = {}
    for name in NAMES[1:]:
        printed, directory = run(name)
        for path, before in made.items():
            assert path.read_bytes() == before, f"{name} made {path} again"
        made = {p: p.read_bytes() for p in directory.glob("*/*/stage.json")}
        if name == "2_finetune":
            assert "guarantee.epsilon is 1.0" in printed  # the edited certificate
    assert (directory / "private" / "audit_eps8" / "audit.json").is_file()
