"""A guarantee follows what is made from an artefact, and never appears by itself."""

import json
import math
import pathlib
import shutil

import pytest
from helpers import tiny as _tiny
from keras_nlp.src.models.t5.t5_backbone import T5Backbone

from tfdpsq.privacy import read_certificate
from tfdpsq.run import (
    convert,
    evaluate,
    finetune,
    pipeline,
    prepare,
    synthesize,
    train_retriever,
)
from tfdpsq.run.core import layout, releases, sources
from tfdpsq.run.training import private_training
from tfdpsq.validation import DataError


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    """Prepared data, and a public, an unprotected and a protected generator."""
    base = tmp_path_factory.mktemp("lineage")
    _tiny.write_pairs(base / "pairs")
    config = _tiny.tiny_config(base / "pairs")
    config.prepare.data = str(base / "pairs")
    prepare.run(config.prepare, base / "prepare")
    made = _Made(base, config)
    made.finetune("public", pairs=made.public_pairs, epsilon=math.inf)
    made.finetune("unprotected", epsilon=math.inf)
    made.finetune("protected", epsilon=8.0)
    for name in ("unprotected", "protected"):
        made.synthesize(name)
    return made


class _Made:
    def __init__(self, base, config):
        self.base, self.config = base, config
        self.vocabulary = str(base / "prepare" / prepare.VOCABULARY)
        self.public_pairs = str(base / "prepare" / layout.PUBLIC_PAIRS)

    def _settings(self, stage, **changes):
        settings = self.config[stage].copy_and_resolve_references()
        settings.vocabulary = self.vocabulary
        if "pairs" in settings:
            settings.pairs = str(self.base / "pairs")
        settings.update(changes)
        return settings

    def finetune(self, name, **changes):
        settings = self._settings("finetune", **changes)
        finetune.run(settings, self.base / name)
        return read_certificate(self.base / name)

    def synthesize(self, generator, name=None):
        settings = self._settings(
            "synthesize",
            generator=str(self.base / generator),
            corpus=str(self.base / "pairs"),
            max_documents=20,
        )
        synthesize.run(settings, self.base / (name or f"{generator}_set"))

    def bounded(self):
        """The certificate of a run that declares a bound on n; trains it once."""
        if not (self.base / "bounded").exists():
            changes = {"epsilon": 8.0, "n_is_public": False, "n_bound": 70}
            return self.finetune("bounded", **changes)
        return read_certificate(self.base / "bounded")

    def retriever(self, name, **changes):
        settings = self._settings("retriever", **changes)
        train_retriever.run(settings, self.base / name)
        return read_certificate(self.base / name)

    def set(self, name):
        return str(self.base / f"{name}_set" / layout.SET)


def test_a_set_made_without_protection_cannot_be_protected_afterwards(stages):
    """One private query had a part in all of its rows: ε = 8 per row is no ε."""
    with pytest.raises(ValueError, match="is a synthetic or public set, yet epsilon"):
        stages.finetune("late", pairs=stages.set("unprotected"), epsilon=8.0)
    with pytest.raises(ValueError, match="is part of a synthetic or public set"):
        inside = stages.set("unprotected") + "/beir"
        stages.finetune("inside", pairs=inside, epsilon=8.0)
    copy, links = stages.base / "copy", stages.base / "links"
    shutil.copytree(inside, copy)
    links.mkdir()
    for path in pathlib.Path(inside).iterdir():
        if path.suffix == ".jsonl" or path.is_dir():
            (links / path.name).symlink_to(path)
    for path in (copy, links):
        with pytest.raises(ValueError, match="is part of a synthetic or public set"):
            stages.finetune("elsewhere", pairs=str(path), epsilon=8.0)
    with pytest.raises(ValueError, match="holds no private queries"):
        stages.retriever(
            "late_retriever",
            pairs=stages.set("unprotected"),
            method="naive",
            epsilon=8.0,
        )


@pytest.mark.parametrize(
    ("start", "message"),
    [
        ("unprotected", "whose guarantee is 'private'.* Start from public weights"),
        ("protected", "was itself trained on private queries"),
    ],
)
def test_private_starting_weights_are_refused_under_a_finite_epsilon(
    stages, start, message
):
    with pytest.raises(ValueError, match=message):
        stages.finetune("again", init=str(stages.base / start), epsilon=8.0)


