"""`tfdpsq budget` on directories of artefacts, and `--budget` before a stage spends."""

import dataclasses
import itertools
import json
import pathlib
import re
import shutil
import types

import pytest
from helpers import plans, tiny

from tfdpsq import privacy
from tfdpsq.data import train_vocabulary
from tfdpsq.privacy.proof.certificate import digest_of
from tfdpsq.run import budget, finetune, pipeline, train_retriever
from tfdpsq.run.core import records, sources, spending, workdir
from tfdpsq.run.devices import strategy
from tfdpsq.run.training import direct_training
from tfdpsq.validation import InputError

_SPEC = privacy.PrivacySpec(
    epsilon=1.0,
    clip_norm=0.5,
    num_units=200,
    batch_size=20,
    steps=4,
    accountant="rdp",
)


def _certificate(steps=4, head="a", pairs="keyed:1", unit="query", **changes):
    return plans.certificate(
        privacy.make_plan(dataclasses.replace(_SPEC, unit=unit, **changes)),
        steps,
        fingerprints={"pairs": pairs},
        ledger_head=head,
    )


def _write(folder, certificate, **stage):
    folder.mkdir(parents=True)
    (folder / "certificate.json").write_text(json.dumps(certificate))
    if stage:
        (folder / "stage.json").write_text(json.dumps(stage))
    return folder


@pytest.fixture
def job(tmp_path):
    """A workdir with two runs released, one of them twice, and one kept private."""
    work = tmp_path / "work"
    _write(work / "release" / "generator", _certificate(head="a"))
    _write(work / "release" / "synthetic" / "set", _certificate(head="a"))
    _write(work / "release" / "retriever", _certificate(3, head="b"))
    _write(work / "private" / "audited", _certificate(head="c"))
    _write(work / "release" / ".next.0123456789ab.partial", _certificate(head="d"))
    _write(work / "evaluation", _certificate(head="e"), guarantee="private")
    return work


def _exit(capsys, *words):
    with pytest.raises(SystemExit) as caught:
        budget.main(["budget", *map(str, words)])
    said = capsys.readouterr()
    return caught.value.code, said.out, said.err


def test_a_workdir_is_composed_run_by_run(job, capsys):
    code, out, _ = _exit(capsys, job, "--budget=5")
    assert code == 0, out
    assert f"{job / 'release' / 'synthetic' / 'set'}" in out
    # Steps of one mechanism: those of both runs together, one after the other.
    whole = dataclasses.replace(_SPEC, steps=7)
    plan = dataclasses.replace(privacy.make_plan(_SPEC), spec=whole)
    together = re.search(r"together \(2 runs\): epsilon ([\d.]+) by PLD", out)
    assert float(together[1]) == pytest.approx(plan.epsilon(7, "pld"), rel=1e-4)
    assert f"{5 - float(together[1]):.4g} left" in out
    # Kept private: passed over, and said so.
    assert "not counted, as it was not released" in out
    assert f"- {job / 'private'}\n" in out and f"- {job / 'evaluation'}\n" in out
    # Unless it is given itself.
    code, out, _ = _exit(capsys, job, job / "private" / "audited", "--json")
    found = json.loads(out)
    assert (code, found["logs"][0]["runs"], found["left"]) == (0, 3, None)
    expected = privacy.make_plan(_SPEC).epsilon(4, "pld")
    assert found["together"]["epsilon"] > expected
    assert found["logs"][0]["releases"][0]["epsilon"] < 1


def test_a_log_with_units_of_two_kinds_has_no_total(tmp_path, capsys):
    one = _write(tmp_path / "one", _certificate(head="a"))
    other = _write(tmp_path / "other", _certificate(head="b", unit="pair"))
    code, out, _ = _exit(capsys, f"log={one}", f"log={other}", "--json", "--budget=9")
    found = json.loads(out)
    assert code == 1 and found["together"] is None and found["left"] is None
    assert [log["unit"] for log in found["logs"]] == ["query", "pair"]
    assert "neither guarantee says anything" in found["not_composed"][0]["why"]


