"""Canaries as users put them in, and what the audit of a generator says of them."""

import collections
import json
import math
import secrets
import shutil
import types

import numpy as np
import pytest
import tensorflow as tf
from helpers import tiny as _tiny

from tfdpsq import evaluation
from tfdpsq.data import BeirDirectory, Tokenizer
from tfdpsq.data.texts import Pair
from tfdpsq.evaluation import audit_one_run, pure_epsilon_bound
from tfdpsq.generator import T5QueryGenerator, encode_pairs
from tfdpsq.privacy import read_certificate
from tfdpsq.run import audit, canaries, finetune, synthesize, train_retriever
from tfdpsq.run.attacks import audit_subject, canary_set, text_scores
from tfdpsq.validation import DataError, InputError

TRIALS, CANDIDATES, COINS = 2, 20, 30


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Pairs with canaries, a generator trained on them, its set, and the audit."""
    base = tmp_path_factory.mktemp("audit")
    digits = (" ".join("0123456789"),) * 40
    _tiny.write_start(base, dropout=0.1, further=digits, train=120)
    _insert(base, "private/canaries")
    _train(base, "private/generator", epsilon=math.inf)
    settings = synthesize.default_config()
    settings.update(
        generator=str(base / "private" / "generator"),
        corpus=str(base / "pairs"),
        document_length=64,
        query_length=48,
        batch_size=16,
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


def test_forms_are_what_they_say(base):
    """Alone; the query's words on its own document; on another's; the paper's three."""
    made = canary_set.read_canaries(base / "private" / "canaries")
    own = {p.document_id: p.query for p in BeirDirectory(base / "pairs").pairs("train")}
    kinds = collections.Counter((c.form, c.repetitions) for c in made if not c.coin)
    assert kinds == {(f, r): TRIALS for f in canary_set.FORMS for r in (3, 5)}
    for canary in made:
        if canary.form == "secret":
            assert canary.query() == canary.secret
        elif canary.form in ("own_document", "paper_query", "paper_own_document"):
            assert own[canary.document_id].startswith(canary.prefix)
        else:
            assert not own.get(canary.document_id, "").startswith(canary.prefix)
        limit = 40 if canary.form in canary_set.PAPER_FORMS else 24
        assert len(canary.prefix) <= limit
        assert canary.in_document == (canary.form in canary_set.IN_DOCUMENT)
        assert (canary.secret in canary.query()) == (not canary.in_document)
        assert len(canary.candidates) == (0 if canary.coin else CANDIDATES - 1)
    coins = [canary.repetitions for canary in made if canary.coin]
    assert len(coins) == COINS and set(coins) == {0, 1}


def test_secrets_are_fresh_unless_a_seed_is_given(base):
    """The same seed gives the same; none gives others each time."""
    first = canary_set.read_canaries(base / "private" / "canaries")
    _insert(base, "private/again")
    assert canary_set.read_canaries(base / "private" / "again") == first
    fresh = []
    for name in ("private/fresh1", "private/fresh2"):
        _insert(base, name, seed=-1)
        fresh.append({c.secret for c in canary_set.read_canaries(base / name)})
    assert not fresh[0] & fresh[1]


def test_audit_says_what_the_model_says(base):
    """Ranks and the one-run bound, computed again from the model itself."""
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
        batch = encode_pairs(pairs, tokenizer, query_length=48, document_length=64)
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
        0.0,
        [(2, 2), (6, 6)],
        1 - 0.05 / 3,
    )
    one_run = found["one_run"]["generator"]
    assert one_run["correct"] == wanted.correct
    assert one_run["epsilon"] == pytest.approx(wanted.epsilon, abs=1e-9)
    wins = [
        float(a > b) + 0.5 * float(a == b)
        for a, (canary, _) in zip(scores, coins)
        for b, (other, _) in zip(scores, coins)
        if canary.repetitions and not other.repetitions
    ]
    assert one_run["auc"][0] == pytest.approx(np.mean(wins), abs=1e-9)
    assert found["epsilon_certified"] == "inf"
    assert found["unit"] == "query"
    for entry in found["canaries"]:
        assert entry["units"] == entry["repetitions"] and entry["least_mean_rank"] == 1
    assert set(found["one_run"]) == {"generator", "set_language_model", "set_nearest"}
    assert found["membership"]["loss"]["members"] == 10


