"""The first import: light, and on a version it cannot work on, helpful."""

import ast
import configparser
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from helpers import other_stacks

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


def _on_python(version):
    return _run(
        sys.executable,
        "import sys\n"
        "import collections\n"
        "info = collections.namedtuple('info', 'major minor micro')\n"
        f"sys.version_info = info{version}\n"
        "import tfdpsq.stack",
    )


def _on_tensorflow(version):
    found = (
        "raise metadata.PackageNotFoundError(name)"
        if version is None
        else f"return {version!r}"
    )
    return _run(
        sys.executable,
        "from importlib import metadata\n"
        "def version(name):\n"
        f"    {found}\n"
        "metadata.version = version\n"
        "import tfdpsq.stack",
    )


@pytest.mark.parametrize("version", [(3, 8, 18), (3, 12, 1), (4, 0, 0)])
def test_other_python_is_told_which_to_use_and_how(version):
    result = _on_python(version)

    assert result.returncode == 1
    assert "works on Python 3.9 to 3.11" in result.stderr
    assert f"this is Python {version[0]}.{version[1]}" in result.stderr
    assert "python3.11 -m venv .venv" in result.stderr
    assert ".venv/bin/pip install -c constraints.txt '.[stack]'" in result.stderr


@pytest.mark.parametrize("version", [(3, 9, 0), (3, 10, 13), (3, 11, 9)])
def test_supported_python_imports(version):
    result = _on_python(version)

    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("part", ["retriever", "run.pipeline"])
@pytest.mark.parametrize("name", ["python3.8", "python3.12", "python3.13"])
def test_the_message_reaches_a_real_unsupported_python(name, part):
    # A stand-in's version says nothing about whether the file parses there.
    python = other_stacks.find(name)
    if python is None:
        pytest.skip(f"no {name} on this machine")

    result = _run(python, f"import tfdpsq\nimport tfdpsq.{part}")

    assert result.returncode == 1
    assert "works on Python 3.9 to 3.11" in result.stderr
    assert "SyntaxError" not in result.stderr


@pytest.mark.parametrize("part", ["layers", "privacy"])
def test_what_works_on_any_stack_says_what_to_install_where_there_is_none(part):
    result = _run(
        sys.executable,
        f"import sys\nsys.modules['tensorflow'] = None\nimport tfdpsq.{part}",
    )

    assert result.returncode == 1
    assert "ImportError: tfdpsq.layers and tfdpsq.privacy need" in result.stderr
    assert f"pip install 'tfdpsq[{part}]'" in result.stderr


@pytest.mark.parametrize("version", ["2.14.1", "2.16.1", "2.21.0", "3.0.0"])
def test_other_tensorflow_is_told_what_to_install(version):
    result = _on_tensorflow(version)

    assert result.returncode == 1
    assert "works on TensorFlow 2.15" in result.stderr
    assert f"here is {version}" in result.stderr
    assert "pip install tensorflow==2.15.1 tensorflow-text==2.15.0" in result.stderr


def test_missing_tensorflow_is_told_what_to_install():
    result = _on_tensorflow(None)

    assert result.returncode == 1
    assert "needs TensorFlow 2.15" in result.stderr
    assert "pip install -c constraints.txt '.[stack]'" in result.stderr


@pytest.mark.parametrize("version", ["2.15.0", "2.15.1", "2.15.0.post1"])
def test_supported_tensorflow_imports(version):
    result = _on_tensorflow(version)

    assert result.returncode == 0, result.stderr


def test_every_package_checks_the_environment_before_anything_else():
    packages = sorted((ROOT / "tfdpsq").glob("*/__init__.py"))
    assert len(packages) == 7
    for path in packages:
        first = next(
            ast.unparse(node)
            for node in ast.parse(path.read_text("utf-8")).body
            if isinstance(node, (ast.Import, ast.ImportFrom))
        )
        # These two work on other stacks, and say what they lack as they import it.
        elsewhere = path.parent.name in ("layers", "privacy")
        assert (first == "import tfdpsq.stack") != elsewhere, path


def test_first_import_is_light_and_sets_nothing_global():
    result = _run(
        sys.executable,
        "import logging, os, sys, warnings\n"
        "def state():\n"
        "    return (dict(os.environ), list(warnings.filters),\n"
        "            list(logging.getLogger().handlers), sys.path[:])\n"
        "before = state()\n"
        "import tfdpsq\n"
        "assert state() == before\n"
        "heavy = {'tensorflow', 'numpy', 'keras', 'absl'} & set(sys.modules)\n"
        "assert not heavy, heavy",
    )

    assert result.returncode == 0, result.stderr