def test_a_log_with_neighbours_of_two_kinds_is_told_in_any_order(tmp_path, capsys):
    """Poisson and shuffled runs compose; a run with groups beside them does not."""
    shuffled = {"sampler": "shuffled", "n_is_public": True}
    groups = {"clip_groups": 2, "sensitivity_multiplier": 2.0}
    kinds = {"poisson": {}, "shuffled": shuffled, "groups": groups}
    for name, changes in kinds.items():
        _write(tmp_path / name, _certificate(head=name, **changes))
    for order in itertools.permutations(kinds):
        words = [tmp_path / name for name in order]
        code, out, _ = _exit(capsys, *words, "--json", "--budget=9")
        found = json.loads(out)
        assert code == 1 and found["together"] is None
        assert "their neighbours differ" in found["not_composed"][0]["why"]
    words = [tmp_path / name for name in ("poisson", "shuffled")]
    code, out, _ = _exit(capsys, *words, "--json", "--budget=20")
    assert code == 0 and "(zero-out)" in json.loads(out)["together"]["adjacency"]


def test_a_budget_that_is_exceeded_exits_with_1(job, capsys):
    code, out, _ = _exit(capsys, job, "--budget=0.5")
    assert code == 1 and "EXCEEDED by 0." in out


def test_links_are_followed_once(job, tmp_path, capsys):
    other = tmp_path / "shared"
    other.mkdir()
    (other / "generator").symlink_to(job / "release" / "retriever")
    (other / "again").symlink_to(other)
    code, out, _ = _exit(capsys, other, "--json")
    assert code == 0 and json.loads(out)["logs"][0]["runs"] == 1


def test_everything_finished_below_release_is_counted(job, tmp_path):
    before = len(spending.find_certificates(job).certificates)
    release = job / "release"
    _write(release / "private" / "b", _certificate(head="f"))
    _write(release / ".c", _certificate(head="g"))
    _write(release / "audited", _certificate(head="h"), guarantee="private")
    _write(job / "private" / "release" / "d", _certificate(head="i"))
    (job / "private" / "e").symlink_to(release / "retriever")
    _write(tmp_path / "elsewhere", _certificate(head="j"))
    (release / "private" / "f").symlink_to(tmp_path / "elsewhere")
    found = spending.find_certificates(job)
    assert len(found.certificates) == before + 5 and not found.refused
    places = sum(found.places.values(), [])
    assert str(release / "private" / "f") in places
    private = [str(job / "evaluation"), str(job / "private")]
    assert sorted(found.unreleased) == private
    # A private artefact's directory can contain the workdir of another job.
    _write(job / "evaluation" / "release" / "k", _certificate(head="k"))
    found = spending.find_certificates(job)
    assert len(found.certificates) == before + 6
    assert sorted(found.unreleased) == private


def test_what_a_link_releases_is_counted_wherever_it_lies(job, capsys):
    """Its real directory comes first, among what is private."""
    before = len(spending.find_certificates(job).certificates)
    _write(job / "private" / "kept", _certificate(head="k"))
    _write(job / "evaluated", _certificate(head="l"), guarantee="private")
    (job / "release" / "kept").symlink_to(job / "private" / "kept")
    (job / "release" / "scores").symlink_to(job / "evaluated")
    (job / "release" / "all").symlink_to(job / "release")  # no loop
    found = spending.find_certificates(job)
    assert len(found.certificates) == before + 2
    # Its stage says that its certificate does not cover all of it.
    assert [*found.refused] == [str(job / "release" / "scores")]
    code, out, _ = _exit(capsys, job / "release", "--json")
    assert code == 1 and json.loads(out)["logs"][0]["runs"] == before + 2
    (job / "release" / "scores").unlink()
    code, out, _ = _exit(capsys, job / "release", "--json")
    assert code == 0 and json.loads(out)["logs"][0]["runs"] == before + 1


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("private/pairs", 'whose guarantee is "private"'),
        ("private/pairs/queries.jsonl", 'whose guarantee is "private"'),
        ("private/pairs/qrels", 'whose guarantee is "private"'),
        ("private/logs", "in private/, where nothing states a guarantee"),
        ("private/logs/a.jsonl", "in private/, where nothing states a guarantee"),
        ("private", "in private/, where nothing states a guarantee"),
    ],
)
def test_a_link_that_releases_what_is_private_is_named(job, capsys, target, why):
    """`budget` called it not released, and `--budget` let the next run begin."""
    for path in ("pairs/queries.jsonl", "pairs/qrels/train.tsv", "logs/a.jsonl"):
        (job / "private" / path).parent.mkdir(parents=True, exist_ok=True)
        (job / "private" / path).write_text("who sorts a list")
    (job / "private" / "pairs" / "stage.json").write_text('{"guarantee": "private"}')
    (job / "release" / "gone").symlink_to(job / "private" / "gone")  # to nothing
    assert not spending.find_certificates(job).refused
    link = job / "release" / "deep" / "link"
    link.parent.mkdir()
    link.symlink_to(job / target)
    code, out, _ = _exit(capsys, job, "--budget=5")
    assert code == 1 and "what is left is unknown" in out
    said = f"{link}: this link releases {job / target}, {why}"
    assert said in out.split("NOT COMPOSED")[1]
    assert "was not released, but for what is named above" in out
    assert f"  - {job / target}\n" not in out
    with spending.limited(50.0, [], job / "release" / "new"):
        with pytest.raises(InputError, match="cannot be checked: .*this link releases"):
            spending.require_within({"new": privacy.make_plan(_SPEC)}, "keyed:1")


