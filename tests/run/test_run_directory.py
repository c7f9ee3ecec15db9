"""The private directory of a training run: what may go on there, and what is left."""

import json
import os
import pathlib
import shutil
import stat

import ml_collections
import pytest
import tensorflow as tf
from helpers import tiny as _tiny

from tfdpsq.privacy import checkpoint
from tfdpsq.privacy.proof.ledger import FILE_NAME, Ledger
from tfdpsq.run import finetune, pipeline, train_retriever
from tfdpsq.run.attacks import canary_set
from tfdpsq.run.core import releases, sources, workdir
from tfdpsq.run.training import context as contexts
from tfdpsq.run.training import direct_training, private_training
from tfdpsq.validation import DataError, InputError


def _open(directory, config=None, inputs=None, output="generator"):
    return private_training.open_run(
        directory,
        config or {"steps": 3},
        inputs or {"pairs": "keyed:a"},
        directory.parent / output,
    )


def _begun(directory, paid=0):
    with _open(directory):
        pass
    rows = directory / checkpoint.STATE / "rows"
    rows.mkdir(parents=True)
    (rows / "queries.npy").write_text("of the first data")
    with Ledger.open(directory / FILE_NAME, "plan", "data", 3) as ledger:
        for step in range(paid):
            ledger.pay(step)
    return rows


def test_a_run_is_closed_from_the_start_whatever_the_private_directory_is_called(
    tmp_path, monkeypatch
):
    seen = []

    def watch(name):
        real = getattr(pathlib.Path, name)

        def watched(path, *args, **options):
            real(path, *args, **options)
            if "secrets" in path.parts:
                seen.append((path.name, stat.S_IMODE(path.stat().st_mode)))

        monkeypatch.setattr(pathlib.Path, name, watched)

    watch("mkdir")
    watch("chmod")
    before = os.umask(0)
    try:
        with _open(tmp_path / "secrets" / workdir.RUNS / "generator"):
            pass
    finally:
        os.umask(before)
    assert {name for name, _ in seen} == {"secrets", workdir.RUNS, "generator"}
    assert {mode for _, mode in seen} == {0o700}


@pytest.mark.parametrize("engine", ["fast", "dpkeras", "vectorized"])
def test_only_the_own_engine_is_said_to_bound_rounding(engine):
    """The others clip by norms as tensorflow-privacy computes them."""
    config = {"optimizer": "sgd", "learning_rate": 0.1, "engine": engine}
    model = tf.keras.Sequential([tf.keras.layers.Dense(2, input_shape=(3,))])
    found = private_training.training_facts(ml_collections.ConfigDict(config), model)
    said = "includes rounding" in found["products_of_clipping"]
    assert said == (engine == "fast") and found["trained_parameters"] == 8


@pytest.mark.parametrize(
    "config, inputs",
    [({"steps": 4}, {"pairs": "keyed:a"}), ({"steps": 3}, {"pairs": "keyed:b"})],
)
def test_a_run_that_paid_goes_on_with_its_own_settings_and_data(
    tmp_path, config, inputs
):
    rows = _begun(tmp_path, paid=1)
    with pytest.raises(InputError, match="begun with another config or other data"):
        _open(tmp_path, config, inputs).__enter__()
    assert rows.is_dir()
    with _open(tmp_path):
        assert rows.is_dir()


@pytest.mark.parametrize("left", [None, "{}"])
def test_a_run_that_paid_is_not_taken_for_none_without_its_settings(tmp_path, left):
    """Its rows were tokenised with those it began with."""
    rows = _begun(tmp_path, paid=1)
    path = tmp_path / private_training.RUN_FILE
    path.unlink() if left is None else path.write_text(left)
    with pytest.raises(InputError, match="missing or empty, but steps .* Restore it"):
        _open(tmp_path).__enter__()
    assert rows.is_dir() and path.is_file() == (left is not None)


