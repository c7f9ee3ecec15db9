"""No stage writes past the rule of `releases`: what the sources say."""

import ast
import pathlib

import pytest

from tfdpsq.run.core import workdir

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_RUN = _ROOT / "tfdpsq" / "run"
# What writes files under `run/` by other means than `outputs`, and why it may: into a
# stage's temporary directory, or into a private one.
_WRITERS = {
    "core/outputs.py": "the rule itself",
    "core/records.py": "the certificate, in a stage's temporary directory",
    "core/workdir.py": "stage.json; config.json of a workdir that is not released",
    "core/sources.py": "the key, in the private directory",
    "core/point_log.py": "logs, in the private directory",
    "core/progress.py": "logs, in the private directory",
    "core/streams.py": "os.devnull in place of a closed stream",
    "training/private_training.py": "a run's config, in the private directory",
    "training/choice_points.py": "the plan of a grid, in the private directory",
    "training/hard_negatives.py": "in the temporary directory of `mine`",
    "training/pretraining_loop.py": "the state of a run on public documents",
    "passes/document_rates.py": "in the temporary directory of `histogram`",
    "passes/embedding.py": "a pass's shards",
    "passes/sharded_stages.py": "what is kept next to a pass's shards",
    "search/exported.py": "a search's config, in a stage's temporary directory",
    "search/retrieval.py": "a pass's shards",
    "reporting/data_card.py": "the card, in a stage's temporary directory",
    "estimation/rates.py": "made-up texts in a temporary directory",
    "audit.py": "in its temporary directory",
    "canaries.py": "in its temporary directory",
    "choose.py": "in the private directory",
    "convert.py": "in its temporary directory",
    "evaluate.py": "in its temporary directory",
    "filter.py": "in its temporary directory",
    "overlap.py": "in its temporary directory; a pass's shards",
    "pretrain.py": "in its temporary directory; the state of a run",
}
_WRITE = {
    "atomic_write",
    "atomic_file",
    "write_json",
    "write_text",
    "write_bytes",
    "GFile",
    "open",
}
_OPENED = ("w", "a", "x", "wb", "ab", "xb")


def _writes(path):
    """Calls that make files, in a source file."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        modes = [a.value for a in node.args if isinstance(a, ast.Constant)]
        if name in ("open", "GFile") and not any(m in _OPENED for m in modes):
            continue
        if name in _WRITE:
            yield ast.unparse(node)[:60]


def test_only_what_is_listed_writes_files_by_other_means():
    found = {
        path.relative_to(_RUN).as_posix()
        for path in sorted(_RUN.rglob("*.py"))
        if any(_writes(path))
    }
    assert found == set(_WRITERS)


def test_directories_are_published_by_the_rule_alone():
    users = {
        path.relative_to(_RUN).as_posix()
        for path in _RUN.rglob("*.py")
        if "atomic_directory" in path.read_text("utf-8")
    }
    assert users == {"core/outputs.py"}


def test_every_stage_gives_its_guarantee_where_it_runs():
    """`run_stage` takes an `Output`, which there is none of without a guarantee."""
    callers = {}
    for path in sorted(_RUN.rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            if ast.unparse(node.func).rpartition(".")[2] in ("run_stage", "filled"):
                first = ast.unparse(node.args[0])
                callers.setdefault(path.relative_to(_RUN).as_posix(), []).append(first)
    assert len(callers) >= 15
    for file, arguments in callers.items():
        for argument in arguments:
            known = ("output", "out", "made") if "zero" in file or "/" in file else ()
            assert (
                argument in ("output", "context.output", *known)
                or "Output(" in argument
            ), file
    with pytest.raises(AttributeError):
        workdir.run_stage(pathlib.Path("somewhere"), {}, {}, lambda out: None)
