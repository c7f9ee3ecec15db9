"""Hard negatives as users come by them: mined or given, used or refused."""

import json
import shutil

import numpy as np
import pytest
from helpers import tiny as _tiny

from tfdpsq.data import BeirDirectory, Tokenizer
from tfdpsq.evaluation import ranked, read_trec_run, write_trec_run
from tfdpsq.privacy import read_certificate, verify_certificate
from tfdpsq.retriever.training import content_key
from tfdpsq.run import mine, train_retriever
from tfdpsq.run.core import releases, sources
from tfdpsq.run.training import hard_negatives, plain_training
from tfdpsq.validation import DataError, InputError


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Private and public pairs, a public T5, and what is mined for both."""
    base = tmp_path_factory.mktemp("mine")
    _tiny.write_start(base)
    documents = list(BeirDirectory(base / "pairs").documents())
    rows = (("who sorts the array", d.id, d.content) for d in documents[:16])
    _tiny.write_set(base / "public_pairs", rows)
    _mine(base, "private/mined", pairs=str(base / "pairs"), k=5)
    pairs = {"pairs": str(base / "public_pairs"), "corpus": str(base / "pairs")}
    _mine(base, "mined_public", **pairs)
    return base


def _mine(base, name, **options):
    config = _tiny.config(mine, options, private_directory=str(base / "private"))
    return mine.run(config, base / name)


def _config(base, **options):
    usual = _tiny.training(
        base,
        pairs=str(base / "public_pairs"),
        private_directory=str(base / "private"),
        embedding_dim=16,
        batch_size=4,
        steps=2,
        negatives=20,
        microbatch_size=4,
    )
    return _tiny.config(train_retriever, options, **usual)


def _train(base, name, **options):
    return _tiny.train_retriever(base / name, _config(base, **options))[1]


def _arrays(config, source, tokenizer):
    """Returns the hard negatives of all rows, as training reads them."""
    own, length = config.hard_negatives, config.document_length
    return hard_negatives.encoder(own, source, tokenizer, length)(source.pairs)


def _section(run, count, skip=0, made_from=""):
    """Returns settings of hard negatives, from the pairs' own corpus."""
    own = train_retriever.default_config().hard_negatives
    own.update(run=str(run), count=count, skip=skip, made_from=made_from)
    return own


def _by_hand(own, beir, pairs):
    """Returns query -> texts of its hard negatives, from everything in memory."""
    texts = {document.id: document.content for document in beir.documents()}
    qrels, run = beir.qrels("train"), read_trec_run(own.run)
    found = {}
    for query in {pair.query_id for pair in pairs}:
        answers = {d for d, grade in qrels[query].items() if grade > 0}
        known = {texts[d] for d in answers}
        others = [d for d, _ in ranked(run.get(query, {})) if d not in answers]
        kept = [texts[d] for d in others if texts[d] not in known]
        found[query] = kept[own.skip : own.skip + own.count]
    return found


def test_what_is_mined_shares_words_and_depends_on_its_own_query_alone(base, tmp_path):
    found = read_trec_run(base / "private" / "mined" / mine.RUN_FILE)
    queries = BeirDirectory(base / "pairs").queries()
    train = [p.query_id for p in BeirDirectory(base / "pairs").pairs("train")]
    assert found.keys() == set(train) and {len(f) for f in found.values()} == {5}
    texts = {d.id: d.content for d in BeirDirectory(base / "pairs").documents()}
    for query, documents in found.items():
        words = set(queries[query].split())
        assert all(words & set(texts[d].split()) for d in documents)
    # Another private query: the others' documents are as they were.
    other = tmp_path / "pairs"
    _tiny.write_pairs(other)
    lines = (other / "queries.jsonl").read_text().splitlines()
    lines[0] = json.dumps({**json.loads(lines[0]), "text": "graph graph joins"})
    (other / "queries.jsonl").write_text("\n".join(lines) + "\n")
    _mine(tmp_path, "mined", pairs=str(other), k=5)
    changed = read_trec_run(tmp_path / "mined" / mine.RUN_FILE)
    assert changed.pop("q0") != found["q0"]
    assert changed == {q: d for q, d in found.items() if q != "q0"}


