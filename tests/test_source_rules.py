"""Rules for every source file: lengths, its Python, what a folder may hold."""

import ast
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = "tfdpsq"
FOLDERS = (
    "data",
    "evaluation",
    "generator",
    "layers",
    "privacy",
    "retriever",
    "run",
)
# Most files have less than 400; no concept is split to please a number.
MAX_LINES = 600
# Of a function; its docstring and blank lines do not count.
MAX_FUNCTION_LINES = 80
# A table of all stages, in a function.
LONG_FUNCTIONS = {"tests/benchmarks/kill_stages.py": ["stages"]}
# What `forget` is for.
MAY_TELL_TO_DELETE = {"tfdpsq/run/forget.py"}
KERAS_METHODS = (
    "apply_gradients",
    "build",
    "call",
    "compute_mask",
    "compute_output_shape",
)

# Importing the left must not import the right, however indirectly.
HEAVY = ("tensorflow_recommenders", "scann", "tensorflow_datasets", "apache_beam")
LIGHT_IMPORTS = {
    "tfdpsq.layers": HEAVY,
    "tfdpsq.privacy": HEAVY,
    "tfdpsq.data": ("scann", "apache_beam", "tensorflow_recommenders"),
    "tfdpsq.evaluation": HEAVY,
}


# -- What the checks are made of: functions of source text ----------------------


def folder_init_violations(source):
    """Lists statements in a folder's `__init__` that it must not hold."""
    problems = []
    tree = ast.parse(source)
    if ast.get_docstring(tree) is None:
        problems.append("it has no docstring")
    for node in tree.body:
        is_all = isinstance(node, ast.Assign) and [
            ast.unparse(target) for target in node.targets
        ] == ["__all__"]
        is_docstring = isinstance(node, ast.Expr) and isinstance(
            node.value, ast.Constant
        )
        imports = [node]
        if isinstance(node, ast.If) and [ast.unparse(line) for line in node.orelse] == [
            "__getattr__, __dir__ = lazy.package(__name__)"
        ]:
            imports = node.body
        if not (
            is_all
            or is_docstring
            or all(isinstance(line, (ast.Import, ast.ImportFrom)) for line in imports)
        ):
            problems.append(f"line {node.lineno}: {ast.unparse(node)[:60]}")
    return problems


def old_python_violations(source):
    """Lists what the oldest supported Python, 3.9, cannot run.

    Syntax, `X | Y` in annotations that are evaluated, and two keyword arguments
    that came later and that a test on 3.11 would not notice.
    """
    try:
        tree = ast.parse(source, feature_version=(3, 9))
    except SyntaxError as error:
        return [f"line {error.lineno}: {error.msg}"]
    problems = []
    postponed = any(
        isinstance(node, ast.ImportFrom)
        and node.module == "__future__"
        and any(alias.name == "annotations" for alias in node.names)
        for node in tree.body
    )
    for node in ast.walk(tree):
        annotation = getattr(node, "annotation", None) or getattr(node, "returns", None)
        if isinstance(annotation, ast.AST) and not postponed:
            if any(isinstance(part, ast.BitOr) for part in ast.walk(annotation)):
                problems.append(
                    f"line {annotation.lineno}: {ast.unparse(annotation)} needs "
                    "`from __future__ import annotations`"
                )
        if isinstance(node, ast.Match):
            problems.append(f"line {node.lineno}: match statement")
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func).rpartition(".")[2]
            keywords = {keyword.arg for keyword in node.keywords}
            if called == "zip" and "strict" in keywords:
                problems.append(f"line {node.lineno}: zip(strict=)")
            if called == "dataclass" and keywords & {"slots", "kw_only"}:
                problems.append(f"line {node.lineno}: dataclass(slots= or kw_only=)")
            if called == "isinstance" and any(
                isinstance(arg, ast.BinOp) for arg in node.args[1:]
            ):
                problems.append(f"line {node.lineno}: isinstance(…, X | Y)")
    return problems


def long_functions(source):
    """Lists functions of more than MAX_FUNCTION_LINES lines."""
    lines, problems = source.splitlines(), []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        numbers = set(range(node.lineno, node.end_lineno + 1))
        if ast.get_docstring(node) is not None:
            numbers -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
        count = sum(1 for number in numbers if lines[number - 1].strip())
        if count > MAX_FUNCTION_LINES:
            problems.append(f"{node.name} has {count} lines")
    return problems


def untyped_violations(source):
    """Lists public functions and methods that leave out a type.

    Public is what no underscore says otherwise: names of the module, and of its
    public classes. `self`, `cls` and dunder methods, whose types Python fixes,
    are left alone, and so are the methods of Keras that we override, which take
    nested tensors and have no types there.
    """
    problems = []

    def visit(body, prefix, is_method):
        for node in body:
            if getattr(node, "name", "_").startswith("_"):
                continue
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.", True)
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            decorators = {ast.unparse(d) for d in node.decorator_list}
            if is_method and "staticmethod" not in decorators:
                arguments = arguments[1:]
            missing = [a.arg for a in arguments if a.annotation is None]
            missing += [] if node.returns else ["return"]
            if missing and not (is_method and node.name in KERAS_METHODS):
                problems.append(
                    f"line {node.lineno}: {prefix}{node.name} gives no type for "
                    + ", ".join(missing)
                )

    visit(ast.parse(source).body, "", False)
    return problems


# -- The checks, on the project --------------------------------------------------


