"""Canaries as users put them in, and what the audit of a generator says of them."""

import json
import shutil

import numpy as np
import pytest
import tensorflow as tf
from helpers import framed, plans, tiny

from tfdpsq.data import BeirDirectory, Tokenizer
from tfdpsq.data.texts import Pair
from tfdpsq.evaluation import audit_one_run, pure_epsilon_bound
from tfdpsq.generator import Preprocessor, T5QueryGenerator
from tfdpsq.privacy import read_certificate
from tfdpsq.run.common import audited, canary_set
from tfdpsq.run.frame import records, runner
from tfdpsq.run.frame.places import Place
from tfdpsq.run.stages import audit
from tfdpsq.run.stages.canaries import STAGE as CANARIES
from tfdpsq.run.stages.finetune import STAGE as FINETUNE
from tfdpsq.run.stages.train_retriever import STAGE as TRAIN_RETRIEVER
from tfdpsq.validation import InputError

# The first test waits for a training, a synthesis and an audit.
pytestmark = pytest.mark.timeout(900)
TRIALS, CANDIDATES, COINS = 2, 20, 30


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Pairs with canaries, a generator trained on them, a set, and the audit."""
    base = tmp_path_factory.mktemp("audit")
    digits = (" ".join("0123456789"),) * 40
    tiny.write_start(base, dropout=0.1, further=digits, train=120)
    _insert(base, "private/canaries")
    framed.run(
        FINETUNE,
        base / "private" / "generator",
        pairs=str(base / "private" / "canaries" / "data"),
        init=str(base / "public"),
        document_length=64,
        query_length=48,
        batch_size=16,
        trained=("*layer_norm*",),  # a small graph
        steps=2,
        n_is_public=True,
        accountant="rdp",
    )
    pairs = BeirDirectory(base / "pairs").pairs("train")[:32]
    rows = [(pair.query, pair.document_id, pair.document) for pair in pairs]
    certificate = read_certificate(base / "private" / "generator")
    tiny.write_public_pairs(base, 4)
    written = tiny.write_set(base / "private" / "set", rows, certificate)
    _audit(base, "private/audit", synthetic=written)
    return base


def _insert(base, name, **changes):
    usual = {
        "data": str(base / "pairs"),
        "repetitions": (3, 5),
        "forms": ("own_document", "random_document", "paper_own_document"),
        "query_characters": 40,
        "document_characters": 20,
        "trials": TRIALS,
        "candidates": CANDIDATES,
        "coins": COINS,
        "seed": 4,
    }
    return framed.run(CANARIES, base / name, **{**usual, **changes})


def _settings(base, **changes):
    usual = {
        "canaries": str(base / "private" / "canaries"),
        "generator": str(base / "private" / "generator"),
        "members": 10,
        "batch_size": 16,
    }
    return {**usual, **changes}


def _audit(base, name, **changes):
    return framed.run(audit.STAGE, base / name, **_settings(base, **changes))


def test_audit_says_what_the_model_says(base):
    """Ranks and the one-run bound, computed again; no bound exceeds epsilon."""
    certificate = read_certificate(base / "private" / "generator")
    found = json.loads((base / "private" / "audit" / "audit.json").read_text())
    made = canary_set.read_canaries(base / "private" / "canaries")
    documents = {d.id: d.content for d in BeirDirectory(base / "pairs").documents()}
    tokenizer, models = Tokenizer(base / "spiece.model"), {}

    def likelihoods(directory, queries):
        """Of (canary, secret), token by token."""
        pairs = []
        for canary, secret in queries:
            number = canary.secret if secret is None else secret
            document, query = documents[canary.document_id], f"{canary.prefix} {number}"
            if canary.form.startswith("paper_") and "document" in canary.form:
                document, query = f"{document[:20].strip()} {number}", canary.prefix
            pairs.append(Pair("", query.strip(), "", document))
        preprocessor = Preprocessor(tokenizer, query_length=48, document_length=64)
        batch = preprocessor.arrays(pairs)
        if directory not in models:
            models[directory] = T5QueryGenerator.from_preset(directory)
        log_p = tf.nn.log_softmax(models[directory](batch)).numpy()
        return [
            float(
                sum(log_p[row, at, batch["query_ids"][row, at]] for at in range(size))
            )
            for row, size in enumerate(batch["query_lengths"])
        ]

    generator = base / "private" / "generator"
    for kind in (("own_document", 5), ("paper_own_document", 3)):
        ranked = [c for c in made if (c.form, c.repetitions) == kind and not c.coin]
        (entry,) = [
            e for e in found["canaries"] if (e["form"], e["repetitions"]) == kind
        ]
        assert len(entry["ranks"]) == len(ranked)
        for canary, rank in zip(ranked, entry["ranks"]):
            of_secret, *others = likelihoods(
                generator, [(canary, s) for s in (canary.secret, *canary.candidates)]
            )
            # Rounding decides between candidates that are equally likely but for it.
            above = [other - of_secret for other in others]
            best, worst = (1 + sum(a > at for a in above) for at in (1e-4, -1e-4))
            assert best <= rank <= worst <= best + 2
        assert entry["mean_rank"] == np.mean(entry["ranks"])
        assert entry["chance"] == 10.5
    coins = [(canary, None) for canary in made if canary.coin]
    scores = np.subtract(
        likelihoods(generator, coins), likelihoods(base / "public", coins)
    )
    wanted = audit_one_run(
        scores,
        np.array([canary.repetitions == 1 for canary, _ in coins]),
        certificate["guarantee"]["delta"],
        [(2, 2), (6, 6)],
        1 - 0.05 / 3,
    )
    one_run = found["one_run"]["generator"]
    # Scores that are equal up to rounding may be ranked either way.
    assert abs(one_run["correct"] - wanted.correct) <= 1
    if one_run["correct"] == wanted.correct:
        assert one_run["epsilon"] == pytest.approx(wanted.epsilon, abs=1e-9)
    margins = np.array(
        [
            a - b
            for a, (canary, _) in zip(scores, coins)
            for b, (other, _) in zip(scores, coins)
            if canary.repetitions and not other.repetitions
        ]
    )
    low, high = (np.mean(margins > at) for at in (1e-4, -1e-4))
    assert low - 1e-9 <= one_run["auc"][0] <= high + 1e-9
    epsilon = certificate["guarantee"]["epsilon"]
    assert 7 < found["epsilon_certified"] == epsilon <= 8
    assert found["unit"] == "query"
    for entry in found["canaries"]:
        assert entry["units"] == entry["repetitions"]
        assert entry["epsilon_pure"] <= epsilon
    assert set(found["one_run"]) == {"generator", "set_language_model", "set_nearest"}
    assert all(attack["epsilon"] <= epsilon for attack in found["one_run"].values())
    assert found["membership"]["loss"]["members"] == 10


@pytest.mark.slow
def test_guarantee_for_users_is_for_a_whole_secret(base):
    """Trained as users, a secret is one unit of the certificate, however often."""
    by_user = shutil.copytree(base / "private/generator", base / "private/by_user")
    units = {"num_units": 150, "n_is_public": True, "unit": "user"}
    plan = plans.plan(epsilon=8.0, batch_size=8, steps=2, **units)
    fingerprints = read_certificate(by_user)["fingerprints"]
    certificate = plans.certificate(plan, fingerprints=fingerprints)
    records.write_certificate(by_user, certificate)
    stage = json.loads((by_user / "stage.json").read_text())
    stage["certificate_digest"] = certificate["digest"]
    (by_user / "stage.json").write_text(json.dumps(stage))
    _audit(base, "private/audit_user", generator=str(by_user))
    found = json.loads((base / "private" / "audit_user" / "audit.json").read_text())
    assert found["unit"] == "user"
    assert {entry["repetitions"] for entry in found["canaries"]} == {3, 5}
    # A union bound over all entries: one of them may be wrong in 5 % of audits.
    level = 1 - 0.05 / len(found["canaries"])
    for entry in found["canaries"]:
        assert entry["units"] == 1
        # What so many ranks show of one unit, and not of 3 or 5.
        assert entry["epsilon_pure"] == pure_epsilon_bound(
            np.array(entry["ranks"]), CANDIDATES, 1, 10, level
        )


def test_queries_written_for_canaries_documents_are_no_part_of_the_set(base, tmp_path):
    """Their text is the secret, which the generator would only have to copy."""
    texts = {"d3": "open a file", f"{canary_set.ID_PREFIX}0-1": "open 0123456789"}
    rows = ((query, document, "A text.") for document, query in texts.items())
    certificate = read_certificate(base / "private" / "generator")
    tiny.write_set(tmp_path / "set", rows, certificate)
    s = audit.Audit.Settings(**_settings(base, synthetic=str(tmp_path / "set")))
    place = Place.of(tmp_path / "private" / "audit")
    c = runner.Context(s, runner.open_inputs(s), place, None, {})
    assert audited.Subject(c).queries == [("d3", "open a file")]


def test_audit_is_a_recorded_private_read(base):
    listed = (base / "private" / "private_reads.jsonl").read_text()
    assert "canaries" in listed and "audit.json" in listed
    with pytest.raises(InputError, match="strict mode refuses"):
        _audit(base, "private/strict", strict=True)


def test_models_of_canaries_are_not_for_release(base):
    """Neither a generator nor a retriever, whatever its epsilon; nor the audit."""
    data = str(base / "private" / "canaries" / "data")
    for stage in (FINETUNE, TRAIN_RETRIEVER):
        with pytest.raises(InputError, match="under release/, but what .* private"):
            given = {"pairs": data, "init": str(base / "public"), "n_is_public": True}
            framed.run(stage, base / "release" / "model", **given)
    with pytest.raises(InputError, match="private"):
        _audit(base, "release/audit")
    assert not (base / "release").exists()


def test_canaries_cannot_be_asked_for_after_training(base):
    """A generator that was trained on other pairs tells nothing of them."""
    _insert(base, "private/others", seed=9)
    with pytest.raises(InputError, match="was not trained on"):
        _audit(base, "private/x", canaries=str(base / "private" / "others"))
    with pytest.raises(InputError, match="Give the output of a stage"):
        _audit(base, "private/x", canaries=str(base / "pairs"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"generator": ""}, "generator is ''"),
        ({"generator": "{base}/public"}, "finetune trained from a T5"),
        ({"synthetic": "{base}/pairs"}, "Give a set of queries"),
        ({"synthetic": "{base}/public_queries"}, "another certificate"),
    ],
)
def test_worthless_audits_are_refused(base, options, message):
    options = {
        name: value.format(base=base) if isinstance(value, str) else value
        for name, value in options.items()
    }
    with pytest.raises(InputError, match=message):
        _audit(base, "private/x", **options)
    assert not (base / "private" / "x").exists()


def test_secrets_that_would_be_cut_are_refused(base):
    made = canary_set.read_canaries(base / "private" / "canaries")
    documents = {d.id: d.content for d in BeirDirectory(base / "pairs").documents()}
    for name, length in (("document_length", 16), ("query_length", 8)):
        lengths = {"document_length": 64, "query_length": 48, name: length}
        preprocessor = Preprocessor(base / "spiece.model", **lengths)
        with pytest.raises(InputError, match=f"more than {name} = {length} tokens"):
            audited.require_whole(made, documents, preprocessor)
