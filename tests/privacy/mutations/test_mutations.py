"""Seeds each trap of the catalogue into a copy of the code: the suite must fail.

Slow: every mutant's tests run in a process of their own. What the normal suite checks
is that the catalogue still fits the code.
"""

import ast
import concurrent.futures
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import xml.etree.ElementTree

import catalogue
import forked
import pytest

MUTATIONS = catalogue.mutations()
# How many mutants run at a time.
_WORKERS = 2
# How the failure of a test that looked begins; the last is `(one,) = found`.
_KILLED = (
    "AssertionError",
    "assert ",
    "Failed: DID NOT RAISE",
    "ValueError: not enough values to unpack",
)


# -- The catalogue fits the code -------------------------------------------------


def test_the_catalogue_has_what_was_asked_for_and_more():
    names = [mutation.name for mutation in MUTATIONS]
    assert len(set(names)) == len(names) >= 40
    assert set(catalogue.ASKED_FOR) <= set(names)
    assert len(set(catalogue.ASKED_FOR)) == 15


def test_every_part_of_the_guarantee_has_its_mistakes():
    """As many as a reader would think of at once; the whole list is longer."""
    counts = catalogue.counts()
    assert sum(counts.values()) == len(MUTATIONS) >= 150
    assert min(counts.values()) >= 3, counts
    for kind in ("sampling", "keys", "certificate", "composition", "resumes"):
        assert counts[kind] >= 10, counts


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_each_mistake_can_be_made_and_compiles(mutation):
    """Exactly once in its file: else the code has changed and the trap with it."""
    compile(mutation.applied(), mutation.file, "exec")


def test_each_test_that_is_named_exists_and_is_quick():
    for mutation in MUTATIONS:
        for test in mutation.tests:
            file, _, name = test.partition("::")
            function = _functions(file)[name.partition("[")[0]]
            decorators = {ast.unparse(node) for node in function.decorator_list}
            assert "pytest.mark.slow" not in decorators, test


def _functions(file):
    tree = ast.parse((catalogue.ROOT / file).read_text("utf-8"))
    return {node.name: node for node in tree.body if hasattr(node, "name")}


def test_a_mistake_that_no_longer_fits_is_told():
    mutation = catalogue.Mutation(
        name="none",
        kind="noise",
        file="tfdpsq/privacy/randomness/noise.py",
        old="this text stands nowhere",
        new="",
        tests=("tests/privacy/test_statistics.py::test_the_noise_is_gaussian",),
        why="none",
    )
    with pytest.raises(
        ValueError, match="stands 0 times in tfdpsq/privacy/randomness/noise.py"
    ):
        mutation.applied()


# -- The suite kills every mutant ------------------------------------------------


def _copy(directory):
    """The code and its tests, as they are now, without what tests do not need."""
    for folder in ("tfdpsq", "tests", "configs"):
        shutil.copytree(
            catalogue.ROOT / folder,
            directory / folder,
            ignore=shutil.ignore_patterns("__pycache__", "mutations", "benchmarks"),
        )
    shutil.copy(catalogue.ROOT / "setup.cfg", directory)
    return directory


def _run(server, directory, tests, *options):
    """Runs tests in a copy; returns pytest's status, its words, and what failed."""
    report = directory / "report.xml"
    status, said = server.run(
        directory,
        [
            *("-p", "no:cacheprovider", "--rootdir", str(directory)),
            *("-c", str(directory / "setup.cfg"), f"--junitxml={report}"),
            *options,
            *tests,
        ],
    )
    failures, errors = [], []
    if report.is_file():
        root = xml.etree.ElementTree.parse(report).getroot()
        failures = [node.get("message") or "" for node in root.iter("failure")]
        errors = [node.get("message") or "" for node in root.iter("error")]
    return status, said[-6000:], failures, errors


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """Name of a mutant to a future of what its tests said; only those asked for."""
    wanted = {
        item.callspec.params["mutation"].name
        for item in request.session.items
        if item.path == pathlib.Path(__file__) and "outcomes" in item.fixturenames
        if hasattr(item, "callspec")
    }
    servers = threading.local()
    started = []

    def start():
        servers.mine = forked.Server()
        started.append(servers.mine)

    def outcome(mutation):
        directory = _copy(tmp_path_factory.mktemp(mutation.name) / "copy")
        (directory / mutation.file).write_text(mutation.applied(), "utf-8")
        try:
            return _run(servers.mine, directory, mutation.tests, "--exitfirst")
        finally:
            shutil.rmtree(directory)

    pool = concurrent.futures.ThreadPoolExecutor(_WORKERS, initializer=start)
    yield {m.name: pool.submit(outcome, m) for m in MUTATIONS if m.name in wanted}
    pool.shutdown(cancel_futures=True)
    for server in started:
        server.close()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_tests_pass_where_no_mistake_is_made(tmp_path):
    tests = sorted({test for mutation in MUTATIONS for test in mutation.tests})
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", *tests],
        cwd=_copy(tmp_path / "copy"),
        env={**os.environ, "PYTHONPATH": str(tmp_path / "copy")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout[-4000:]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.xdist_group("mutants")  # each process that has one starts all
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_a_mutant_is_killed(mutation, outcomes):
    status, said, failures, errors = outcomes[mutation.name].result()
    assert status == 1, f"{mutation.name} lives on:\n{said}"
    # By a test that looked and saw, not by an import or a fixture that broke.
    assert failures and not errors, said
    assert any(message.startswith(_KILLED) for message in failures), failures