def test_a_guarantee_for_users_is_for_a_whole_secret(base):
    """Trained as users, a secret is one unit of the certificate, however often."""
    _train(base, "private/by_user", unit="user", epsilon=math.inf, steps=1)
    _audit(base, "private/audit_user", generator=str(base / "private" / "by_user"))
    found = json.loads((base / "private" / "audit_user" / "audit.json").read_text())
    made = canary_set.read_canaries(base / "private" / "canaries")
    certificate = read_certificate(base / "private" / "by_user")
    assert certificate["guarantee"]["unit"] == found["unit"] == "user"
    assert certificate["sampler"]["n"] == 120 + sum(c.repetitions > 0 for c in made)
    assert {entry["repetitions"] for entry in found["canaries"]} == {3, 5}
    for entry in found["canaries"]:
        assert entry["units"] == 1
        # What so many ranks show of one unit, and not of 3 or 5. A union bound over
        # all entries: one of them may be wrong in 5 % of audits.
        level = 1 - 0.05 / len(found["canaries"])
        assert entry["epsilon_pure"] == pure_epsilon_bound(
            np.array(entry["ranks"]), CANDIDATES, 1, 10, level
        )


def test_secrets_in_the_set_are_counted_apart_from_those_that_it_writes():
    """One of two secrets is in the set; the generator writes neither, here."""
    line = dict(form="secret", repetitions=3, coin=False, prefix="", document_id="d0")
    made = [
        canary_set.Canary(secret=secret, candidates=("1111122222",) * 12, **line)
        for secret in ("0123456789", "5555500000")
    ]
    subject = types.SimpleNamespace(
        config=types.SimpleNamespace(seed=0, top=1, confidence=0.95),
        queries=[("d3", "open 0123456789"), ("d4", "close it")],
        pair=lambda canary, secret: secret,
        likelihood=lambda pairs, cut: np.arange(len(pairs)) / len(pairs),
        written=lambda made: ["sort the array"],
    )
    guarantee = {"epsilon": 8.0, "unit": "query"}
    for entry in audit._canaries(subject, made, guarantee):
        assert (entry["leaked"], entry["leaked_in_set"]) == (0.0, 0.5)


def test_what_is_written_for_canaries_documents_is_no_part_of_the_set(base, tmp_path):
    """Their text is the secret, which the generator would only have to copy."""
    texts = {"d3": "open a file", f"{canary_set.ID_PREFIX}0-1": "open 0123456789"}
    rows = ((query, document, "A text.") for document, query in texts.items())
    _tiny.write_set(tmp_path / "set", rows)
    config = audit.default_config()
    config.update(
        canaries=str(base / "private" / "canaries"),
        generator=str(base / "private" / "generator"),
        synthetic=str(tmp_path / "set"),
    )
    trained = audit_subject.training_of(config.generator, config.canaries)
    found = audit_subject.load(config, trained, [], [])
    assert found.queries == [("d3", "open a file")]


def test_audit_is_a_recorded_private_read(base):
    """The list of the workdir has it, and strict mode refuses."""
    listed = (base / "private" / "private_reads.jsonl").read_text()
    assert "canaries" in listed and "audit/audit.json" in listed
    with pytest.raises(InputError, match="strict mode refuses"):
        _audit(base, "private/strict", strict=True)
    assert not (base / "private" / "strict").exists()


def test_canaries_cannot_be_asked_for_after_training(base):
    """A generator that was trained on other pairs tells nothing of them."""
    _insert(base, "private/others", seed=9)
    with pytest.raises(InputError, match="must be put in before training"):
        _audit(base, "private/x", canaries=str(base / "private" / "others"))
    with pytest.raises(InputError, match="inserted before training"):
        _audit(base, "private/x", canaries=str(base / "pairs"))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("release/canaries", {}, "is not under"),
        ("private/x", {"forms": ("secret", "else")}, r"forms\[1\] is 'else'"),
        ("private/x", {"repetitions": (0,)}, r"repetitions\[0\] is 0"),
        ("private/x", {"digits": 4}, "digits is 4"),
        ("private/x", {"candidates": 1}, "candidates is 1"),
        ("private/x", {"coins": 10}, "coins is 10"),
        (
            "private/x",
            {"forms": ("secret",)},
            "query_characters is 40, which does nothing here",
        ),
        (
            "private/x",
            {"forms": ("paper_query",)},
            "document_characters is 20, which does nothing here",
        ),
        ("private/x", {"trials": 40}, "each on a document of its own"),
    ],
)
def test_bad_settings_of_canaries(base, name, options, message):
    """Each error says what is wrong, and nothing is written."""
    with pytest.raises(InputError, match=message):
        _insert(base, name, **options)
    assert not (base / name).exists()


def test_canaries_are_not_put_in_twice(base):
    """Nor into a set that is no private data."""
    data = base / "private" / "canaries" / "data"
    with pytest.raises(InputError, match="already hold canaries"):
        _insert(base, "private/twice", data=str(data), trials=1, coins=0)
    free = base / "private" / "synthetic" / "set"
    with pytest.raises(InputError, match="synthetic or public set"):
        _insert(base, "private/x", data=str(free))


