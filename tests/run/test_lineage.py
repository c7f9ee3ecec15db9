"""A guarantee follows what is made from an artefact, and never appears by itself."""

import importlib
import json
import math
import shutil

import pytest
import tensorflow as tf
from helpers import plans, tiny
from keras_nlp.src.models.t5.t5_backbone import T5Backbone

from tfdpsq.privacy import read_certificate
from tfdpsq.run import convert, evaluate, finetune, synthesize, train_retriever
from tfdpsq.run.core import records, releases, sources, workdir
from tfdpsq.run.core.releases import CERTIFIED, PRIVATE, PUBLIC, Output
from tfdpsq.validation import DataError, InputError

_PRIVATE = "guarantee is 'private'"


# -- Generators, sets and retrievers -------------------------------------------------


class _Made:
    """Pairs; a public, a protected and an unprotected T5, and a set of each.

    Protected means ε = 8. No training was needed: what counts are the certificates.
    """

    def __init__(self, base):
        self.base = base
        self.queries = tiny.write_start(base)
        rows = [(f"a query {n}", f"d{n}", f"a document {n}") for n in range(20)]
        for name, epsilon in (("protected", 8.0), ("unprotected", math.inf)):
            tiny.write_private_generator(base / name, base / "public", epsilon)
            certificate = read_certificate(base / name)
            tiny.write_set(base / f"{name}_set", rows, certificate)
        tiny.write_set(base / "public_set", rows)

    def path(self, name):
        return str(self.base / name)

    def finetune(self, name, **changes):
        options = tiny.training(self.base, steps=1, microbatch_size=8)
        finetune.run(tiny.config(finetune, {**options, **changes}), self.base / name)
        return read_certificate(self.base / name)

    def retriever(self, name, **changes):
        options = tiny.training(self.base, steps=1, embedding_dim=8, batch_size=4)
        del options["accountant"]  # of a training that protects nobody
        config = tiny.config(train_retriever, {**options, **changes})
        train_retriever.run(config, self.base / name)
        return read_certificate(self.base / name)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return _Made(tmp_path_factory.mktemp("lineage"))


@pytest.fixture(scope="module")
def retriever(made):
    """A retriever that was trained on the protected set."""
    made.retriever("retriever", pairs=made.path("protected_set"))
    return made.base / "retriever"


@pytest.fixture(scope="module")
def bounded(made):
    """A generator trained in strict mode, for ε = 8 and at most 70 queries."""
    changes = {"epsilon": 8.0, "n_is_public": False, "n_bound": 70, "strict": True}
    made.finetune("bounded", **changes)
    return made.base / "bounded"


def test_set_made_without_protection_cannot_be_protected_later(made, tmp_path):
    """One private query had a part in all of its rows: ε = 8 per row is no ε."""
    shutil.copytree(made.base / "unprotected_set" / "beir", tmp_path / "copy")
    for pairs in (
        made.path("unprotected_set"),
        made.path("unprotected_set/beir"),
        str(tmp_path / "copy"),
    ):
        with pytest.raises(InputError, match="synthetic or public set"):
            made.finetune("late", pairs=pairs, epsilon=8.0)
    with pytest.raises(InputError, match="no private queries"):
        pairs = made.path("unprotected_set")
        made.retriever("late", pairs=pairs, method="naive", epsilon=8.0)


@pytest.mark.parametrize("start", ["unprotected", "protected"])
def test_training_with_epsilon_does_not_start_from_private_weights(made, start):
    """ε counts the steps of one training where two looked at the queries."""
    with pytest.raises(InputError, match="private"):
        made.finetune("again", init=made.path(start), epsilon=8.0)
    with pytest.raises(InputError, match="private"):
        start = made.path(start)
        made.retriever("direct", init=start, method="naive", epsilon=8.0)
    assert not list(made.base.rglob("again")) + list(made.base.rglob("direct"))


def test_what_is_trained_on_a_set_or_from_weights_carries_the_certificate(
    made, retriever
):
    protected = read_certificate(made.base / "protected")
    assert read_certificate(retriever) == protected
    # From public pairs, but by an encoder that private queries had a part in.
    start = {"pairs": made.path("public_set"), "init": made.path("protected")}
    assert made.retriever("from_weights", **start, steps=0) == protected
    # The same guarantee met twice is still the same guarantee.
    start["pairs"] = made.path("protected_set")
    assert made.finetune("twice", **start, epsilon=math.inf) == protected


def test_unprotected_part_makes_the_whole_unprotected(made):
    start = {"pairs": made.path("unprotected_set"), "init": made.path("protected")}
    mixed = made.finetune("mixed", **start, epsilon=math.inf)
    assert mixed["private"] is False