def advice_to_delete(source):
    """Lists messages that tell to delete something.

    It may be somebody else's, or have cost budget that cannot be had back: say to move
    it away.
    """
    told = re.compile(r"\b[Dd]elete (?!the rest)(it|the|this|that|\{)")
    problems = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = (getattr(part, "value", "{}") for part in node.values)
            text = "".join(part if isinstance(part, str) else "{}" for part in parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if told.search(text):
            problems.append(f"line {node.lineno}: {text[:60]}")
    return problems


def _python_files():
    return [
        path
        for folder in (PACKAGE, "tests", "configs")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]


def test_every_folder_is_a_package_and_no_other_folder_exists():
    folders = sorted(
        path.name
        for path in (ROOT / PACKAGE).iterdir()
        if path.is_dir() and path.name != "__pycache__"
    )

    assert folders == list(FOLDERS)
    for folder in folders:
        assert (ROOT / PACKAGE / folder / "__init__.py").is_file(), folder


@pytest.mark.parametrize("folder", FOLDERS)
def test_folder_init_lists_public_names_and_nothing_else(folder):
    path = ROOT / PACKAGE / folder / "__init__.py"

    assert folder_init_violations(path.read_text(encoding="utf-8")) == []


def test_no_file_is_long():
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text("utf-8").splitlines())
        for path in _python_files()
    }

    assert {k: v for k, v in lengths.items() if v > MAX_LINES} == {}


def test_no_function_is_long():
    problems = {
        str(path.relative_to(ROOT)): long_functions(path.read_text("utf-8"))
        for path in _python_files()
    }
    names = {k: [line.split()[0] for line in v] for k, v in problems.items() if v}

    assert names == LONG_FUNCTIONS


def test_sources_run_on_the_oldest_supported_python():
    problems = {
        str(path.relative_to(ROOT)): old_python_violations(path.read_text("utf-8"))
        for path in _python_files()
    }

    assert {k: v for k, v in problems.items() if v} == {}


def test_public_functions_state_their_types():
    problems = {
        str(path.relative_to(ROOT)): untyped_violations(path.read_text("utf-8"))
        for path in _python_files()
        if path.is_relative_to(ROOT / PACKAGE)
    }

    assert {k: v for k, v in problems.items() if v} == {}


def test_no_message_tells_to_delete():
    problems = {
        str(path.relative_to(ROOT)): advice_to_delete(path.read_text("utf-8"))
        for path in _python_files()
        if path.is_relative_to(ROOT / PACKAGE)
    }

    assert {k for k, v in problems.items() if v} <= MAY_TELL_TO_DELETE


def _imported_by(*steps):
    """Returns which forbidden packages a fresh process has after each step.

    A step is (modules to import, forbidden packages); later ones go on from it.
    """
    code = "import sys\nfound = []\n" + "".join(
        f"import {', '.join(modules)}\n"
        f"found.append(','.join(n for n in {list(forbidden)!r} if n in sys.modules))\n"
        for modules, forbidden in steps
    )
    code += "print('|' + '|'.join(found))"
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout.strip().split("|")[-len(steps) :]


def test_importing_a_package_leaves_heavy_libraries_out():
    """In one process: what none of several packages has imported, no one has."""
    strictest_first = sorted(set(LIGHT_IMPORTS.values()), key=len, reverse=True)
    steps = [
        ([m for m, without in LIGHT_IMPORTS.items() if without == forbidden], forbidden)
        for forbidden in strictest_first
    ]
    assert _imported_by(*steps) == [""] * len(steps)


# -- Each check can fail: small planted violations -------------------------------


@pytest.mark.parametrize(
    "statement", ["x = 1", "def f(): pass", "if x: import y", "print(1)"]
)
def test_code_in_a_folder_init_is_found(statement):
    clean = '"""What."""\nfrom tfdpsq.data.files import f\n__all__ = ["f"]\n'

    assert folder_init_violations(clean) == []
    assert len(folder_init_violations(clean + statement)) == 1
    assert folder_init_violations("import os") == ["it has no docstring"]


@pytest.mark.parametrize(
    "source",
    [
        "def f(x: int | None): pass",
        "def f() -> int | None: pass",
        "x: int | None = None",
        "zip(a, b, strict=True)",
        "@dataclasses.dataclass(frozen=True, kw_only=True)\nclass A: pass",
        "match x:\n    case 1: pass",
        "isinstance(x, int | str)",
    ],
)
def test_what_python_3_9_cannot_run_is_found(source):
    assert len(old_python_violations(source)) == 1


def test_a_long_function_is_found():
    code = "    x = 1\n\n" * (MAX_FUNCTION_LINES - 1)
    source = 'def f():\n    """Does.\n\n    Much.\n    """\n' + code

    assert long_functions(source) == []
    assert long_functions(source + "    x = 2\n") == ["f has 81 lines"]


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("def f(x) -> int: pass", "f gives no type for x"),
        ("def f(x: int): pass", "f gives no type for return"),
        ("class A:\n    def g(self, *, y) -> int: pass", "A.g gives no type for y"),
    ],
)
def test_a_public_function_without_types_is_found(source, missing):
    (problem,) = untyped_violations(source)

    assert missing in problem
    private = source.replace("def f", "def _f").replace("class A", "class _A")
    assert untyped_violations(private) == []


@pytest.mark.parametrize("told", ["Delete it", "or delete {x} now", "delete the one"])
def test_advice_to_delete_is_found(told):
    assert len(advice_to_delete(f'raise E("no", f"is bad. {told}")')) >= 1
    assert advice_to_delete(f'raise E("{told.replace("elete", "o not move")}")') == []


def test_postponed_annotations_run_on_python_3_9():
    source = "from __future__ import annotations\ndef f(x: int | None): return x | 1"

    assert old_python_violations(source) == []


def test_a_heavy_import_is_found():
    # The standard library stands in: no package of ours may import it for this.
    steps = (["json"], ("json", "scann")), (["csv"], ("scann",)), (["csv"], ("csv",))
    assert _imported_by(*steps) == ["json", "", "csv"]
