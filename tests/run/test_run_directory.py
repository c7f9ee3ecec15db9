"""Runs and workdirs: what may go on where it was, and what is left when it ends."""

import contextvars
import json

import pytest

import tfdpsq
from tfdpsq.privacy import checkpoint
from tfdpsq.privacy.proof.ledger import FILE_NAME, Ledger
from tfdpsq.run import finetune, train_retriever
from tfdpsq.run.attacks import canary_set
from tfdpsq.run.core import releases, sources, workdir
from tfdpsq.run.training import context as contexts
from tfdpsq.run.training import direct_training, private_training
from tfdpsq.validation import InputError


def _open(directory, config=None, inputs=None, output="generator"):
    return private_training.open_run(
        directory,
        config or {"steps": 3},
        inputs or {"pairs": "keyed:a"},
        directory.parent / output,
    )


def _pay(directory, steps=1, data="data"):
    with Ledger(directory / FILE_NAME, "plan", data, 3) as ledger:
        for step in range(steps):
            ledger.pay(step)


def _begun(directory, paid=0):
    with _open(directory):
        pass
    rows = directory / checkpoint.STATE / "rows"
    rows.mkdir(parents=True)
    (rows / "queries.npy").write_text("of the first data")
    _pay(directory, paid)
    return rows


def _everything(directory):
    files = (path for path in directory.rglob("*") if path.is_file())
    return {path: path.read_bytes() for path in files}


# -- Runs ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "inputs"),
    [({"steps": 4}, {"pairs": "keyed:a"}), ({"steps": 3}, {"pairs": "keyed:b"})],
)
def test_paid_run_goes_on_with_its_settings_and_data_only(tmp_path, config, inputs):
    rows = _begun(tmp_path, paid=1)
    with pytest.raises(InputError, match="another config or other data"):
        _open(tmp_path, config, inputs).__enter__()
    assert rows.is_dir()
    with _open(tmp_path):
        assert rows.is_dir()


@pytest.mark.parametrize("left", [None, "{}"])
def test_paid_run_without_its_settings_is_refused(tmp_path, left):
    """Its rows were tokenised with those it began with."""
    rows = _begun(tmp_path, paid=1)
    path = tmp_path / private_training.RUN_FILE
    path.unlink() if left is None else path.write_text(left)
    with pytest.raises(InputError, match="Restore it"):
        _open(tmp_path).__enter__()
    assert rows.is_dir() and path.is_file() == (left is not None)


def test_state_without_its_ledger_is_not_a_run_that_paid_nothing(tmp_path):
    _begun(tmp_path, paid=1)
    checkpoint.save(tmp_path, 1, [], "run")
    (tmp_path / FILE_NAME).unlink()
    before = _everything(tmp_path)
    with pytest.raises(InputError, match="another config"):
        _open(tmp_path, {"steps": 4}).__enter__()
    assert _everything(tmp_path) == before


def test_unpaid_run_of_other_data_tokenises_them_anew(tmp_path):
    """It would train on the old rows, and its certificate name the new ones."""
    rows = _begun(tmp_path)
    with _open(tmp_path, inputs={"pairs": "keyed:b"}):
        pass
    assert not rows.exists()
    written = json.loads((tmp_path / private_training.RUN_FILE).read_text())
    assert written["inputs"] == {"pairs": "keyed:b"}


def test_lost_key_is_not_replaced_where_steps_are_paid(tmp_path):
    """With another one the same data would be called others, and the run be lost."""
    private = tmp_path / "private"
    run, key = private / "runs" / "generator", private / sources.KEY_FILE
    run.mkdir(parents=True)
    _pay(run, 0, "keyed:ab 3")
    sources.keyed_fingerprint("f", private)  # nothing is paid for yet
    key.unlink()
    _pay(run, 1, "keyed:ab 3")
    with pytest.raises(InputError, match="fingerprint.key"):
        sources.keyed_fingerprint("f", private)
    assert not key.exists()