def test_a_lost_key_is_not_replaced_where_steps_are_paid(tmp_path):
    """With another one the same data would be called others, and the run be lost."""
    private = tmp_path / "private"
    run = private / "runs" / "generator"
    key = private / sources.KEY_FILE
    run.mkdir(parents=True)
    with Ledger.open(run / FILE_NAME, "plan", "keyed:ab 3", 3) as ledger:
        sources.keyed_fingerprint("f", private)  # nothing is paid for yet
        key.unlink()
        ledger.pay(0)
    with pytest.raises(InputError, match="fingerprint.key: it is missing, but 1 steps"):
        sources.keyed_fingerprint("f", private)
    assert not key.exists()
    # A job below it has a private directory and a key of its own.
    assert sources.keyed_fingerprint("f", tmp_path).startswith("keyed:")
    # Of a set, whose fingerprint anybody may compare, there was no key to lose.
    (run / FILE_NAME).unlink()
    with Ledger.open(run / FILE_NAME, "plan", "ab", 3) as ledger:
        ledger.pay(0)
    assert sources.keyed_fingerprint("f", private).startswith("keyed:")


def test_rows_of_other_data_do_not_outlive_a_change_before_the_first_step(tmp_path):
    """The next run would train on them, and its certificate name the new ones."""
    rows = _begun(tmp_path)
    with _open(tmp_path, inputs={"pairs": "keyed:b"}):
        pass
    assert not rows.exists()
    written = json.loads((tmp_path / private_training.RUN_FILE).read_text())
    assert written["inputs"] == {"pairs": "keyed:b"}


def test_a_closed_run_leaves_its_ledger_and_nothing_to_subtract_noise_with(tmp_path):
    rows = _begun(tmp_path, paid=3)
    checkpoint.open_secrets(tmp_path, 0, {})
    own = tmp_path / private_training.ROWS
    own.mkdir()
    (own / "queries.npy").write_text("tokens")
    private_training.close_run(tmp_path, tmp_path.parent / "generator")
    assert not rows.exists() and not own.exists()
    left = {path.name for path in tmp_path.rglob("*")}
    assert left == {FILE_NAME, private_training.RUN_FILE}


def _everything(directory):
    files = (path for path in directory.rglob("*") if path.is_file())
    return {path: path.read_bytes() for path in files}


def test_a_second_process_is_refused_before_it_reads_or_deletes_anything(tmp_path):
    """With another config it deleted the first one's seeds, which could not save.

    A lock is of an open file, so a second one in this process stands for the other's.
    """
    rows, run = _begun(tmp_path / "run"), tmp_path / "run"
    with _open(run), Ledger.open(run / FILE_NAME, "plan", "data", 3) as ledger:
        checkpoint.open_secrets(run, 0, {})
        before = _everything(run)
        for config, output in (
            ({"steps": 4}, "release/generator"),
            (None, "generator"),
        ):
            with pytest.raises(
                InputError, match="in use by another process.*use anoth"
            ):
                _open(run, config, output=output).__enter__()
        private_training.close_run(run, tmp_path / "generator")
        assert _everything(run) == before and rows.is_dir()
        ledger.pay(0)
    with _open(run):
        pass


def test_a_run_belongs_to_the_output_that_paid_for_it(tmp_path):
    """X/generator and X/release/generator have one run directory."""
    run = tmp_path / "work" / "private" / "runs" / "generator"
    first, second = "../../generator", "../../release/generator"
    with _open(run, output=second):
        pass
    with _open(run, output=first):  # nothing was paid: it may be taken over
        checkpoint.open_secrets(run, 0, {})
        with Ledger.open(run / FILE_NAME, "plan", "data", 3) as ledger:
            ledger.pay(0)
    before = _everything(run)
    with pytest.raises(InputError, match="holds the run of .*/work/generator, which"):
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


def test_a_state_whose_ledger_is_lost_is_not_taken_for_a_run_that_paid_nothing(
    tmp_path,
):
    _begun(tmp_path, paid=1)
    checkpoint.save(tmp_path, 1, [], checkpoint.Secrets(1, 2))
    (tmp_path / FILE_NAME).unlink()
    before = _everything(tmp_path)
    with pytest.raises(InputError, match="begun with another config"):
        _open(tmp_path, {"steps": 4}).__enter__()
    assert _everything(tmp_path) == before


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