def test_the_run_does_not_depend_on_how_queries_are_cut(base, tmp_path, monkeypatch):
    """Every query is looked at by itself, in whatever company."""
    monkeypatch.setattr(mine, "_HITS", 7 * 5)
    _mine(tmp_path, "mined", pairs=str(base / "pairs"), k=5)
    whole = base / "private" / "mined"
    for name in (mine.RUN_FILE, hard_negatives.ORIGIN_FILE):
        one, other = (d / name for d in (whole, tmp_path / "mined"))
        if name == mine.RUN_FILE:
            assert one.read_bytes() == other.read_bytes()
        else:  # whose fingerprints are keyed
            found = [json.loads(path.read_text()) for path in (one, other)]
            assert found[0]["by"] == found[1]["by"] and "settings" in found[0]["by"]


def test_mining_for_private_queries_is_a_recorded_read(base, tmp_path):
    entries = (base / "private" / "private_reads.jsonl").read_text().splitlines()
    (entry,) = [e for e in map(json.loads, entries) if "BM25" in e["what"]]
    assert entry["where"] == "mined/run.trec"
    with pytest.raises(InputError, match="strict"):
        _mine(tmp_path, "mined", pairs=str(base / "pairs"), strict=True)
    assert not (tmp_path / "mined").exists()
    # By itself it finds the same place as the stages beside `private/`.
    config = mine.default_config()
    config.pairs = str(base / "pairs")
    mine.run(config, tmp_path / "private" / "mined")
    (line,) = (tmp_path / "private" / "private_reads.jsonl").read_text().splitlines()
    assert "BM25" in line and not (tmp_path / "private" / "private").exists()


def test_a_set_of_pairs_needs_a_corpus(base, tmp_path):
    with pytest.raises(InputError, match="corpus is not set"):
        _mine(tmp_path, "mined", pairs=str(base / "public_pairs"))
    with pytest.raises(InputError, match="k is 0"):
        _mine(tmp_path, "mined", pairs=str(base / "pairs"), k=0)


def test_the_rows_have_the_best_documents_that_are_no_answers(base):
    config = _config(
        base,
        pairs=str(base / "pairs"),
        hard_negatives={"run": str(base / "private" / "mined"), "count": 2, "skip": 1},
    )
    tokenizer = Tokenizer(base / "spiece.model")
    source = sources.load_source(config.pairs, "train")
    arrays = _arrays(config, source, tokenizer)
    found = read_trec_run(base / "private" / "mined" / mine.RUN_FILE)
    texts = {d.id: d.content for d in BeirDirectory(base / "pairs").documents()}
    for row, pair in enumerate(source.pairs):
        others = [d for d in found[pair.query_id] if d != pair.document_id]
        wanted = [content_key(texts[d]) for d in others[1:3]]
        assert arrays["negative_keys"][row].tolist() == wanted
    assert arrays["negative_ids"].shape == (60, 2, 24)