def test_closed_run_leaves_its_ledger_and_no_seeds_or_rows(tmp_path):
    rows = _begun(tmp_path, paid=3)
    checkpoint.open_secrets(tmp_path, "run", 0, {})
    own = tmp_path / private_training.ROWS
    own.mkdir()
    (own / "queries.npy").write_text("tokens")
    private_training.close_run(tmp_path, tmp_path.parent / "generator")
    assert not rows.exists() and not own.exists()
    left = {path.name for path in tmp_path.rglob("*")}
    assert left == {FILE_NAME, private_training.RUN_FILE}


def test_second_process_is_refused_before_it_reads_or_deletes(tmp_path):
    """With another config it deleted the first one's seeds, which could not save.

    A lock is of an open file, so a second one in this process stands for the other's.
    """
    rows, run = _begun(tmp_path / "run"), tmp_path / "run"
    with _open(run), Ledger(run / FILE_NAME, "plan", "data", 3) as ledger:
        checkpoint.open_secrets(run, "run", 0, {})
        before = _everything(run)
        for config, output in (
            ({"steps": 4}, "release/generator"),
            (None, "generator"),
        ):
            with pytest.raises(InputError, match="in use by another process"):
                _open(run, config, output=output).__enter__()
        private_training.close_run(run, tmp_path / "generator")
        assert _everything(run) == before and rows.is_dir()
        ledger.pay(0)
    with _open(run):
        pass


def test_run_belongs_to_the_output_that_paid_for_it(tmp_path):
    """X/generator and X/release/generator have one run directory."""
    run = tmp_path / "work" / "private" / "runs" / "generator"
    first, second = "../../generator", "../../release/generator"
    with _open(run, output=second):
        pass
    with _open(run, output=first):  # nothing was paid: it may be taken over
        checkpoint.open_secrets(run, "run", 0, {})
        _pay(run)
    before = _everything(run)
    with pytest.raises(InputError, match="holds the run of .*/work/generator"):
        _open(run, output=second).__enter__()
    private_training.close_run(run, run.parent / second)
    assert _everything(run) == before
    # A moved workdir has its run.
    (tmp_path / "work").rename(tmp_path / "moved")
    run = tmp_path / "moved" / "private" / "runs" / "generator"
    with _open(run, output=first):
        pass
    private_training.close_run(run, run.parent / first)
    assert not checkpoint.is_open(run)


@pytest.mark.parametrize("stage", [finetune, train_retriever])
def test_what_is_set_is_what_is_accounted_and_drawn(stage):
    """One setting forgotten: secure=True would train with the ordinary generator."""
    config = stage.default_config()
    changed = {
        "epsilon": 3.0,
        "delta": 1e-5,
        "clip_norm": 0.25,
        "batch_size": 7,
        "steps": 5,
        "accountant": "rdp" if config.accountant == "pld" else "pld",
        "secure": True,
    }
    config.update(changed, epochs=0.0, n_is_public=True)
    units = private_training.Units(300, None, True)
    spec = private_training.spec_of(config, units)
    assert {name: getattr(spec, name) for name in changed} == changed
    assert (spec.num_units, spec.n_is_public) == (300, True)
    config.update(unit="user", rows_per_unit=3, n_is_public=False, n_bound=400)
    spec = private_training.spec_of(config, units)
    assert (spec.unit, spec.rows_per_unit) == ("user", 3)
    assert (spec.num_units, spec.n_is_public) == (400, False)
    if stage is train_retriever:
        config.update(method="naive", unit="query", rows_per_unit=1)
        spec = direct_training.make_plan(config, units).spec
    assert spec.secure is True and spec.batch_size == 7


def test_what_is_trained_on_canaries_is_never_certified(tmp_path):
    """Its canaries were planted to be found; ε is of the queries beside them."""
    pairs = tmp_path / "pairs"
    pairs.mkdir()

    def guarantee():
        return contexts.guarantee_of_training(str(pairs), "", None, True, True)

    assert guarantee() == releases.CERTIFIED
    (tmp_path / canary_set.CANARIES_FILE).write_text("{}\n")
    assert guarantee() == releases.PRIVATE