def test_what_is_trained_on_canaries_is_not_for_release(base):
    """Neither a generator nor a retriever, whatever its ε."""
    data = str(base / "private" / "canaries" / "data")
    for module in (finetune, train_retriever):
        config = _tiny.config(module, pairs=data, init=str(base / "public"))
        with pytest.raises(InputError, match="holds canaries .* must not be released"):
            module.run(config, base / "release" / "model")
    assert not (base / "release").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"generator": ""}, "generator is ''. Give the directory that the stage fin"),
        ({"canaries": ""}, "canaries is ''. Give the directory that the stage canar"),
        ({"generator": "{base}/private/synthetic"}, "is not a generator that finetune"),
        (
            {"members": 1},
            "members is 1; it must be an integer of at least 2. A comparison",
        ),
        ({"members": 0}, "members is 0"),
        ({"top": 0}, "top is 0"),
        ({"confidence": 95}, "confidence is 95"),
        ({"guesses": ((0.9, 0.9),)}, "both in and out"),
        ({"guesses": ()}, "guesses is empty"),
        ({"synthetic": "{base}/pairs"}, "pairs', where there is no set of queries"),
        ({"synthetic": "{tmp}/set"}, "was not written by .*generator, according to"),
    ],
)
def test_what_would_make_an_audit_worthless_is_refused_first(
    base, tmp_path, monkeypatch, options, message
):
    """Before a model is loaded; a set by another generator would be told of this."""
    shutil.copytree(base / "private" / "synthetic" / "set", tmp_path / "set")
    manifest = tmp_path / "set" / "manifest.json"
    changed = json.loads(manifest.read_text())
    changed["provenance"]["inputs"]["generator"] = "another/run"
    changed["provenance"] = {"of": changed["provenance"]}  # and filtered since
    manifest.write_text(json.dumps(changed))
    options = {
        name: value.format(base=base, tmp=tmp_path) if isinstance(value, str) else value
        for name, value in options.items()
    }
    monkeypatch.setattr(audit, "_audit", None)
    with pytest.raises(InputError, match=message):
        _audit(base, "private/x", **options)
    assert not (base / "private" / "x").exists()


def test_bad_settings_of_the_audit(base, tmp_path, logical_cpus):
    """Nothing to compare with, nobody to tell from, a key that is gone, a bad line."""
    with pytest.raises(InputError, match="takes 2 of each"):
        _audit(base, "private/x", other_splits=("train",))
    model, tokenizer = (
        T5QueryGenerator.from_preset(base / "public"),
        Tokenizer(base / "spiece.model"),
    )
    made = canary_set.read_canaries(base / "private" / "canaries")
    documents = BeirDirectory(base / "pairs").documents()
    with pytest.raises(InputError, match="with a canary's secret has more than doc"):
        text_scores.require_whole_canaries(made, documents, tokenizer, 48, 16)
    with pytest.raises(InputError, match="more than query_length = 8 tokens"):
        text_scores.require_whole_canaries(made, (), tokenizer, 8, 64)
    scorer = text_scores.LikelihoodScorer(model, tokenizer, 24, 6, 16)
    pair = BeirDirectory(base / "pairs").pairs("train")[0]
    with pytest.raises(InputError, match="more than query_length = 6 tokens"):
        scorer([pair])
    alone = scorer([pair] * 40, cut=True)
    assert np.isfinite(alone).all()
    # Two devices score three batches as one does.
    with tf.distribute.MirroredStrategy(logical_cpus[:2]).scope():
        copied = T5QueryGenerator.from_preset(base / "public")
        scorer = text_scores.LikelihoodScorer(copied, tokenizer, 24, 6, 16)
    np.testing.assert_array_equal(scorer([pair] * 40, cut=True), alone)
    copy = tmp_path / "generator"
    shutil.copytree(base / "private" / "generator", copy)
    with pytest.raises(InputError, match="are not known"):
        _audit(base, "private/x", generator=str(copy))
    with pytest.raises(InputError, match="certificate.json is missing"):
        audit_subject.certificate_of(str(base / "public"))
    broken = tmp_path / "canaries"
    shutil.copytree(base / "private" / "canaries", broken)
    with (broken / canary_set.CANARIES_FILE).open("a") as file:
        file.write('{"form": "secret"}\n')
    with pytest.raises(DataError, match="not a canary"):
        canary_set.read_canaries(broken)
    lines = (base / "private" / "canaries" / canary_set.CANARIES_FILE).read_text()
    (broken / canary_set.CANARIES_FILE).write_text(lines.replace("own_d", "oen_d", 1))
    with pytest.raises(DataError, match="not a canary .form is 'oen_document'"):
        canary_set.read_canaries(broken)
    first = json.loads(lines.splitlines()[0])
    for field, value in {
        **{"coin": None, "repetitions": "2", "prefix": 3, "secret": None},
        **{"document_id": [], "document_characters": 10**400, "candidates": [1]},
    }.items():
        bad = json.dumps({**first, field: value}) + "\n"
        (broken / canary_set.CANARIES_FILE).write_text(bad)
        with pytest.raises(DataError, match=r"canaries.jsonl:1: not a canary \("):
            canary_set.read_canaries(broken)
    for bad in (b"\xff\n", lines.encode().replace(b'"secret": "', b'"secret": "x', 1)):
        (broken / canary_set.CANARIES_FILE).write_bytes(bad)
        with pytest.raises(DataError, match=r"canaries.jsonl:1: not a canary \("):
            canary_set.read_canaries(broken)