@pytest.mark.parametrize("unit", ["query", "pair"])
def test_the_table_on_disk_finds_what_a_loop_in_memory_does(tmp_path, unit):
    """Equal scores, several answers, copies of answers, queries without a hit."""
    draw = np.random.default_rng(7)
    pairs = tmp_path / "pairs"
    _tiny.write_pairs(pairs)
    beir = BeirDirectory(pairs)
    documents = [document.id for document in beir.documents()]
    texts = {document.id: document.content for document in beir.documents()}
    with open(pairs / "corpus.jsonl", "a") as file:
        for like in draw.choice(documents, 30, replace=False):
            row = {"_id": f"copy of {like}".replace(" ", "_"), "text": texts[like]}
            file.write(json.dumps({"title": "", **row}) + "\n")
            documents.append(row["_id"])
    judged = beir.qrels("train")
    with open(pairs / "qrels" / "train.tsv", "a") as file:
        for query in list(judged)[:20]:
            for document in draw.choice(documents, 3, replace=False):
                if document not in judged[query]:
                    file.write(f"{query}\t{document}\t{draw.integers(0, 3)}\n")
    run = {
        query: {
            str(document): float(draw.integers(4)) + draw.choice([0, 1e-9])
            for document in draw.choice(documents, 12, replace=False)
        }
        for query in [*list(judged)[5:], "another"]
    }
    write_trec_run(tmp_path / "run.trec", run)
    own = _section(tmp_path / "run.trec", 3, 2)
    source = sources.load_source(str(pairs), "train", unit)
    table = hard_negatives.NegativeTable(own, source)
    expected = _by_hand(own, beir, source.pairs)
    assert {len(texts) for texts in expected.values()} >= {0, 3}
    assert {query: table.texts(query) for query in expected} == expected


def test_judgements_of_zero_are_negatives_from_the_data(base, tmp_path):
    pairs = tmp_path / "pairs"
    _tiny.write_pairs(pairs)
    with open(pairs / "qrels" / "train.tsv", "a") as file:
        file.write("q3\td70\t0\nq3\td71\t2\n")
    config = _config(base, pairs=str(pairs), hard_negatives={"run": "judged"})
    source = sources.load_source(str(pairs), "train")
    arrays = _arrays(config, source, Tokenizer(base / "spiece.model"))
    (row,) = np.flatnonzero(arrays["negative_keys"][:, 0] >= 0)
    assert source.pairs[row].query_id == "q3"
    text = {d.id: d.content for d in BeirDirectory(pairs).documents()}["d70"]
    assert arrays["negative_keys"][row, 0] == content_key(text)


def test_judgements_are_those_of_the_split_that_is_trained_on(tmp_path):
    """A query that others judged in another split has another document there."""
    pairs = tmp_path / "pairs"
    _tiny.write_pairs(pairs)
    for split, document in (("train", "d71"), ("dev", "d70")):
        with open(pairs / "qrels" / f"{split}.tsv", "a") as file:
            file.write(f"q60\t{document}\t0\n")
    own = _section("judged", 1)
    source = sources.load_source(str(pairs), "dev")
    texts = {d.id: d.content for d in BeirDirectory(pairs).documents()}
    found = hard_negatives.NegativeTable(own, source).texts("q60")
    assert found == [texts["d70"]]


@pytest.mark.slow
def test_plain_training_takes_them_and_parts_of_a_batch(base):
    mined = {"run": str(base / "mined_public"), "corpus": str(base / "pairs")}
    weights = {}
    for name, options in {
        "without": {},
        "with": {"hard_negatives": mined},
        "in_parts": {"hard_negatives": mined, "rows_at_a_time": 2},
    }.items():
        t5 = {
            "init": "",
            "vocabulary": str(base / "spiece.model"),
            "t5": {**_tiny.SHAPE, "vocabulary_size": 330},
        }
        config = _config(base, **t5, **options, optimizer="adam")
        model, _ = _tiny.train_retriever(base / name, config)
        weights[name] = model.query_tower.get_layer("projection").get_weights()[0]
    assert np.abs(weights["with"] - weights["without"]).max() > 1e-5
    # Adam's first steps go by the gradient's sign; a few are next to 0.
    apart = np.abs(weights["in_parts"] - weights["with"])
    assert np.median(apart) < 1e-6 and apart.mean() < 1e-5


def test_public_negatives_take_a_rows_own_and_say_so(base):
    certificate = _train(
        base,
        "direct",
        pairs=str(base / "pairs"),
        method="public_negatives",
        epsilon=8.0,
        hard_negatives={"run": str(base / "private" / "mined"), "count": 2},
    )
    assert certificate["mechanism"]["sensitivity"] == pytest.approx(0.1)
    assert certificate["training"]["hard_negatives"] == (
        "the 2 best after 0, mined by bm25 from each query and public data alone"
    )
    assert certificate["fingerprints"]["hard_negatives"].startswith("keyed:")
    assert verify_certificate(certificate).problems == ()
    assert "BM25" in json.dumps(certificate["private_reads"])


