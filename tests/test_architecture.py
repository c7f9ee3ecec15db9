"""The project's shape: who imports whom, in the sources and in BUILD alike."""

import ast
import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = "tfdpsq"

# Whom each part may import, besides itself. `validation` stands for the modules
# that lie directly in tfdpsq/.
ARROWS = {
    "validation": set(),
    "data": {"validation"},
    "layers": {"validation"},
    "privacy": {"validation"},
    "generator": {"validation", "data", "layers"},
    "retriever": {"validation", "data", "layers"},
    "evaluation": {"validation"},
    "run": {
        "validation",
        "data",
        "layers",
        "privacy",
        "generator",
        "retriever",
        "evaluation",
    },
}
FOLDERS = sorted(set(ARROWS) - {"validation"})
# What each room of privacy/ may import of privacy/, besides itself.
PRIVACY_ROOMS = {
    "randomness": set(),
    "fast": {"terms"},
    "proof": {"accounting", "plan", "spec", "randomness"},
}
# Commands that run other commands; the estimates take a stage's and a pipeline's
# settings.
RUN_OTHERS = {"pipeline", "choose", "reproduce", "grid", "estimate", "estimate_job"}

# -- What the checks are made of: functions of source text ----------------------


def imports_of(source, module, is_folder=False, known=()):
    """Returns the dotted names that `module`'s source imports, wherever in it.

    `from a import b` gives `a.b` alone if that is a known module; else both `a`
    and `a.b`, since the text does not say which of them is one.
    """
    names = set()
    parts = module.split(".") if is_folder else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = parts[: len(parts) - node.level + 1]
                base = ".".join(above + ([base] if base else []))
            given = {f"{base}.{alias.name}" for alias in node.names}
            names |= given if given <= set(known) else given | {base}
    return names


def part_of(name):
    """Returns the key of ARROWS that a dotted name belongs to, or None."""
    pieces = name.split(".")
    if pieces[0] != PACKAGE or len(pieces) == 1:
        return None
    return pieces[1] if pieces[1] in FOLDERS else "validation"


def arrow_violations(sources):
    """Lists the imports that no arrow allows, of {module: source}."""
    problems = []
    for module, source in sorted(sources.items()):
        importer = part_of(module)
        for name in sorted(
            imports_of(source, module, module + "." in _prefix(sources))
        ):
            imported = part_of(name)
            if imported in (None, importer) or importer is None:
                continue
            if imported not in ARROWS[importer]:
                problems.append(f"{module} imports {name}: {importer} -> {imported}")
    return problems


def _prefix(sources):
    """Returns 'a.' for every folder 'a' among the modules of {module: source}."""
    return {name.rpartition(".")[0] + "." for name in sources}


def room_violations(sources):
    """Lists the imports within privacy/ that PRIVACY_ROOMS does not allow."""
    privacy = f"{PACKAGE}.privacy."
    problems = []
    for module, source in sorted(sources.items()):
        room = module.removeprefix(privacy).split(".")[0]
        if not module.startswith(privacy) or room not in PRIVACY_ROOMS:
            continue
        is_folder = module + "." in _prefix(sources)
        for name in sorted(imports_of(source, module, is_folder, sources)):
            target = name.removeprefix(privacy).split(".")[0]
            if name.startswith(privacy) and target not in {room, *PRIVACY_ROOMS[room]}:
                problems.append(f"{module} imports {name}")
    return problems


def configuration_violations(sources):
    """Lists modules outside run/ that see flags or ConfigDicts."""
    return [
        f"{module} imports {name}; only tfdpsq/run may"
        for module, source in sorted(sources.items())
        for name in sorted(imports_of(source, module))
        if (name + ".").startswith(("ml_collections.", "absl.flags.", "absl.app."))
        and part_of(module) != "run"
    ]


def command_violations(sources):
    """Lists imports of commands by helpers, and by commands that run no others.

    A command is a module directly in tfdpsq/run; helpers are in its folders.
    """
    run = f"{PACKAGE}.run."
    commands = {name for name in sources if name.count(".") == 2 and run in name}
    commands -= {name for name in commands if name + "." in _prefix(sources)}
    problems = []
    for module, source in sorted(sources.items()):
        if run not in module or module.removeprefix(run) in RUN_OTHERS:
            continue
        imported = imports_of(source, module, module + "." in _prefix(sources), sources)
        problems += [
            f"{module} imports the command {name}"
            for name in sorted(imported & commands - {module})
        ]
    return problems