@pytest.mark.parametrize("form", ["secret", "paper_own_document", "coin"])
def test_canaries_that_were_not_trained_on_are_not_measured(base, monkeypatch, form):
    """They ranked like chance, which is falsely reassuring."""
    path = base / "private" / "canaries" / canary_set.CANARIES_FILE
    whole = path.read_text()
    lines = [json.loads(line) for line in whole.splitlines()]
    if form == "coin":
        line = next(n for n, c in enumerate(lines) if c["coin"] and c["repetitions"])
        lines[line]["repetitions"] = 0
    else:
        line = next(n for n, c in enumerate(lines) if c["form"] == form)
        secret = lines[line]["secret"]
        lines[line]["secret"] = secret[:-1] + ("1" if secret[-1] == "0" else "0")
    monkeypatch.setattr(audit, "_audit", None)
    try:
        path.write_text("".join(json.dumps(each) + "\n" for each in lines))
        with pytest.raises(DataError, match=f":{line + 1}: this canary is in . of"):
            _audit(base, "private/x")
    finally:
        path.write_text(whole)
    assert not (base / "private" / "x").exists()


def test_a_list_of_canaries_that_lost_its_end_is_noticed(base, monkeypatch):
    """Secrets that are not listed would not be measured, without a word."""
    path = base / "private" / "canaries" / canary_set.CANARIES_FILE
    whole = path.read_text()
    lines = whole.splitlines(True)
    last = max(n for n, line in enumerate(lines) if json.loads(line)["repetitions"])

    def measured(*_):
        raise AssertionError("it was measured")

    monkeypatch.setattr(audit, "_audit", measured)
    try:
        path.write_text("".join(lines[:last]))
        with pytest.raises(DataError, match=f"ends after {last} canaries, and split"):
            _audit(base, "private/y")
    finally:
        path.write_text(whole)
    assert not (base / "private" / "y").exists()


def test_every_coin_is_thrown_by_itself(base):
    """The bound of one run is for fair coins, not for exactly half of them heads."""
    heads = []
    for seed in range(8):
        _insert(base, f"private/coins{seed}", seed=seed)
        made = canary_set.read_canaries(base / "private" / f"coins{seed}")
        heads.append([canary.repetitions for canary in made if canary.coin])
    counts = np.sum(heads, axis=1)
    assert np.shape(heads) == (8, COINS) and len(set(counts)) > 3
    # Six standard deviations of 240 fair coins.
    assert abs(counts.sum() - 120) < 47


def test_fresh_secrets_cannot_be_guessed_by_their_seed(base, monkeypatch):
    asked = []

    def randbits(bits):
        asked.append(bits)
        return secrets.randbits(bits)

    monkeypatch.setattr(
        canaries, "system_randomness", types.SimpleNamespace(randbits=randbits)
    )
    _insert(base, "private/unguessed", seed=-1)
    assert asked and min(asked) >= 128


def test_a_guarantee_for_pairs_is_for_one_of_a_secrets_pairs(base):
    _train(base, "private/by_pair", unit="pair", epsilon=math.inf, steps=1)
    _audit(base, "private/audit_pair", generator=str(base / "private" / "by_pair"))
    found = json.loads((base / "private" / "audit_pair" / "audit.json").read_text())
    assert found["unit"] == "pair"
    assert {entry["repetitions"] for entry in found["canaries"]} == {3, 5}
    for entry in found["canaries"]:
        assert entry["units"] == entry["repetitions"]


def test_attacks_on_one_run_share_what_may_be_wrong(base, monkeypatch):
    levels = []

    def bound(scores, included, delta, guesses, confidence, seed):
        levels.append(confidence)
        return audit_one_run(scores, included, delta, guesses, confidence, seed)

    monkeypatch.setattr(evaluation, "audit_one_run", bound)
    _audit(
        base,
        "private/levels",
        synthetic=str(base / "private" / "synthetic" / "set"),
        confidence=0.9,
    )
    found = json.loads((base / "private" / "levels" / "audit.json").read_text())
    # A union bound over the three of them.
    assert len(levels) == len(found["one_run"]) == 3
    assert levels == pytest.approx([1 - 0.1 / 3] * 3, abs=1e-12)