@pytest.mark.parametrize("method", ["naive", "microbatch", "logit_dp"])
def test_other_methods_are_not_derived_for_them(base, method):
    with pytest.raises(InputError, match="derived for in-batch negatives alone"):
        _train(
            base,
            "refused",
            pairs=str(base / "pairs"),
            method=method,
            epsilon=8.0,
            hard_negatives={"run": str(base / "private" / "mined")},
        )
    assert not (base / "refused").exists()


def test_a_document_twice_in_a_run_is_refused(base, tmp_path):
    run = tmp_path / "run.trec"
    run.write_text("q3 Q0 d5 1 2.0 x\nq3 Q0 d6 2 1.0 x\nq3 Q0 d5 3 0.5 x\n")
    config = _config(base, pairs=str(base / "pairs"), hard_negatives={"run": str(run)})
    source = sources.load_source(config.pairs, "train")
    with pytest.raises(DataError, match="run.trec:3: document 'd5' comes a second"):
        _arrays(config, source, Tokenizer(base / "spiece.model"))


def test_what_negatives_follow_from_must_be_known(base, tmp_path, monkeypatch):
    def train(*_, **__):
        raise InterruptedError

    monkeypatch.setattr(plain_training, "train", train)
    run = tmp_path / "dense.trec"
    write_trec_run(run, {"genQ0": {"d3": 2.0}})
    given = {"run": str(run), "corpus": str(base / "pairs")}
    with pytest.raises(InputError, match="made_from is '', and there is no mining"):
        _train(base, "refused", hard_negatives=given)
    given["made_from"] = hard_negatives.BY_QUERY
    with pytest.raises(InterruptedError):  # what is declared may be trained with
        _train(base, "declared", hard_negatives=given)
    private = {"run": str(base / "private" / "mined"), "corpus": str(base / "pairs")}
    with pytest.raises(InputError, match="run is .*, whose guarantee is 'private'"):
        _train(base, "refused", hard_negatives=private)
    # Nor for another set whose ids are the same: it may have cost something.
    other = _tiny.write_set(tmp_path / "other", [("other", "d0", "Other.")] * 8)
    public = {"run": str(base / "mined_public"), "corpus": str(base / "pairs")}
    with pytest.raises(InputError, match="was not mined for split"):
        _train(base, "refused", pairs=other, hard_negatives=public)
    # Nor is every file beside it the one it tells of.
    shutil.copytree(base / "mined_public", tmp_path / "edited")
    write_trec_run(tmp_path / "edited" / "run.trec", {"genQ0": {"d3": 2.0}})
    edited = {**public, "run": str(tmp_path / "edited")}
    with pytest.raises(InputError, match="is not the run that"):
        _train(base, "refused", hard_negatives=edited)
    (tmp_path / "edited" / "mining.json").write_text("{}")
    with pytest.raises(DataError, match="not what `mine` writes"):
        _train(base, "refused", hard_negatives=edited)
    with pytest.raises(InputError, match="without judgements"):
        _train(base, "refused", hard_negatives={**public, "run": "judged"})
    assert not (base / "refused").exists()


def test_what_was_mined_for_another_split_is_refused(base):
    """Its documents follow from queries that ε does not count."""
    pairs = str(base / "pairs")
    fingerprint = sources.source_fingerprint(pairs, base / "private")
    mined = str(base / "private" / "mined")
    own = _section(mined, 2)
    source = sources.load_source(pairs, "train")
    assert "mined by bm25" in hard_negatives.origin(own, source, fingerprint)
    source = sources.load_source(pairs, "dev")
    with pytest.raises(InputError, match="was not mined for split 'dev'"):
        hard_negatives.origin(own, source, fingerprint)