def test_a_job_that_was_moved_or_is_spelled_otherwise_goes_on(tmp_path):
    """Its paths lead to the same things, whose fingerprints are compared as before."""

    def begin(job, vocabulary="release/prepare/spiece.model", pairs="keyed:a"):
        config = {"steps": 3, "vocabulary": str(job / vocabulary), "init": ("t5",)}
        directory = job / "private" / workdir.RUNS / "generator"
        output = job / "release" / "generator"
        return directory, private_training.open_run(
            directory, config, {"pairs": pairs}, output
        )

    first, opened = begin(tmp_path / "first")
    with opened, Ledger.open(first / FILE_NAME, "plan", "data", 3) as ledger:
        ledger.pay(0)
    (tmp_path / "first").rename(tmp_path / "second")
    (tmp_path / "link").symlink_to(tmp_path / "second")
    for name in ("second", "link"):
        with begin(tmp_path / name)[1]:
            pass
    for changed in (
        {"vocabulary": "release/prepare/other.model"},
        {"vocabulary": "elsewhere/spiece.model"},
        {"pairs": "keyed:b"},
    ):
        with pytest.raises(InputError, match="begun with another config or other data"):
            begin(tmp_path / "second", **changed)[1].__enter__()


@pytest.mark.parametrize(
    "old, new, moved",
    [
        ("/old/job/release/prepare/v", "/new/release/prepare/v", True),
        ("/old/job/release/prepare/v", "/new/release/prepare/w", False),
        ("/old/job/prepare/v", "/new/release/prepare/v", False),
        ("/old/data/v", "/data/v", True),  # beside the job, and moved with it
        ("/old/data/v", "/new/data/v", False),
        ("/else/pairs", "/new/release/pairs", False),
        # No paths, though they look like some: prompts, patterns of weights.
        ("ask/write: ", "write: ", False),
        ("*decoder*/*/query", "*/query", False),
        ("prepare/v", "/new/release/prepare/v", False),
        (3, "/new/release/prepare/v", False),
    ],
)
def test_paths_are_compared_from_where_the_job_was_and_is(old, new, moved):
    for wrap in (lambda v: v, lambda v: {"a": [v, 1]}):
        found = {"x": wrap(old), "written_in": "/old/job/release/generator"}
        wanted = {"x": wrap(new)}
        differ = workdir.differences(found, wanted, "/new/release/generator")
        assert bool(differ) is not moved
        # Of a job that is where it was, or nobody knows where, texts are compared.
        assert workdir.differences(found, wanted, "/old/job/release/generator")
        assert workdir.differences(found, wanted)
        del found["written_in"]
        assert workdir.differences(found, wanted, "/new/release/generator")