def unstartable_commands(sources):
    """Lists modules directly in tfdpsq/run that cannot be started."""
    return [
        name
        for name, source in sorted(sources.items())
        if name.startswith(f"{PACKAGE}.run.")
        and name.count(".") == 2
        and name + "." not in _prefix(sources)
        and 'if __name__ == "__main__":' not in source
    ]


def cycles(sources):
    """Lists import cycles among modules, of {module: source}.

    Imports inside functions count too: a late import that breaks a cycle only
    hides it. A folder's `__init__` importing its modules is not an import of
    the folder by them, so those edges only matter if the modules import it back.
    """
    folders = _prefix(sources)
    graph = {
        module: {
            name
            for name in imports_of(source, module, module + "." in folders, sources)
            if name in sources and name != module
        }
        for module, source in sources.items()
    }
    found, done = [], set()

    def visit(module, path):
        if module in path:
            found.append(" -> ".join(path[path.index(module) :] + [module]))
        elif module not in done:
            for name in sorted(graph[module]):
                visit(name, path + [module])
            done.add(module)

    for module in sorted(graph):
        visit(module, [])
    return found


def build_deps(text):
    """Returns {name: set of dep names} of the py_library calls in a BUILD file."""
    libraries = {}
    for node in ast.parse(text).body:
        call = node.value if isinstance(node, ast.Expr) else None
        if not isinstance(call, ast.Call) or ast.unparse(call.func) != "py_library":
            continue
        arguments = {keyword.arg: keyword.value for keyword in call.keywords}
        deps = ast.literal_eval(arguments["deps"]) if "deps" in arguments else []
        name = ast.literal_eval(arguments["name"])
        libraries[name] = {dep.lstrip(":") for dep in deps}
    return libraries


def build_violations(text):
    """Lists where a BUILD file's deps differ from ARROWS."""
    libraries = build_deps(text)
    problems = []
    for name in sorted(set(libraries) | set(ARROWS)):
        stated, arrows = libraries.get(name), ARROWS.get(name)
        if stated != arrows:
            problems.append(f"{name}: BUILD has {stated}, the arrows are {arrows}")
    return problems


# -- The checks, on the project --------------------------------------------------


def _project_sources():
    sources = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        sources[".".join(parts)] = path.read_text(encoding="utf-8")
    return sources


def test_imports_follow_the_arrows():
    assert arrow_violations(_project_sources()) == []
    assert room_violations(_project_sources()) == []


def test_only_run_sees_flags_and_config_dicts():
    assert configuration_violations(_project_sources()) == []


def test_helpers_import_no_command_and_few_commands_run_others():
    assert command_violations(_project_sources()) == []


def test_what_is_directly_in_run_is_a_command():
    assert unstartable_commands(_project_sources()) == []


def test_no_import_cycles():
    assert cycles(_project_sources()) == []


def test_build_states_the_same_arrows():
    assert build_violations((ROOT / "BUILD").read_text()) == []


# -- Each check can fail: small planted violations -------------------------------


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("tfdpsq.data.files", "import tfdpsq.layers.t5"),
        ("tfdpsq.data.files", "from tfdpsq.run import pipeline"),
        ("tfdpsq.data.files", "from tfdpsq import run"),
        ("tfdpsq.data.files", "from ..run import pipeline"),
        ("tfdpsq.generator.model", "from tfdpsq.retriever.model import TwoTower"),
        ("tfdpsq.retriever.model", "def f():\n    import tfdpsq.generator.model"),
        ("tfdpsq.retriever.model", "from tfdpsq.privacy import Plan"),
        ("tfdpsq.evaluation.ranking.measures", "from tfdpsq.data import beir"),
        ("tfdpsq.privacy.plan", "from tfdpsq.layers import MaskedMeanPooling"),
        ("tfdpsq.validation", "import tfdpsq.data"),
    ],
)
def test_a_forbidden_import_is_found(module, source):
    assert len(arrow_violations({module: source})) >= 1


def test_allowed_imports_are_not_reported():
    assert (
        arrow_violations(
            {
                "tfdpsq.run.pipeline": "from tfdpsq import generator, validation",
                "tfdpsq.retriever.model": "import tfdpsq.data.files\nimport numpy",
                "tfdpsq.data": "from tfdpsq.data.files import f",
                "tfdpsq.data.files": "from . import beir\nfrom ..validation import g",
            }
        )
        == []
    )