def test_a_link_to_a_workdir_or_its_report_is_named(job, tmp_path, capsys):
    """Its seeds and its queries were released, and the total called complete."""
    other = tmp_path / "other"
    (other / "private" / "runs" / "generator").mkdir(parents=True)
    for name in ("config.json", "report.html", "private/fingerprint.key"):
        (other / name).write_text("{}")
    report = job / "release" / "report.html"
    report.symlink_to(other / "report.html")
    (job / "release" / "whole").symlink_to(other)
    inside = job / "release" / "whole" / "private"
    refused = spending.find_certificates(job).refused
    assert set(refused) == {str(report), str(inside)}
    assert f"releases {other}/report.html, which shows private" in refused[str(report)]
    assert f"releases {other}/private, where keys, seeds" in refused[str(inside)]
    code, out, _ = _exit(capsys, job, "--budget=5")
    assert code == 1 and "what is left is unknown" in out
    # A page of this name that no job wrote may be anybody's.
    (other / "config.json").unlink()
    shutil.rmtree(other / "private")
    assert not spending.find_certificates(job).refused


def test_a_retriever_has_one_certificate_for_all_its_files(tmp_path):
    """Its `model/` states the digest of the certificate that lies above it."""
    certificate = _certificate()
    retriever = tmp_path / "release" / "retriever"
    (retriever / "model").mkdir(parents=True)
    (retriever / "model" / "config.json").write_text("{}")
    records.write_certificate(retriever, certificate)
    stated = json.loads((retriever / "model" / "config.json").read_text())
    assert stated["certificate_digest"] == certificate["digest"]
    found = spending.find_certificates(tmp_path)
    assert list(found.certificates) == [certificate["digest"]] and not found.refused
    # A copy of the weights alone lost it.
    shutil.copytree(retriever / "model", tmp_path / "release" / "copy" / "model")
    refused = spending.find_certificates(tmp_path).refused
    assert str(tmp_path / "release" / "copy" / "model" / "certificate.json") in refused


def test_a_forged_or_missing_certificate_is_not_composed(job, capsys):
    path = job / "release" / "retriever" / "certificate.json"
    forged = json.loads(path.read_text())
    forged["accounting"]["steps_executed"] = 1
    for content in (forged, {**forged, "digest": digest_of(forged)}):
        path.write_text(json.dumps(content))
        code, out, _ = _exit(capsys, job, "--budget=5")
        assert code == 1 and "together (1 run)" in out
        assert "NOT COMPOSED" in out and str(path.parent) in out
        assert "budget 5: what is left is unknown" in out
    path.unlink()
    marked = {"certificate_digest": forged["digest"], "guarantee": "certified"}
    (path.parent / "stage.json").write_text(json.dumps(marked))
    code, out, _ = _exit(capsys, job)
    assert code == 1 and "missing, while stage.json says" in out


def _lost(path):
    path.unlink()


def _exchanged(path):
    path.write_text(json.dumps(_certificate(2, head="z")))


