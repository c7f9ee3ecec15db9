"""Public pretraining: its rows and its batches."""

import itertools

import numpy as np
import pytest

from tfdpsq.data import (
    PROMPT,
    Document,
    Tokenizer,
    pseudo_pairs,
    train_vocabulary,
    write_rows,
)
from tfdpsq.generator import pretraining

_NOUNS = "array string file socket tensor matrix graph queue table buffer".split()
_VERBS = "sorts reads writes merges splits copies counts filters rounds packs".split()
LENGTH, QUERY = 40, 14
VOCABULARY = 315


def _documents(count=30):
    random = np.random.default_rng(0)
    documents = []
    for i in range(count):
        lines = []
        for _ in range(random.integers(1, 8)):
            noun, other = random.choice(_NOUNS, 2, replace=False)
            lines.append(
                f"It {random.choice(_VERBS)} the {noun} before the {other} "
                f"is read. Then the {other} is given back."
            )
        title = f"Number {i}" if i % 2 else ""
        documents.append(Document(f"d#{i}", title, "\n".join(lines)))
    return documents


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary") / "spiece.model"
    train_vocabulary([d.content for d in _documents()] * 3, VOCABULARY, path)
    return Tokenizer(path)


def _pairs(tokenizer, seed=0, **shares):
    lengths = LENGTH, QUERY
    return pretraining.pair_rows(
        _documents(), tokenizer, lengths, 2, seed, 20, **shares
    )


@pytest.fixture(scope="module")
def store(tokenizer, tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows") / "pairs", _pairs(tokenizer))


def _text(tokenizer, ids):
    return [text.decode() for text in tokenizer.decode(ids).numpy()]


# -- Rows ------------------------------------------------------------------------


@pytest.mark.parametrize("words", [25, 1000])
def test_passages_are_the_text_cut_at_line_ends(words):
    for document in _documents():
        parts = list(pretraining.passages(document, words))
        assert "".join(part.text for part in parts) == document.text
        assert [part.title for part in parts[1:]] == [""] * (len(parts) - 1)
        assert parts[0].title == document.title
        ids = [f"{document.id}#{number}" for number in range(len(parts))]
        assert [part.id for part in parts] == ids
        sizes = [len(part.text.split()) for part in parts]
        for part, size in zip(parts[:-1], sizes):
            assert part.text.endswith(("\n", ". "))
            assert size >= words
            # It ends with the sentence in which it comes to that many; these have at
            # most eight words.
            assert size < words + 8
        if len(parts) > 1:
            assert sizes[-1] >= words / 2


def _joined(chunks):
    chunks = list(chunks)
    return {name: np.concatenate([c[name] for c in chunks]) for name in chunks[0]}


@pytest.mark.parametrize("whole, bare", [(0.0, 0.0), (1.0, 1.0)])
def test_pair_rows_hold_the_pseudo_queries_of_the_passages(tokenizer, whole, bare):
    rows = _joined(_pairs(tokenizer, whole=whole, bare=bare))
    passages = [p for d in _documents() for p in pretraining.passages(d, 20)]
    content = {passage.id: passage.content for passage in passages}
    expected = list(pseudo_pairs(passages, 0, 2))
    assert len(rows["query_ids"]) == len(expected) > 60
    for name, width in (("document", LENGTH), ("query", QUERY)):
        ids, lengths = rows[f"{name}_ids"], rows[f"{name}_lengths"]
        assert ids.dtype == lengths.dtype == np.int32
        assert ids.shape == (len(expected), width)
        inside = np.arange(width) < lengths[:, None]
        assert (ids[np.arange(len(ids)), lengths - 1] == 1).all()
        assert ((ids != 0) == inside).all()
    queries = _text(tokenizer, rows["query_ids"])
    documents = _text(tokenizer, rows["document_ids"])
    removed = 0
    for row, pair in enumerate(expected):
        assert pair.query.startswith(queries[row])
        # Decoding gives single spaces.
        text = content[pair.document_id] if whole else pair.document
        text = " ".join(("" if bare else PROMPT).split() + text.split())
        assert text.startswith(documents[row])
        assert pair.query in " ".join(content[pair.document_id].split())
        removed += pair.query not in " ".join(pair.document.split())
    assert removed > len(expected) / 2
    # One key a document, whatever passages it was cut into.
    keys = rows["document_key"]
    owner = [pair.document_id.rpartition("#")[0] for pair in expected]
    assert keys.dtype == np.int64 and keys.min() >= 0
    assert len(set(zip(owner, keys.tolist()))) == len(set(owner))
    assert len(set(keys.tolist())) == len(set(owner))


def test_shares_of_rows_without_prompt_and_of_whole_documents(tokenizer):
    forms = {
        form: _joined(_pairs(tokenizer, whole=form[0], bare=form[1]))["document_ids"]
        for form in itertools.product((0.0, 1.0), repeat=2)
    }
    counts = np.zeros(2)
    for seed in range(10):
        rows = _joined(_pairs(tokenizer, seed))
        if seed == 0:  # the same sentences as in `forms`
            for row, *others in zip(rows["document_ids"], *forms.values()):
                assert any((row == other).all() for other in others)
        texts = _text(tokenizer, rows["document_ids"])
        bare = sum(not text.startswith(PROMPT.strip()) for text in texts)
        counts += bare, len(texts)
    # Binomial: of about 1,000, deviation 16.
    assert abs(counts[0] / counts[1] - 0.5) < 0.08


def test_two_in_a_hundred_are_held_out_by_their_id_alone():
    held = [pretraining.is_held_out(f"document-{i}") for i in range(20_000)]
    # Binomial: 400, deviation 19.8.
    assert abs(sum(held) - 400) < 100
    assert held == [pretraining.is_held_out(f"document-{i}") for i in range(20_000)]


def test_long_sentences_without_ends_stay_whole():
    text = "word " * 300 + "end."
    assert [p.text for p in pretraining.passages(Document("d", "t", text), 50)] == [
        text
    ]


# -- Batches ---------------------------------------------------------------------


def test_a_batch_is_a_function_of_seed_and_number_alone(store):
    one, same = (pretraining.Batches(store, 8, 0) for _ in range(2))
    forward = [one(number) for number in range(4)]
    backward = [same(number) for number in (3, 2, 1, 0)][::-1]
    for first, second in zip(forward, backward):
        for name in first:
            np.testing.assert_array_equal(first[name], second[name])
    others = [*forward, pretraining.Batches(store, 8, 1)(0)]
    for one, other in itertools.combinations(others, 2):
        assert (one["query_ids"] != other["query_ids"]).any()


def test_data_goes_on_at_a_step_and_is_shared_by_replicas(store, strategy_of):
    batches = pretraining.Batches(store, 8, 0)
    found = list(batches.dataset(3, 5).as_numpy_iterator())
    assert len(found) == 2
    for number, batch in zip((3, 4), found):
        for name, values in batches(number).items():
            np.testing.assert_array_equal(batch[name], values)
    strategy = strategy_of(2)
    with strategy.scope():
        shared = next(iter(batches.dataset(3, 5)))
    for name, values in found[0].items():
        parts = strategy.experimental_local_results(shared[name])
        np.testing.assert_array_equal(np.concatenate(parts), values)