def test_an_import_that_no_room_allows_is_found():
    sources = {
        "tfdpsq.privacy": "",
        "tfdpsq.privacy.plan": "from tfdpsq.privacy.proof import ledger",
        "tfdpsq.privacy.proof": "",
        "tfdpsq.privacy.proof.ledger": "from tfdpsq.privacy import plan, step",
        "tfdpsq.privacy.step": "",
    }

    assert room_violations(sources) == [
        "tfdpsq.privacy.proof.ledger imports tfdpsq.privacy.step"
    ]


@pytest.mark.parametrize(
    "source",
    [
        "import ml_collections",
        "from ml_collections import config_dict",
        "from absl import flags",
        "import absl.flags as f",
    ],
)
def test_a_flag_outside_run_is_found(source):
    assert configuration_violations({"tfdpsq.data.files": source}) != []
    assert configuration_violations({"tfdpsq.run.pipeline": source}) == []


def test_a_helper_that_imports_a_command_is_found():
    start = 'if __name__ == "__main__":\n    main()'
    sources = {
        "tfdpsq.run": "",
        "tfdpsq.run.core": "",
        "tfdpsq.run.core.workdir": "def f():\n    from tfdpsq.run import mine",
        "tfdpsq.run.mine": start,
        "tfdpsq.run.index": "from tfdpsq.run.mine import x\n" + start,
        "tfdpsq.run.pipeline": "from tfdpsq.run import mine\n" + start,
        "tfdpsq.run.rows": "",
    }

    assert command_violations(sources) == [
        "tfdpsq.run.core.workdir imports the command tfdpsq.run.mine",
        "tfdpsq.run.index imports the command tfdpsq.run.mine",
    ]
    assert unstartable_commands(sources) == ["tfdpsq.run.rows"]


def test_a_cycle_is_found_also_through_a_late_import():
    sources = {
        "tfdpsq.data.a": "import tfdpsq.data.b",
        "tfdpsq.data.b": "def f():\n    from tfdpsq.data import c",
        "tfdpsq.data.c": "from .a import x",
        "tfdpsq.data.d": "import tfdpsq.data.a",
    }

    # One cycle, told once: d leads into it and is not part of it.
    assert cycles(sources) == [
        "tfdpsq.data.a -> tfdpsq.data.b -> tfdpsq.data.c -> tfdpsq.data.a"
    ]
    del sources["tfdpsq.data.b"]
    assert cycles(sources) == []


def test_a_folder_that_lists_its_modules_is_no_cycle_until_one_needs_the_list():
    sources = {
        "tfdpsq.data": "from tfdpsq.data.a import f",
        "tfdpsq.data.a": "from tfdpsq.data import b",
        "tfdpsq.data.b": "",
    }
    assert cycles(sources) == []

    sources["tfdpsq.data.a"] = "from tfdpsq.data import Name"
    assert cycles(sources) == ["tfdpsq.data -> tfdpsq.data.a -> tfdpsq.data"]


def test_build_that_differs_from_the_arrows_is_found():
    text = (ROOT / "BUILD").read_text()
    planted = text.replace(
        'glob(["tfdpsq/privacy/**/*.py"]),\n    deps = [":validation"]',
        'glob(["tfdpsq/privacy/**/*.py"]),\n    deps = [":data", ":validation"]',
    )
    extra = text + textwrap.dedent("""
        py_library(
            name = "utils",
            deps = [":run"],
        )
    """)

    assert planted != text
    assert [p.split(":")[0] for p in build_violations(planted)] == ["privacy"]
    assert [p.split(":")[0] for p in build_violations(extra)] == ["utils"]


# -- Whichever is imported first ---------------------------------------------------

_EACH_FIRST = """
import importlib, pkgutil, sys
import tfdpsq.privacy
names = [m.name for m in pkgutil.walk_packages(
    tfdpsq.privacy.__path__, "tfdpsq.privacy.")]
for name in names:
    for known in [n for n in sys.modules if n.split(".")[0] == "tfdpsq"]:
        del sys.modules[known]
    importlib.import_module(name)
print(len(names))
"""


def test_any_module_of_privacy_can_be_the_first_that_is_imported():
    """Else two that need each other fail in the one program that begins with them."""
    path = os.pathsep.join(map(str, [ROOT, *sys.path]))
    child = subprocess.run(
        [sys.executable, "-c", _EACH_FIRST],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    assert int(child.stdout.splitlines()[-1]) > 40