# -- Moved ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "moved"),
    [
        ("/old/job/release/prepare/v", "/new/release/prepare/v", True),
        ("/old/job/release/prepare/v", "/new/release/prepare/w", False),
        ("/old/data/v", "/data/v", True),  # beside the job, and moved with it
        ("/old/data/v", "/new/data/v", False),
        # No paths, though they look like some: prompts, patterns of weights.
        ("ask/write: ", "write: ", False),
        ("*decoder*/*/query", "*/query", False),
        (["/old/job/a", "*norm*"], ["/new/a"], False),  # lists that lost their tail
        (3, "/new/release/prepare/v", False),
    ],
)
def test_paths_are_compared_from_where_the_job_was_and_is(old, new, moved):
    found = {"x": old, "written_in": "/old/job/release/generator"}
    differ = workdir.differences(found, {"x": new}, "/new/release/generator")
    assert bool(differ) is not moved
    # Of a job that stayed where it was, texts are compared.
    assert workdir.differences(found, {"x": new}, "/old/job/release/generator")


def test_inputs_of_the_same_content_may_lie_elsewhere():
    """Paid steps are kept when tfdpsq is installed elsewhere, for one."""

    def made(path, fingerprint):
        return {"config": {"vocabulary": path}, "inputs": {"vocabulary": fingerprint}}

    first = made("/a/site-packages/tfdpsq/presets/t5/spiece.model", "f")
    assert not workdir.differences(first, made("/tmp/b/spiece.model", "f"))
    assert workdir.differences(first, made("/tmp/b/spiece.model", "g"))


def test_workdir_takes_its_own_config_only_and_moves_with_its_data(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    workdir.open_workdir(here / "work", {"data": str(here / "pairs")})
    here.rename(there)
    right = {"data": str(there / "pairs")}
    path = workdir.open_workdir(there / "work", right) / workdir.CONFIG_FILE
    written = path.read_text()
    # A mistyped path does not replace the right one.
    with pytest.raises(InputError, match="another config"):
        workdir.open_workdir(there / "work", {"data": str(tmp_path / "pairs")})
    assert path.read_text() == written
    workdir.open_workdir(there / "work", right)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file"):
        workdir.open_workdir(tmp_path / "file" / "work", right)


def test_one_job_at_a_time_is_in_a_workdir(tmp_path):
    """Its config may not be replaced while it is about to pay."""
    work = tmp_path / "work"
    with workdir.alone():
        workdir.open_workdir(work, {"steps": 3})
        other = contextvars.Context()  # as in another process
        with pytest.raises(InputError, match="in use by another job"):
            other.run(workdir.alone()(workdir.open_workdir), work, {"steps": 3})
        workdir.open_workdir(work, {"steps": 3})
    workdir.open_workdir(work, {"steps": 3})


def test_what_another_version_made_is_refused_in_one_sentence(tmp_path):
    run = tmp_path / "private" / "runs" / "generator"
    workdir.open_workdir(tmp_path / "work", {"steps": 3})
    with _open(run):
        pass
    for path in (tmp_path / "work" / "config.json", run / "run.json"):
        content = json.loads(path.read_text())
        assert content.pop("made_by") == f"tfdpsq {tfdpsq.__version__}"
        path.write_text(json.dumps(content))
    _pay(run)
    with pytest.raises(InputError, match="go on with tfdpsq 0.1.0"):
        workdir.open_workdir(tmp_path / "work", {"steps": 4})
    with pytest.raises(InputError, match="go on with tfdpsq 0.1.0"):
        _open(run, {"steps": 4}).__enter__()


# -- Models and sets that are read ---------------------------------------------------


def test_certified_set_is_not_taken_for_raw_pairs(tmp_path):
    """One private query may have moved all of its rows; ε would count them singly."""
    (tmp_path / "corpus.jsonl").write_text("")
    (tmp_path / "manifest.json").write_text('{"a": 1}')
    assert not sources.is_free(str(tmp_path))
    (tmp_path / "certificate.json").write_text("{}")
    assert sources.is_free(str(tmp_path))