@pytest.mark.parametrize("damage", [_lost, _exchanged])
def test_a_set_whose_certificate_was_lost_is_named(job, capsys, damage):
    """Its run was left out of the total, and nothing was said of it."""
    certificate = _certificate(head="s")
    out = job / "release" / "other"
    folder = _write(out / "set", certificate)
    manifest = {"certificate": certificate, "guarantee": "certified"}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (out / "stage.json").write_text('{"guarantee": "certified"}')
    assert not spending.find_certificates(job).refused
    damage(folder / "certificate.json")
    code, out_text, _ = _exit(capsys, job, "--budget=5")
    assert code == 1 and "what is left is unknown" in out_text
    assert f"{folder / 'certificate.json'}" in out_text.split("NOT COMPOSED")[1]
    with spending.limited(50.0, [], job / "release" / "new"):
        with pytest.raises(InputError, match="while manifest.json says that private"):
            plan = privacy.make_plan(_SPEC)
            spending.require_within({"new": plan}, "keyed:1")
    # Nor is the whole set left out once it is gone.
    shutil.rmtree(folder)
    refused = spending.find_certificates(job).refused
    assert [*refused] == [str(out / "stage.json")]
    assert 'states the guarantee "certified", but there is no' in [*refused.values()][0]
    # A copy of a private one, which states so itself, is passed over.
    kept = _write(job / "copy", _certificate(head="t"))
    (kept / "manifest.json").write_text('{"guarantee": "private"}')
    assert str(kept) in spending.find_certificates(job).unreleased


def test_other_pairs_are_composed_only_as_declared(job, tmp_path, capsys):
    other = _write(tmp_path / "next", _certificate(head="n", pairs="keyed:2"))
    code, out, _ = _exit(capsys, job, other)
    assert code == 1 and "log 1 and log 2" in out
    assert "or the same under the key of another private directory" in out
    assert "Name the logs: NAME=DIRECTORY" in out
    one = json.loads(_exit(capsys, f"log={job}", f"log={other}", "--json")[1])
    assert (one["logs"][0]["runs"], len(one["logs"])) == (3, 1)
    words = (f"jan={job}", f"feb={other}")
    code, out, _ = _exit(capsys, *words)
    assert code == 1 and "jan and feb" in out
    code, out, _ = _exit(capsys, *words, "--disjoint=time", "--json")
    found = json.loads(out)
    assert code == 0
    parts = [log["epsilon"] for log in found["logs"]]
    assert found["together"]["epsilon"] == max(parts) < one["together"]["epsilon"]
    code, out, _ = _exit(capsys, *words, "--disjoint=time")
    assert "all 2 logs disjoint by time: epsilon" in out


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "usage:"),
        (["@/none"], "none does not exist. Give a workdir"),
        (["gs://x/y"], "error: gs://x/y does not exist. Give"),
        (["@/empty"], "holds no certificate.json of anything released"),
        (["log="], "'' names no directory. Give a workdir"),
        (["@", "log=@"], "has no name, and other directories have"),
        (["@", "--disjoint=time"], "has no name: the same pairs have another"),
        (["log=@", "--disjoint=place"], "disjoint is 'place'; choose one of 'time'"),
        (["@", "--budget=-1"], "budget is -1.0"),
        (["@", "--delta=2"], "delta is 2.0"),
        (["@", "--delta=0.5"], "the sum of what releases state that one unit"),
        (["@", "--delta=1e-30"], "Compute epsilon at a larger delta"),
        (["@", "--bugdet=3"], "Unknown command line flag"),
    ],
)
def test_bad_input_is_one_line_and_status_2(job, capsys, words, message):
    (job / "empty").mkdir()
    code, out, err = _exit(capsys, *[word.replace("@", str(job)) for word in words])
    assert (code, out) == (2, "") and message in err, err


# -- The limit of a stage ----------------------------------------------------------


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """The settings of a small generator on private pairs."""
    work = tmp_path_factory.mktemp("budget")
    queries = tiny.write_pairs(work / "pairs")
    train_vocabulary(queries, 320, work / "spiece.model")
    config = tiny.tiny_config(str(work / "pairs")).finetune
    config.update(pairs=str(work / "pairs"), vocabulary=str(work / "spiece.model"))
    return config


def _finetune(pairs, out, limit=0.0, released=(), **changes):
    config = pairs.copy_and_resolve_references()
    config.update(changes)
    with spending.limited(limit, released, out):
        return finetune.run(config, out)


