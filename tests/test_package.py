"""The package as installed: light imports, and messages on stacks it cannot use."""

import configparser
import importlib.metadata
import os
import pathlib
import runpy
import shutil
import subprocess
import sys

import pytest

import tfdpsq

ROOT = pathlib.Path(__file__).resolve().parents[1]


def _run(python, code):
    return subprocess.run(
        [python, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def _check_stack():
    runpy.run_path(str(ROOT / "tfdpsq" / "stack.py"))


@pytest.mark.parametrize(
    "python, tensorflow, supported",
    [
        ((3, 8), "2.15.1", False),
        ((3, 9), "2.15.1", True),
        ((3, 11), "2.15.0", True),
        ((3, 12), "2.15.1", False),
        ((3, 11), "2.14.1", False),
        ((3, 11), "2.16.1", False),
        ((3, 11), None, False),
    ],
)
def test_other_stacks_are_told_what_to_install(
    monkeypatch, python, tensorflow, supported
):
    def found(name):
        if tensorflow is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return tensorflow

    monkeypatch.setattr(sys, "version_info", (*python, 1))
    monkeypatch.setattr(importlib.metadata, "version", found)
    if supported:
        _check_stack()
        return
    said = rf"this is Python {python[0]}\.{python[1]} with TensorFlow.*python3.11 -m"
    with pytest.raises(ImportError, match=said):
        _check_stack()


def test_without_tensorflow_the_engine_says_what_to_install():
    code = "import sys\nsys.modules['tensorflow'] = None\nimport tfdpsq.privacy"
    assert "'tfdpsq[privacy]'" in _run(sys.executable, code).stderr


def test_imports_are_light_and_set_nothing_global():
    """In one process: a library that several packages left out, none has imported."""
    result = _run(
        sys.executable,
        "import logging, os, sys, warnings\n"
        "def state():\n"
        "    return (dict(os.environ), list(warnings.filters),\n"
        "            list(logging.getLogger().handlers), sys.path[:])\n"
        "def left_out(*names):\n"
        "    assert not set(names) & set(sys.modules), set(names) & set(sys.modules)\n"
        "before = state()\n"
        "import tfdpsq\n"
        "assert state() == before\n"
        "left_out('tensorflow', 'numpy', 'keras', 'absl')\n"
        "import tfdpsq.run.stages.status\n"
        "left_out('tensorflow.python', 'dp_accounting.pld', 'scipy.stats')\n"
        "import tfdpsq.layers, tfdpsq.privacy, tfdpsq.evaluation\n"
        "left_out('tensorflow_recommenders', 'scann', 'tensorflow_datasets',\n"
        "         'apache_beam')\n"
        "import tfdpsq.data\n"
        "left_out('scann', 'apache_beam', 'tensorflow_recommenders')\n",
    )
    assert result.returncode == 0, result.stderr


def test_version_is_stated_once():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    assert parser["metadata"]["version"] == tfdpsq.__version__


def test_code_fingerprint_covers_every_folder(tmp_path, monkeypatch):
    from tfdpsq.privacy import code_fingerprint

    copy = tmp_path / "tfdpsq"
    ignored = shutil.ignore_patterns("__pycache__", "presets")
    shutil.copytree(ROOT / "tfdpsq", copy, ignore=ignored)
    original = code_fingerprint()
    monkeypatch.setattr(tfdpsq, "__file__", str(copy / "__init__.py"))
    assert code_fingerprint() == original
    for path in {path.parent: path for path in copy.rglob("*.py")}.values():
        before = path.read_bytes()
        path.write_bytes(before + b"#")
        assert code_fingerprint() != original, path
        path.write_bytes(before)


def test_every_deferred_name_is_what_its_module_has():
    """A package's `__init__` is read as text, so nothing else notices a wrong name."""
    from tfdpsq import data, evaluation, privacy

    for package in (data, evaluation, privacy):
        for name in package.__all__:
            assert name in dir(package)
            assert getattr(package, name) is not None
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            _ = package.nothing