def test_two_guarantees_do_not_merge(made, tmp_path):
    shutil.copytree(made.base / "public", tmp_path / "other")
    plan = plans.plan(num_units=60, batch_size=8, steps=1, n_is_public=True)
    other = plans.certificate(plan, fingerprints={"pairs": "keyed:1"}, run_id="h")
    records.write_certificate(tmp_path / "other", other)
    with pytest.raises(InputError, match="add up"):
        init, pairs = str(tmp_path / "other"), made.path("protected_set")
        made.finetune("merged", pairs=pairs, init=init, epsilon=math.inf)


def test_model_copied_without_its_certificate_is_known_as_derived(
    made, retriever, tmp_path
):
    ignored = shutil.ignore_patterns("certificate.json", "stage*")
    for name, model in (("t5", made.base / "protected"), ("retriever", retriever)):
        shutil.copytree(model, tmp_path / name, ignore=ignored)
    start, public = str(tmp_path / "t5"), made.path("public_set")
    for use in (
        lambda: made.finetune("heir", init=start, epsilon=math.inf),
        lambda: made.retriever("heir", pairs=public, init=start),
        lambda: made.retriever("heir", pairs=public, init=str(tmp_path / "retriever")),
        lambda: convert.convert(tmp_path / "t5", tmp_path / "converted", "huggingface"),
        lambda: sources.certificate_of_model(start),
    ):
        with pytest.raises(DataError, match="certificate.json"):
            use()
    assert read_certificate(made.base / "public") is None


def test_certificate_and_its_mark_are_carried_into_other_formats(made, tmp_path):
    out = tmp_path / "other"
    convert.convert(made.base / "protected", out, "keras")
    assert read_certificate(out) == read_certificate(made.base / "protected")
    T5Backbone.from_preset(str(out))
    (out / "certificate.json").unlink()
    with pytest.raises(DataError, match="certificate.json"):
        read_certificate(out)


def test_strict_training_reads_and_shows_nothing_beside_the_budget(
    made, bounded, tmp_path
):
    private = made.base / "private"
    curve = json.loads((private / "logs" / "bounded" / "curve.json").read_text())
    assert curve["loss"] == []
    read = {read["where"] for read in read_certificate(bounded)["private_reads"]}
    assert not any("bounded" in where for where in read)
    config = tiny.config(evaluate, data=made.path("pairs"), strict=True)
    with pytest.raises(InputError, match="strict mode"):
        evaluate.run(config, tmp_path / "evaluation")
    assert not (tmp_path / "evaluation").exists()


def test_number_of_queries_is_private_unless_declared(made, bounded):
    private = {"epsilon": 8.0, "n_is_public": False}
    with pytest.raises(InputError, match="public only when declared"):
        made.finetune("undeclared", **private)
    with pytest.raises(InputError, match="n_bound|more units"):
        made.finetune("undeclared", **private, n_bound=59)
    certificate = read_certificate(bounded)
    assert certificate["sampler"]["n"] == 70
    text = json.dumps(certificate) + (bounded / "stage.json").read_text()
    assert '": 60' not in text  # how many pairs there are stays private


def test_generator_made_anew_would_spend_a_second_time(made, bounded, tmp_path):
    """Else two runs on the same queries would be released, each stating its ε."""
    shutil.move(bounded, tmp_path / "lost")
    try:
        changes = {"n_is_public": False, "n_bound": 70, "strict": True}
        with pytest.raises(InputError, match="a second time"):
            made.finetune("bounded", epsilon=8.0, **changes)
    finally:
        shutil.move(tmp_path / "lost", bounded)


def test_query_of_no_user_cannot_be_protected_by_user(made, tmp_path):
    shutil.copytree(made.base / "pairs", tmp_path / "pairs")
    queries = tmp_path / "pairs" / "queries.jsonl"
    given = [json.loads(line) for line in queries.read_text().splitlines()]
    for number, record in enumerate(given):
        if number != 3:
            record["metadata"] = {"user_id": f"u{number % 15}"}
    queries.write_text("\n".join(map(json.dumps, given)) + "\n")
    user = {"pairs": str(tmp_path / "pairs"), "unit": "user", "rows_per_unit": 4}
    with pytest.raises(InputError, match=r"queries.jsonl:4.*user_id"):
        made.finetune("by_user", **user, epsilon=8.0)


# -- Every path that a stage reads ---------------------------------------------------


def _check(path, guarantee, base, stage="synthesize", field="corpus"):
    """Checks a stage's settings, of which one is a path, for a released output."""
    module = importlib.import_module(f"tfdpsq.run.{stage}")
    config = workdir.plain(module.default_config())
    *above, last = field.split(".")
    node = config
    for name in above:
        node = node[name]
    node[last] = [path] if isinstance(node.get(last), list) else path
    output = Output(base / "release" / "out", guarantee, "test data")
    releases.check_lineage(output, config)