def test_a_stage_is_refused_before_it_spends_and_runs_within_its_budget(
    pairs, tmp_path
):
    release = tmp_path / "work" / "release"
    _finetune(pairs, release / "first", 3.0, epsilon=3.0, accountant="pld")
    with pytest.raises(InputError, match="budget is epsilon 3, of which 1 earlier"):
        _finetune(pairs, release / "second", 3.0, epsilon=3.0, accountant="pld")
    assert not (release / "second").exists()
    # Nothing was paid for.
    assert not (tmp_path / "work" / "private" / "runs" / "second").exists()
    # What is finished spends nothing more.
    _finetune(pairs, release / "first", 0.1, epsilon=3.0, accountant="pld")
    # A directory elsewhere counts only if it is given.
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(release / "first", elsewhere / "first")
    plans = {"next": privacy.make_plan(_SPEC)}
    for released, refused in (([], False), ([str(elsewhere)], True)):
        with spending.limited(1.0, released, tmp_path / "other" / "release" / "next"):
            if refused:
                with pytest.raises(InputError, match="1 earlier releases spent"):
                    spending.require_within(plans, "keyed:1")
            else:
                spending.require_within(plans, "keyed:1")


def test_a_stage_keeps_others_from_the_budget_that_it_is_about_to_spend(tmp_path):
    """Two that began together were each within it, and their total was not.

    A lock is of an open file, so one more in this process stands for another's.
    """
    release = tmp_path / "work" / "release"
    release.mkdir(parents=True)
    plans = {"next": privacy.make_plan(_SPEC)}
    with spending.limited(1.5, [], release / "a"):
        spending.require_within(plans, "keyed:1")
        with pytest.raises(workdir.Held):
            workdir.held(release, "busy").__enter__()
        with spending.limited(1.5, [], release / "b"):  # of the same job
            spending.require_within(plans, "keyed:1")
        with pytest.raises(workdir.Held):
            workdir.held(release, "busy").__enter__()
    with workdir.held(release, "busy"), spending.limited(1.5, [], release / "b"):
        with pytest.raises(InputError, match="another process trains under a budget"):
            spending.require_within(plans, "keyed:1")
    with spending.limited(1.5, [], release / "b"):
        spending.require_within(plans, "keyed:1")


class _Reached(InputError):
    """The pairs were tokenised: the budget was not checked before."""


def test_direct_training_is_refused_before_it_reads_its_pairs(
    pairs, tmp_path, monkeypatch
):
    def reached(*_, **__):
        raise _Reached("reached")

    monkeypatch.setattr(direct_training, "rows_of", reached)
    config = train_retriever.default_config()
    config.update(pairs=pairs.pairs, method="microbatch", epsilon=3.0, steps=2)
    config.update(n_is_public=True, accountant="rdp", batch_size=8)
    context = types.SimpleNamespace(
        devices=strategy.DEFAULT,
        run_dir=tmp_path,
        inputs={"pairs": "keyed:1"},
        tokenizer=None,
        histogram=None,
    )
    model = types.SimpleNamespace(documents_frozen=True)
    source = sources.load_source(pairs.pairs, "train")
    for limit, message in ((1.0, "budget is epsilon 1, of which"), (4.0, "reached")):
        with spending.limited(limit, [], tmp_path / "release" / "next"):
            with pytest.raises(InputError, match=message):
                plan = direct_training.planned(config, context, source)
                given = (config, context, model, source, None)
                direct_training.train(*given, *plan)


def _runs_counted(monkeypatch, released, place):
    """Returns how many runs a limit counts, the new one included."""
    totals = []
    within = spending.budget.require_within
    monkeypatch.setattr(
        spending.budget, "require_within", lambda *args: totals.append(within(*args))
    )
    with spending.limited(50.0, released, place):
        spending.require_within({"next": privacy.make_plan(_SPEC)}, "keyed:1")
    return totals[0].runs


def test_certificates_of_one_folder_are_all_counted(tmp_path, capsys, monkeypatch):
    paths = [tmp_path / f"{month}.json" for month in ("january", "february")]
    for path in paths:
        path.write_text(json.dumps(_certificate(head=path.stem)))
    code, out, _ = _exit(capsys, *paths, "--json")
    log = json.loads(out)["logs"][0]
    assert (code, log["runs"]) == (0, 2)
    assert [line["places"] for line in log["releases"]] == [[str(p)] for p in paths]
    place = tmp_path / "work" / "release" / "next"
    assert _runs_counted(monkeypatch, [str(path) for path in paths], place) == 3


