"""Canaries as users put them in, and what the audit of a generator says of them."""

import json
import math
import shutil

import numpy as np
import pytest
import tensorflow as tf
from helpers import tiny

from tfdpsq.data import BeirDirectory, Tokenizer
from tfdpsq.data.texts import Pair
from tfdpsq.evaluation import audit_one_run, pure_epsilon_bound
from tfdpsq.generator import Preprocessor, T5QueryGenerator
from tfdpsq.privacy import read_certificate
from tfdpsq.run import audit, canaries, finetune, synthesize, train_retriever
from tfdpsq.run.attacks import audit_subject, canary_set, text_scores
from tfdpsq.validation import DataError, InputError

# The first test waits for a training, a synthesis and an audit.
pytestmark = pytest.mark.timeout(300)
TRIALS, CANDIDATES, COINS = 2, 20, 30


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Pairs with canaries, a generator trained on them, its set, and the audit."""
    base = tmp_path_factory.mktemp("audit")
    digits = (" ".join("0123456789"),) * 40
    tiny.write_start(base, dropout=0.1, further=digits, train=120)
    _insert(base, "private/canaries")
    _train(base, "private/generator", epsilon=8.0, accountant="rdp")
    settings = synthesize.default_config()
    settings.update(
        generator=str(base / "private" / "generator"),
        corpus=str(base / "pairs"),
        batch_size=16,
        max_documents=32,
    )
    synthesize.run(settings, base / "private" / "synthetic")
    _audit(base, "private/audit", synthetic=str(base / "private" / "synthetic" / "set"))
    return base


def _insert(base, name, **options):
    config = canaries.default_config()
    config.update(
        data=str(base / "pairs"),
        repetitions=(3, 5),
        forms=canary_set.FORMS,
        query_characters=40,
        document_characters=20,
        trials=TRIALS,
        candidates=CANDIDATES,
        coins=COINS,
        seed=4,
    )
    config.update(options)
    return canaries.run(config, base / name)


def _train(base, name, **options):
    config = finetune.default_config()
    config.update(
        pairs=str(base / "private" / "canaries" / "data"),
        init=str(base / "public"),
        document_length=64,
        query_length=48,
        batch_size=16,
        microbatch_size=16,
        trained=("*layer_norm*",),  # a small graph
        steps=2,
        n_is_public=True,
    )
    config.update(options)
    return finetune.run(config, base / name)


def _audit(base, name, **options):
    config = audit.default_config()
    config.update(
        canaries=str(base / "private" / "canaries"),
        generator=str(base / "private" / "generator"),
        samples_per_document=2,
        members=10,
        batch_size=16,
    )
    config.update(options)
    return audit.run(config, base / name)


def test_audit_says_what_the_model_says(base):
    """Ranks and the one-run bound, computed again; no bound exceeds epsilon."""
    certificate = read_certificate(base / "private" / "generator")
    found = json.loads((base / "private" / "audit" / "audit.json").read_text())
    made = canary_set.read_canaries(base / "private" / "canaries")
    documents = {d.id: d.content for d in BeirDirectory(base / "pairs").documents()}
    tokenizer = Tokenizer(base / "spiece.model")

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
        log_p = tf.nn.log_softmax(
            T5QueryGenerator.from_preset(directory)(batch)
        ).numpy()
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
        assert entry["units"] == entry["repetitions"] and entry["least_mean_rank"] == 1
        assert entry["epsilon_pure"] <= epsilon
    assert set(found["one_run"]) == {"generator", "set_language_model", "set_nearest"}
    assert all(attack["epsilon"] <= epsilon for attack in found["one_run"].values())
    assert found["membership"]["loss"]["members"] == 10


def test_guarantee_for_users_is_for_a_whole_secret(base):
    """Trained as users, a secret is one unit of the certificate, however often."""
    _train(base, "private/by_user", unit="user", epsilon=math.inf, steps=1)
    _audit(base, "private/audit_user", generator=str(base / "private" / "by_user"))
    found = json.loads((base / "private" / "audit_user" / "audit.json").read_text())
    made = canary_set.read_canaries(base / "private" / "canaries")
    certificate = read_certificate(base / "private" / "by_user")
    assert certificate["guarantee"]["unit"] == found["unit"] == "user"
    assert certificate["sampler"]["n"] == 120 + sum(c.repetitions > 0 for c in made)
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
    tiny.write_set(tmp_path / "set", rows)
    config = audit.default_config()
    config.update(
        canaries=str(base / "private" / "canaries"),
        generator=str(base / "private" / "generator"),
        synthetic=str(tmp_path / "set"),
    )
    found = audit_subject.load(config, [], [])
    assert found.queries == [("d3", "open a file")]


def test_audit_is_a_recorded_private_read_which_strict_mode_refuses(base):
    listed = (base / "private" / "private_reads.jsonl").read_text()
    assert "canaries" in listed and "audit/audit.json" in listed
    with pytest.raises(InputError, match="strict mode refuses"):
        _audit(base, "private/strict", strict=True)
    assert not (base / "private" / "strict").exists()


def test_models_of_canaries_are_not_for_release(base):
    """Neither a generator nor a retriever, whatever its epsilon; nor the audit."""
    data = str(base / "private" / "canaries" / "data")
    for module in (finetune, train_retriever):
        config = tiny.config(module, pairs=data, init=str(base / "public"))
        with pytest.raises(InputError, match="holds canaries .* must not be released"):
            module.run(config, base / "release" / "model")
    with pytest.raises(InputError, match="private"):
        _audit(base, "release/audit")
    assert not (base / "release").exists()


def test_canaries_cannot_be_asked_for_after_training(base):
    """A generator that was trained on other pairs tells nothing of them."""
    _insert(base, "private/others", seed=9)
    with pytest.raises(InputError, match="must be put in before training"):
        _audit(base, "private/x", canaries=str(base / "private" / "others"))
    with pytest.raises(InputError, match="inserted before training"):
        _audit(base, "private/x", canaries=str(base / "pairs"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"generator": ""}, "generator is ''"),
        ({"generator": "{base}/private/synthetic"}, "is not a generator that finetune"),
        ({"members": 1}, "members is 1"),
        ({"other_splits": ("train",)}, "takes 2 of each"),
        ({"guesses": ((0.9, 0.9),)}, "both in and out"),
        ({"synthetic": "{base}/pairs"}, "no set of queries"),
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
    documents = BeirDirectory(base / "pairs").documents()
    for lengths, message in (
        ((16, 48), "secret has more than doc"),
        ((64, 8), "more than query_length = 8 tokens"),
    ):
        own = Preprocessor(base / "spiece.model", "generate_query: ", *lengths)
        with pytest.raises(InputError, match=message):
            text_scores.require_whole_canaries(made, documents, own)


def test_damaged_list_of_canaries_is_refused(base, tmp_path):
    """Secrets that are not listed would not be measured, without a word."""
    path = base / "private" / "canaries" / canary_set.CANARIES_FILE
    whole = path.read_text()
    lines = whole.splitlines(True)
    last = max(n for n, line in enumerate(lines) if json.loads(line)["repetitions"])
    try:
        path.write_text("".join(lines[:last]))
        with pytest.raises(DataError, match=f"ends after {last} canaries"):
            _audit(base, "private/y")
    finally:
        path.write_text(whole)
    assert not (base / "private" / "y").exists()
    broken = shutil.copytree(path.parent, tmp_path / "canaries")
    for bad in ('{"form": "secret"}\n', '{"form": "sec'):
        (broken / canary_set.CANARIES_FILE).write_text(whole + bad)
        number = len(lines) + 1
        with pytest.raises(DataError, match=f"canaries.jsonl:{number}: not a canary"):
            canary_set.read_canaries(broken)