@pytest.mark.parametrize(
    ("stage", "field"),
    [
        *(("synthesize", name) for name in ("corpus", "generator", "histogram")),
        *(("finetune", name) for name in ("pairs", "init", "vocabulary")),
        *(("train_retriever", name) for name in ("pairs", "hard_negatives.run")),
        *(("train_adapter", name) for name in ("documents", "queries")),
        *(("filter", name) for name in ("synthetic", "round_trip.retriever")),
        ("encode", "retriever"),
        ("index", "base"),
        ("rerank", "generator"),
        ("zero_shot", "systems.mine"),  # of a mapping
        ("overlap", "corpus"),  # of a list
    ],
)
def test_path_setting_does_not_hide_what_is_private(made, tmp_path, stage, field):
    given = (tmp_path, stage, field)
    (tmp_path / "private_set" / "part").mkdir(parents=True)
    mark = {"guarantee": PRIVATE}
    (tmp_path / "private_set" / "stage.json").write_text(json.dumps(mark))
    for name in ("private_set", "private_set/part"):
        with pytest.raises(InputError, match=f"^{field} is .*{_PRIVATE}"):
            _check(str(tmp_path / name), CERTIFIED, *given)
    with pytest.raises(InputError, match=_PRIVATE):
        _check(made.path("unprotected"), CERTIFIED, *given)
    with pytest.raises(InputError, match="guarantee is 'certified'"):
        _check(made.path("protected"), PUBLIC, *given)
    _check(made.path("protected"), CERTIFIED, *given)
    _check(made.path("public"), PUBLIC, *given)


_WRITES_PRIVATE = {
    "finetune": {"epsilon": math.inf},
    "train_retriever": {},
    "synthesize": {"generator": "unprotected", "corpus": "pairs"},
    "mine": {},
    "overlap": {"texts": ("queries",)},
    "evaluate": {},
    "canaries": {},
}


@pytest.mark.parametrize("stage", _WRITES_PRIVATE)
def test_command_writes_nothing_private_to_a_release(made, tmp_path, stage):
    module = importlib.import_module(f"tfdpsq.run.{stage}")
    given = {"pairs": "pairs", "data": "pairs", "init": "public"}
    given.update(_WRITES_PRIVATE[stage])
    config, places = module.default_config(), ("pairs", "data", "init", "generator")
    for name in given.keys() & config.keys():
        path = name in (*places, "corpus")
        config[name] = made.path(given[name]) if path else given[name]
    with pytest.raises(InputError, match="private") as caught:
        module.run(config, tmp_path / "release" / "out")
    assert "release/out" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_stage_is_refused_before_it_writes_anything(made, tmp_path):
    data = tmp_path / "canaries" / "data"
    shutil.copytree(made.base / "pairs", data)
    (data / releases.MARK_FILE).write_text('{"guarantee": "private"}')
    config = tiny.config(synthesize, corpus=str(data), generator="t5_tiny_manuals")
    config.max_documents = 4  # were it not refused
    with pytest.raises(InputError, match=f"corpus is .*{_PRIVATE}"):
        synthesize.run(config, tmp_path / "release" / "synthetic")
    assert not (tmp_path / "release").exists()


def _write(place, name, value):
    tf.io.gfile.makedirs(place)
    with tf.io.gfile.GFile(f"{place}/{name}", "w") as file:
        file.write(json.dumps(value))


@pytest.mark.parametrize("name", ["stage.json", "manifest.json", "private.json"])
def test_what_a_directory_of_another_file_system_states_is_read(tmp_path, name):
    place = f"ram://lineage/{tmp_path.name}"
    _write(place, name, {"guarantee": "private"})
    for path in (place, f"{place}/part/file"):  # it holds for what is below
        with pytest.raises(InputError, match=f"corpus is ram://.*{_PRIVATE}"):
            _check(path, CERTIFIED, tmp_path)
    _write(f"{place}/part", name, {"guarantee": "public"})  # nearer
    _check(f"{place}/part/file", PUBLIC, tmp_path)
    # Others state nothing.
    for path in (f"{place}-none", "https://host/path", "none://host/path", "ram://"):
        _check(path, PUBLIC, tmp_path)


@pytest.mark.parametrize("name", ["stage.json", "private.json", "manifest.json"])
def test_damaged_mark_is_not_taken_for_none(tmp_path, name):
    """Documents beside a `private.json` that was cut short were released."""
    (tmp_path / "made" / "part").mkdir(parents=True)
    (tmp_path / "made" / name).write_text('{"guarantee": "priv')
    for place in (tmp_path / "made", tmp_path / "made" / "part"):
        with pytest.raises(DataError, match=name):
            _check(str(place), PUBLIC, tmp_path)


def test_imported_pairs_are_what_an_epsilon_protects(tmp_path):
    """With another mark they are not."""
    place = tmp_path / "pairs"
    config = {"logs": {}, "columns": {}, "log_documents_are_public": True}
    _write(str(place), "stage.json", {"guarantee": "private", "config": config})
    _check(str(place), CERTIFIED, tmp_path)
    _write(str(place), "private.json", {"guarantee": "private"})
    with pytest.raises(InputError, match=_PRIVATE):
        _check(str(place), CERTIFIED, tmp_path)