def test_a_workdir_under_a_link_has_its_releases(tmp_path, monkeypatch):
    release = tmp_path / "work" / "release"
    _write(release / "first", _certificate())
    (tmp_path / "current").symlink_to(release)
    assert _runs_counted(monkeypatch, [], tmp_path / "current" / "next") == 2


def test_what_stays_private_counts_the_releases_next_to_it(tmp_path, monkeypatch):
    _write(tmp_path / "work" / "release" / "first", _certificate())
    place = tmp_path / "work" / "private" / "next"
    assert _runs_counted(monkeypatch, [], place) == 2


def test_a_job_is_refused_before_its_first_stage_if_all_its_runs_exceed_the_limit(
    tmp_path,
):
    tiny.write_pairs(tmp_path / "pairs")
    config = tiny.tiny_config(str(tmp_path / "pairs"))
    config.update(epsilons=(3.0,), direct_epsilons=(3.0,), audit_epsilons=())
    config.finetune.accountant = config.direct.accountant = "pld"
    work = tmp_path / "work"
    with spending.limited(3.5, (), work):
        with pytest.raises(InputError, match="generator_eps3 and retriever_direct_eps"):
            pipeline.open_job(config, work)
        assert not work.exists()
    pipeline.open_job(config, work)
    with spending.limited(3.5, (), work):
        # What is finished spends nothing more.
        for name in ("generator_eps3", "retriever_direct_eps3"):
            _write(work / "release" / name, _certificate(steps=1))
        pipeline.open_job(config, work)


def test_a_limit_needs_certificates_that_hold(pairs, tmp_path):
    release = tmp_path / "work" / "release"
    certificate = _certificate()
    certificate["guarantee"]["epsilon"] = 0.1
    _write(release / "forged", certificate)
    with pytest.raises(InputError, match="the budget cannot be checked: .*forged"):
        _finetune(pairs, release / "next", 50.0, epsilon=3.0)
    with pytest.raises(InputError, match="none does not exist"):
        _finetune(pairs, tmp_path / "out", 50.0, [str(tmp_path / "none")], epsilon=3.0)
    with pytest.raises(InputError, match="none was given. Add --budget"):
        _finetune(pairs, tmp_path / "out", 0.0, [str(release)], epsilon=3.0)


def test_every_stage_that_spends_takes_the_flag():
    """Every module whose helpers make a plan for private pairs, and nobody else."""
    run = pathlib.Path(finetune.__file__).parent
    spends = {p.stem for p in run.glob("*.py") if "spends=True" in p.read_text("utf-8")}
    others = {"choose", "finetune", "pipeline", "train_retriever"}
    assert spends == {"histogram", "train_adapter", *others}


def test_two_certificates_of_no_known_run_are_not_counted_as_one(tmp_path):
    """Copies of one and two runs of one plan cannot be told apart."""
    release = tmp_path / "job" / "release"
    for name in "ab":
        _write(release / name, _certificate(head=None))
    plan = privacy.make_plan(_SPEC)
    with spending.limited(50.0, [], release / "new"):
        with pytest.raises(InputError, match="without a ledger head"):
            spending.require_within({"new": plan}, "keyed:1")


def test_equal_certificates_of_several_folders_are_one_run_or_refused(tmp_path, capsys):
    folders = [tmp_path / name / "release" for name in "ab"]
    for folder in folders:
        _write(folder / "generator", _certificate(head=None))
    code, out, _ = _exit(capsys, *folders, "--json")
    (refused,) = json.loads(out)["not_composed"]
    assert code == 1 and "without a ledger head" in refused["why"]
    for folder in folders:
        shutil.rmtree(folder)
        _write(folder / "generator", _certificate(head="a"))
    code, out, _ = _exit(capsys, *folders, "--json")
    assert code == 0 and json.loads(out)["logs"][0]["runs"] == 1


def test_the_total_of_a_run_that_stopped_early_has_its_condition(tmp_path, capsys):
    _write(tmp_path / "one", _certificate(3))
    _, out, _ = _exit(capsys, tmp_path / "one")
    assert (
        "if no run stopped early for what its weights showed (1 stopped early)" in out
    )
    _write(tmp_path / "two", _certificate(4))
    _, out, _ = _exit(capsys, tmp_path / "two")
    assert "stopped early for" not in out