def test_a_declared_origin_is_called_one(base, tmp_path):
    write_trec_run(tmp_path / "run.trec", {"q3": {"d5": 2.0}})
    own = _section(tmp_path / "run.trec", 2, 1, hard_negatives.BY_QUERY)
    source = sources.load_source(str(base / "pairs"), "train")
    assert hard_negatives.origin(own, source, "keyed:1") == (
        "the 2 best after 1, from a run declared to be made from each query and public "
        "data alone"
    )


def test_what_is_mined_for_a_private_set_has_its_certificate(
    base, tmp_path, monkeypatch
):
    """By the stage itself, without what is checked of an output that was made."""
    monkeypatch.setattr(releases, "check_made", lambda *_: None)
    _tiny.write_private_generator(tmp_path / "generator", base / "public", 8.0)
    certificate = read_certificate(tmp_path / "generator")
    rows = [("who sorts the array", "d0", "Sorts it.")]
    pairs = _tiny.write_set(tmp_path / "set", rows, certificate)
    paths = {"pairs": pairs, "corpus": str(base / "pairs")}
    _mine(tmp_path, "mined", **paths)
    assert read_certificate(tmp_path / "mined") == certificate


def test_documents_that_changed_in_their_place_are_mined_again(base, tmp_path):
    """Negatives would be documents that look like no answer any more."""
    shutil.copytree(base / "pairs", tmp_path / "corpus")
    paths = {"pairs": str(base / "public_pairs"), "corpus": str(tmp_path / "corpus")}
    _mine(tmp_path, "mined", **paths)
    _mine(tmp_path, "mined", **paths)
    lines = (tmp_path / "corpus" / "corpus.jsonl").read_text()
    (tmp_path / "corpus" / "corpus.jsonl").write_text(lines.replace("quickly", "fast"))
    with pytest.raises(InputError, match="from other inputs .*corpus"):
        _mine(tmp_path, "mined", **paths)


def test_no_document_with_an_answers_text_is_a_negative(base, tmp_path):
    pairs = tmp_path / "pairs"
    _tiny.write_pairs(pairs)
    texts = {d.id: d.content for d in BeirDirectory(pairs).documents()}
    with open(pairs / "corpus.jsonl", "a") as file:
        for name, like in (("twin", "d71"), ("same", "d3")):
            row = {"_id": name, "title": "", "text": texts[like]}
            file.write(json.dumps(row) + "\n")
    with open(pairs / "qrels" / "train.tsv", "a") as file:
        file.write("q3\td71\t1\n")
    run = tmp_path / "run.trec"
    hits = {"twin": 9.0, "same": 8.0, "d71": 7.0, "d3": 6.0, "d5": 5.0, "d6": 4.0}
    write_trec_run(run, {"q3": hits})
    config = _config(
        base, pairs=str(pairs), hard_negatives={"run": str(run), "count": 2}
    )
    source = sources.load_source(str(pairs), "train")
    arrays = _arrays(config, source, Tokenizer(base / "spiece.model"))
    (row,) = [i for i, pair in enumerate(source.pairs) if pair.query_id == "q3"]
    expected = [content_key(texts[name]) for name in ("d5", "d6")]
    assert arrays["negative_keys"][row].tolist() == expected
    # Rows without any hold nothing of it.
    others = np.delete(arrays["negative_ids"], row, axis=0)
    assert not others.any()


def test_an_edited_corpus_is_another_run(base, tmp_path):
    config = _config(
        base,
        pairs=str(base / "pairs"),
        hard_negatives={"run": str(base / "private" / "mined")},
    )
    before = hard_negatives.inputs(config.hard_negatives, config.pairs, tmp_path)
    shutil.copytree(base / "pairs", tmp_path / "corpus")
    config.hard_negatives.corpus = str(tmp_path / "corpus")
    assert (
        hard_negatives.inputs(config.hard_negatives, config.pairs, tmp_path) == before
    )
    lines = (tmp_path / "corpus" / "corpus.jsonl").read_text()
    (tmp_path / "corpus" / "corpus.jsonl").write_text(lines.replace("quickly", "fast"))
    after = hard_negatives.inputs(config.hard_negatives, config.pairs, tmp_path)
    assert {name for name in after if after[name] != before[name]} == {
        "hard_negatives_corpus"
    }