def test_another_prompt_is_no_moved_path_wherever_the_command_is_given(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "private" / workdir.RUNS / "generator"
    with _open(run, {"prompt": "ask/write/query: "}):
        pass
    with Ledger.open(run / FILE_NAME, "plan", "data", 3) as ledger:
        ledger.pay(0)
    with pytest.raises(InputError, match="begun with another config"):
        _open(run, {"prompt": "write/query: "}).__enter__()


def test_texts_are_no_moved_paths_wherever_the_command_is_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before, now = (str(tmp_path / where / "gen") for where in ("b/job", "job"))
    found = {"prompt": "b/write: ", "written_in": before}
    assert workdir.differences(found, {"prompt": "write: "}, now)


def test_lists_of_other_lengths_differ():
    place = "/new/job"
    lists = [["/old/job/a", "*norm*"], ["/old/job/a"], []]
    for old in lists:
        for new in lists:
            found = {"trained": old, "written_in": "/old/job"}
            moved = {"trained": [v.replace("/old", "/new") for v in new]}
            differ = workdir.differences(found, moved, place)
            assert bool(differ) is (old != new), (old, new)


def test_a_config_that_was_edited_after_the_stage_is_another(tmp_path):
    def make(out):
        return {}

    output = releases.Output(tmp_path / "out", releases.PUBLIC, "")
    workdir.run_stage(output, {"seed": 0}, {}, make)
    path = tmp_path / "out" / "stage.json"
    edited = json.loads(path.read_text())
    edited["config"]["seed"] = 1
    path.write_text(json.dumps(edited))
    assert workdir.finished_stage(tmp_path / "out", {"seed": 0}, {})
    with pytest.raises(InputError, match="stage.json was edited"):
        workdir.finished_stage(tmp_path / "out", {"seed": 1}, {})


def test_a_mistyped_path_does_not_replace_that_of_a_jobs_config(tmp_path):
    """The right command was then refused, and all of the job to be paid again."""
    right = {"data": str(tmp_path / "far" / "a" / "pairs")}
    path = workdir.open_workdir(tmp_path / "work", right) / workdir.CONFIG_FILE
    written = path.read_text()
    with pytest.raises(InputError, match="written by a run with another config"):
        workdir.open_workdir(tmp_path / "work", {"data": str(tmp_path / "pairs")})
    assert path.read_text() == written
    workdir.open_workdir(tmp_path / "work", right)


def test_a_finished_job_is_found_where_it_was_moved_and_its_report_is_of_whole_files(
    job, tmp_path
):
    directory = job.directory
    moved = tmp_path / "elsewhere"
    shutil.copytree(directory, moved, symlinks=True)
    config = _tiny.tiny_config(
        directory.parent / "pairs", directory.parent / "embedded"
    )
    made = {path: path.read_text() for path in moved.rglob("stage.json")}
    (moved / "report.html").unlink()
    pipeline.run(config, moved)
    assert {path: path.read_text() for path in moved.rglob("stage.json")} == made
    assert (moved / "report.html").is_file()
    measured = moved / "private" / "evaluation"
    for name, old, new, message in (
        ("metrics.json", '"synthetic_eps8"', '"synthetic_eps9"', "no sound entry"),
        ("qrels.trec", " 1\n", " 0\n", "other judgements than the data"),
    ):
        whole = (measured / name).read_text()
        assert old in whole
        (measured / name).write_text(whole.replace(old, new))
        with pytest.raises(DataError, match=f"{name}: .*{message}"):
            pipeline.run(config, moved)
        (measured / name).write_text(whole)


def test_inputs_of_the_same_content_may_lie_elsewhere(tmp_path):
    """Paid steps are kept when tfdpsq is installed elsewhere, for one."""

    def made(path, fingerprint):
        config = {"vocabulary": path, "seed": 0}
        return {"config": config, "inputs": {"vocabulary": fingerprint}}

    first = made("/a/site-packages/tfdpsq/presets/t5/spiece.model", "f")
    assert not workdir.differences(first, made("/tmp/b/spiece.model", "f"))
    assert workdir.differences(first, made("/tmp/b/spiece.model", "g"))
    other = made("/tmp/b/spiece.model", "f")
    other["config"]["seed"] = 1
    (changed,) = workdir.differences(first, other)
    assert changed == "config.seed: 0 there, 1 now"


def test_a_shipped_t5_is_the_same_wherever_tfdpsq_is_installed():
    made = {"rerankers": {"public": "/a/site-packages/tfdpsq/generator/presets/t5"}}
    elsewhere = {"rerankers": {"public": "/b/tfdpsq/generator/presets/t5"}}
    assert not workdir.differences(made, elsewhere)
    for other in ("/b/tfdpsq/generator/presets/t6", "/b/presets/t5"):
        assert workdir.differences(made, {"rerankers": {"public": other}})


def test_a_job_may_move_together_with_its_data(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    workdir.open_workdir(here / "work", {"data": str(here / "pairs")})
    for start, end in ((here, there), (there, here), (here, there)):
        start.rename(end)
        workdir.open_workdir(end / "work", {"data": str(end / "pairs")})
    with pytest.raises(InputError, match="another config .* with a link where a path"):
        workdir.open_workdir(there / "work", {"data": str(tmp_path / "pairs")})


def test_a_generator_is_read_with_its_own_copy_of_the_vocabulary(tmp_path):
    given = tmp_path / "given.model"
    given.write_text("given")
    (tmp_path / "generator").mkdir()
    found = sources.trained_vocabulary(str(given), tmp_path / "generator")
    assert found == given  # of an older one
    own = tmp_path / "generator" / "spiece.model"
    own.write_text("own")
    gone = str(tmp_path / "gone.model")
    assert sources.trained_vocabulary(gone, tmp_path / "generator") == own


def test_a_downloaders_notes_are_no_part_of_a_model(tmp_path):
    (tmp_path / "array").mkdir()
    for name in ("config.json", "array/.zarray"):
        (tmp_path / name).write_text("{}")
    made = workdir.model_fingerprint(tmp_path)
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "config.json.metadata").write_text("when")
    assert workdir.model_fingerprint(tmp_path) == made
    (tmp_path / "array" / ".zarray").write_text("[]")
    assert workdir.model_fingerprint(tmp_path) != made


def test_a_stage_that_fails_leaves_nothing_behind(tmp_path):
    def fail(out):
        (out / "half").write_text("written")
        raise OSError(28, "No space left on device")

    with pytest.raises(Exception, match="No space left|full"):
        output = releases.Output(tmp_path / "stage", releases.PUBLIC, "half")
        workdir.run_stage(output, {"a": 1}, {}, fail)
    assert list(tmp_path.iterdir()) == []