def test_what_is_made_from_an_artefact_carries_its_certificate(stages):
    protected = read_certificate(stages.base / "protected")
    assert stages.retriever("r1", pairs=stages.set("protected")) == protected
    assert (
        stages.finetune(
            "f1",
            pairs=stages.public_pairs,
            init=str(stages.base / "protected"),
            epsilon=math.inf,
        )
        == protected
    )
    # The same guarantee met twice is still the same guarantee.
    again = stages.finetune(
        "f2",
        pairs=stages.set("protected"),
        init=str(stages.base / "protected"),
        epsilon=math.inf,
    )
    assert again == protected
    mixed = stages.finetune(
        "f3",
        pairs=stages.set("unprotected"),
        init=str(stages.base / "protected"),
        epsilon=math.inf,
    )
    assert mixed["private"] is False


def test_a_retriever_inherits_from_its_starting_weights_too(stages, monkeypatch):
    """From public pairs, but by an encoder that private queries had a part in.

    By the stage itself, without what is checked of an output that was made.
    """
    monkeypatch.setattr(releases, "check_made", lambda *_: None)
    start = str(stages.base / "protected")
    protected = read_certificate(start)
    public = {"pairs": stages.public_pairs, "init": start}
    assert stages.retriever("from_private_weights", **public) == protected
    assert stages.retriever("untrained", **public, steps=0) == protected
    with pytest.raises(ValueError, match="was itself trained on private queries"):
        stages.retriever("direct", init=start, method="naive", epsilon=8.0)
    assert not (stages.base / "private" / "runs" / "direct" / "ledger.jsonl").exists()


def test_private_reads_are_on_record_before_training_and_in_the_certificate(
    stages, monkeypatch
):
    path = stages.base / "private" / "private_reads.jsonl"
    assert path.is_file()
    recorded = list(map(json.loads, path.read_text().splitlines()))
    assert "training loss" in recorded[0]["what"]
    certificate = read_certificate(stages.base / "protected")
    assert recorded[0] in certificate["private_reads"]

    def interrupted(*_, **__):
        raise InterruptedError

    monkeypatch.setattr(private_training, "train", interrupted)
    elsewhere = stages.base / "elsewhere"
    with pytest.raises(InterruptedError):
        stages.finetune("killed", epsilon=8.0, private_directory=str(elsewhere))
    assert "training loss" in (elsewhere / path.name).read_text()


def test_two_different_guarantees_do_not_merge(stages):
    stages.bounded()
    with pytest.raises(ValueError, match="epsilons would add up"):
        stages.finetune(
            "merged",
            pairs=stages.set("protected"),
            init=str(stages.base / "bounded"),
            epsilon=math.inf,
        )


def test_plain_training_on_private_pairs_says_that_it_protects_nothing(stages):
    certificate = stages.retriever("plain")
    assert certificate["private"] is False
    assert certificate["guarantee"]["epsilon"] == "inf"
    assert "shuffled" in certificate["sampler"]["name"]


def test_public_training_has_no_certificate(stages):
    assert read_certificate(stages.base / "public") is None
    assert stages.retriever("public_retriever", pairs=stages.public_pairs) is None
    assert not sources.load_source(stages.public_pairs).private


def _without(what, base, name, *files):
    copy = base / f"{name}_without_{len(files)}"
    shutil.copytree(what, copy, ignore=shutil.ignore_patterns(*files))
    return copy


@pytest.mark.parametrize(
    "files", [["certificate.json"], ["certificate.json", "stage*"]]
)
def test_weights_whose_certificate_was_not_copied_are_not_taken_for_public(
    stages, tmp_path, files
):
    generator = _without(stages.base / "protected", tmp_path, "t5", *files)
    for use in (
        lambda: stages.finetune("heir", init=str(generator), epsilon=math.inf),
        lambda: stages.retriever(
            "heir_retriever", pairs=stages.public_pairs, init=str(generator)
        ),
        lambda: convert.convert(generator, tmp_path / "converted", "huggingface"),
        lambda: sources.certificate_of_model(str(generator)),
    ):
        with pytest.raises(
            DataError, match=r"certificate.json: missing, while \w+.json says that"
        ):
            use()
    retriever = stages.base / "direct"
    if not retriever.is_dir():
        assert stages.retriever("direct", pairs=stages.set("protected"))
    copy = _without(retriever, tmp_path, "retriever", *files)
    with pytest.raises(DataError, match="certificate.json: missing, while"):
        stages.retriever("heir2", pairs=stages.public_pairs, init=str(copy))
    # Only what says nothing of a certificate needs none.
    assert read_certificate(stages.base / "public") is None