def test_bad_runs_are_told_apart(base, tmp_path):
    def given(hits, **options):
        run = tmp_path / f"run{len(list(tmp_path.iterdir()))}.trec"
        write_trec_run(run, hits)
        own = {"run": str(run), "corpus": str(base / "pairs"), **options}
        return {"made_from": hard_negatives.BY_QUERY, **own}

    for bad, error, message in (
        (given({"q99": {"d3": 1.0}}), InputError, "no document for any query"),
        (given({"genQ0": {"d999": 1.0}}), DataError, "'d999' is not in"),
        (given({"genQ0": {"d3": 1.0}}, count=0), InputError, "count is 0"),
        (given({"genQ0": {"d3": 1.0}}, skip=-1), InputError, "skip is -1"),
        (
            {"run": str(tmp_path / "none.trec"), "corpus": str(base / "pairs")},
            InputError,
            "there is no file",
        ),
    ):
        with pytest.raises(error, match=message):
            _train(base, "refused", hard_negatives=bad)
    assert not (base / "refused").exists()


def test_however_many_copies_of_an_answer_the_best_others_are_kept(base, tmp_path):
    """Twelve of them are ranked above the two documents that are none."""
    shutil.copytree(base / "pairs", tmp_path / "pairs")
    beir = BeirDirectory(tmp_path / "pairs")
    answer = next(d for d in beir.documents() if d.id == "d3")
    copies = [f"copy{number}" for number in range(12)]
    with open(tmp_path / "pairs" / "corpus.jsonl", "a") as corpus:
        for name in copies:
            document = {"_id": name, "title": "", "text": answer.content}
            corpus.write(json.dumps(document) + "\n")
    ranking = {name: 100.0 - place for place, name in enumerate(copies)}
    ranking.update(d5=2.0, d6=1.0, d7=0.5)
    write_trec_run(tmp_path / "run.trec", {"q3": ranking}.items(), tag="a")
    texts = {d.id: d.content for d in beir.documents()}
    source = sources.load_source(str(tmp_path / "pairs"))
    for skip, kept in ((0, ["d5", "d6"]), (1, ["d6", "d7"])):
        own = _section(tmp_path / "run.trec", 2, skip, hard_negatives.BY_QUERY)
        table = hard_negatives.NegativeTable(own, source)
        assert table.texts("q3") == [texts[name] for name in kept]
        assert table.texts("q4") == []


def test_a_long_ranking_is_read_by_keys(base, tmp_path, monkeypatch):
    """Work of the database, in its own steps: twice as many queries, about twice it.

    Comparing each candidate with all answers took hours for 18,000 queries.
    """
    steps = {}
    open_unnamed = hard_negatives.pair_table.open_unnamed
    for queries in (200, 400):
        _tiny.write_pairs(tmp_path / f"{queries}", train=queries)
        count = [0]

        def counted(schema, count=count):
            store = open_unnamed(schema)
            store.set_progress_handler(lambda: count.__setitem__(0, count[0] + 1), 100)
            return store

        monkeypatch.setattr(hard_negatives.pair_table, "open_unnamed", counted)
        ranking = {f"d{number}": 100.0 - number for number in range(40)}
        write_trec_run(
            tmp_path / f"{queries}.trec",
            ((f"q{number}", ranking) for number in range(queries)),
            tag="a",
        )
        own = _section(tmp_path / f"{queries}.trec", 5, 0, hard_negatives.BY_QUERY)
        source = sources.load_source(str(tmp_path / f"{queries}"))
        table = hard_negatives.NegativeTable(own, source)
        assert len(table.ids(f"q{queries - 1}")) == 5
        steps[queries] = count[0]
    assert steps[200] > 100 and steps[400] < 2.6 * steps[200], steps