def _setup():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def _constraints():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    for pin in pins:
        assert re.fullmatch(r"[A-Za-z0-9_.\-]+==[A-Za-z0-9_.+!]+", pin), (
            f"constraints.txt: {pin!r} is not an exact version of a package"
        )
    return {_canonical(pin.split("==")[0]): pin.split("==")[1] for pin in pins}


def _canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def _requirements(text):
    """Returns (name, specifiers) of the requirements that hold on Python 3.11."""
    from packaging.requirements import Requirement

    lines = [line for line in text.splitlines() if line and line[0] != "#"]
    requirements = [Requirement(line) for line in lines]
    return [
        (_canonical(r.name), r.specifier)
        for r in requirements
        if r.marker is None or r.marker.evaluate({"python_version": "3.11"})
    ]


def test_version_is_stated_once_for_all():
    assert _setup()["metadata"]["version"] == tfdpsq.__version__


def test_the_eight_libraries_are_pinned_exactly():
    pinned = {
        name: str(specifiers)
        for name, specifiers in _requirements(
            _setup()["options.extras_require"]["stack"]
        )
        if str(specifiers).startswith("==")
    }

    # FACTS of the stack: the newest versions that work together.
    assert pinned == {
        "tensorflow": "==2.15.1",
        "tensorflow-text": "==2.15.0",
        "tensorflow-privacy": "==0.9.0",
        "keras-nlp": "==0.12.1",
        "tensorflow-datasets": "==4.9.10",
        "tensorflow-recommenders": "==0.7.7",
        "scann": "==1.3.0",
        "sacrebleu": "==2.6.0",
    }


def test_every_requirement_has_a_constraint_that_satisfies_it():
    setup, constraints = _setup(), _constraints()
    assert "install_requires" not in setup["options"]
    texts = list(setup["options.extras_require"].values())

    for text in texts:
        for name, specifiers in _requirements(text):
            assert name in constraints, f"constraints.txt lacks {name}"
            assert specifiers.contains(constraints[name]), (
                f"setup.cfg asks for {name}{specifiers}, constraints.txt has "
                f"{constraints[name]}"
            )


def test_nothing_names_a_package_index():
    for name in ("setup.cfg", "pyproject.toml", "constraints.txt", ".ci/run"):
        text = (ROOT / name).read_text()
        assert "index-url" not in text and "://" not in text, name


def test_the_fingerprint_of_the_code_covers_every_source(tmp_path, monkeypatch):
    """A file that moves into a folder of its own stays covered."""
    from tfdpsq.privacy import code_fingerprint

    copy = tmp_path / "tfdpsq"
    shutil.copytree(
        ROOT / "tfdpsq", copy, ignore=shutil.ignore_patterns("__pycache__", "presets")
    )
    original = code_fingerprint()
    monkeypatch.setattr(tfdpsq, "__file__", str(copy / "__init__.py"))
    assert code_fingerprint() == original
    sources = sorted(copy.rglob("*.py"))
    assert len(sources) > 200
    for path in {path.parent: path for path in sources}.values():  # one a folder
        before = path.read_bytes()
        path.write_bytes(before + b"#")
        path_changed = code_fingerprint() != original
        path.write_bytes(before)
        assert path_changed, path


@pytest.mark.parametrize("command", ["budget", "forget", "status", "verify"])
def test_what_needs_no_tensorflow_does_not_wait_for_it(command):
    code = f"import sys, tfdpsq.run.{command}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    loaded = set(done.stdout.split())
    assert f"tfdpsq.run.{command}" in loaded
    slow = {"tensorflow.python", "dp_accounting.pld", "scipy.stats", "keras_nlp"}
    assert not slow & loaded


def test_every_deferred_name_is_what_its_module_has():
    """A package's `__init__` is read as text, so nothing else notices a wrong name."""
    from tfdpsq import data, evaluation, privacy

    for package in (data, evaluation, privacy):
        for name in package.__all__:
            assert name in dir(package)
            assert getattr(package, name) is not None
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            _ = package.nothing


def test_a_deferred_module_is_the_module_once_it_is_used(tmp_path, monkeypatch):
    from tfdpsq import lazy

    (tmp_path / "slow_one").mkdir()
    (tmp_path / "slow_one" / "__init__.py").write_text("value = 3")
    (tmp_path / "slow_one" / "part.py").write_text("from slow_one import value")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "slow_one", raising=False)
    lazy.defer("slow_one")
    import slow_one
    import slow_one as again  # a second import reads its spec

    assert "value" not in vars(slow_one)
    import slow_one.part  # needs the package's path

    assert slow_one.part.value == again.value == 3
    assert sys.modules["slow_one"].value == 3
    lazy.defer("no_such_package")
    assert "no_such_package" not in sys.modules