@pytest.mark.parametrize("form", ["huggingface", "keras"])
def test_a_certificate_and_its_mark_are_carried_into_other_formats(
    stages, tmp_path, form
):
    out = tmp_path / "other"
    convert.convert(stages.base / "protected", out, form)
    assert read_certificate(out) == read_certificate(stages.base / "protected")
    if form == "keras":
        T5Backbone.from_preset(str(out))
    shutil.copy(stages.base / "unprotected" / "certificate.json", out)
    with pytest.raises(DataError, match="certificate.json: of something else, while"):
        read_certificate(out)


@pytest.fixture
def gone(stages, tmp_path):
    """The stages without the protected generator, which is there again at the end."""
    generator = stages.base / "protected"
    run = stages.base / "private" / "runs" / "protected"
    shutil.copytree(run, tmp_path / "run")
    shutil.move(generator, tmp_path / "generator")
    yield stages
    for path in (generator, run):
        shutil.rmtree(path, ignore_errors=True)
    shutil.move(tmp_path / "generator", generator)
    shutil.move(tmp_path / "run", run)


def test_a_generator_that_was_made_anew_is_noticed(gone):
    """Else two runs on the same queries would be released, each stating its ε."""
    with pytest.raises(ValueError, match="would spend the budget a second time"):
        gone.finetune("protected", epsilon=8.0)
    # Whoever spends again knowingly moves the ledger away.
    run = gone.base / "private" / "runs" / "protected"
    (run / "ledger.jsonl").rename(run / "spent-before.jsonl")
    gone.finetune("protected", epsilon=8.0)
    with pytest.raises(ValueError, match="from other inputs.*inputs.generator"):
        gone.synthesize("protected")


def test_prepare_counts_no_private_query(stages):
    stage = json.loads((stages.base / "prepare" / "stage.json").read_text())
    assert set(stage["result"]) == {"documents", "public_pairs"}


def test_the_pipelines_default_config_is_complete():
    config = pipeline.default_config()
    assert {"prepare", "finetune", "synthesize", "retriever"} <= set(config)


def test_a_query_of_no_user_cannot_be_protected_by_user(stages, tmp_path):
    """Users are named in queries.jsonl; test_pipeline trains by user."""
    pairs = tmp_path / "pairs"
    shutil.copytree(stages.base / "pairs", pairs)
    records = [json.loads(line) for line in open(pairs / "queries.jsonl")]
    for number, record in enumerate(records):
        if number != 3:
            record["metadata"] = {"user_id": f"u{number % 15}"}
    (pairs / "queries.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    user = {"pairs": str(pairs), "unit": "user", "rows_per_unit": 4, "epsilon": 8.0}
    with pytest.raises(ValueError, match=r"queries.jsonl:4.*user_id"):
        stages.finetune("by_user", **user, microbatch_size=8)


def test_strict_training_reads_and_shows_nothing_beside_the_budget(stages, capfd):
    path = stages.base / "private" / "private_reads.jsonl"
    before = path.read_text()
    certificate = stages.finetune("strict", epsilon=8.0, strict=True)
    assert path.read_text() == before
    # What was read before it, by other stages, may have shaped it: that is listed.
    assert certificate["private_reads"] == list(map(json.loads, before.splitlines()))
    assert "loss" not in capfd.readouterr().err
    logs = stages.base / "private" / "logs" / "strict"
    assert json.loads((logs / "curve.json").read_text())["loss"] == []
    settings = stages.config.evaluate.copy_and_resolve_references()
    settings.update(data=str(stages.base / "pairs"), strict=True)
    with pytest.raises(ValueError, match="strict mode refuses.*queries and judgements"):
        evaluate.run(settings, stages.base / "evaluation")
    assert not (stages.base / "evaluation").exists()
    recorded = (stages.base / "private" / "private_reads.jsonl").read_text()
    assert "training loss" in recorded and "judgements" not in recorded


def test_n_is_public_only_when_declared(stages):
    private = {"epsilon": 8.0, "n_is_public": False}
    with pytest.raises(ValueError, match="treated as public only when declared"):
        stages.finetune("undeclared", **private)
    with pytest.raises(ValueError, match="data hold more units"):
        stages.finetune("undeclared", **private, n_bound=59)
    certificate = stages.bounded()
    assert certificate["sampler"]["n"] == 70
    text = json.dumps(certificate) + (stages.base / "bounded/stage.json").read_text()
    assert '": 60' not in text  # how many pairs there are stays private
