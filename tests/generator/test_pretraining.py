"""Public pretraining: its rows, its batches, its losses, and what is watched."""

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
from tfdpsq.generator import Preprocessor, pretraining
from tfdpsq.generator.pretraining import SENTINELS
from tfdpsq.validation import InputError

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


@pytest.fixture(scope="module")
def stores(tokenizer, tmp_path_factory):
    """Rows of pseudo-queries and of stretches of text, on disk."""
    path = tmp_path_factory.mktemp("rows")
    preprocessor = Preprocessor(tokenizer, document_length=LENGTH, query_length=QUERY)
    pairs = pretraining.pair_rows(_documents(), preprocessor, 2, 0, 20)
    texts = pretraining.text_rows(_documents(), tokenizer, LENGTH)
    return write_rows(path / "pairs", pairs), write_rows(path / "texts", texts)


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


def test_pair_rows_hold_the_pseudo_queries_of_the_passages(tokenizer, stores):
    pairs = stores[0].take(np.arange(len(stores[0])))
    passages = [p for d in _documents() for p in pretraining.passages(d, 20)]
    whole = {passage.id: passage.content for passage in passages}
    expected = list(pseudo_pairs(passages, 0, 2))
    assert len(stores[0]) == len(expected) > 60
    for name, width in (("document", LENGTH), ("whole", LENGTH), ("query", QUERY)):
        ids, lengths = pairs[f"{name}_ids"], pairs[f"{name}_lengths"]
        assert ids.dtype == lengths.dtype == np.int32
        assert ids.shape == (len(expected), width)
        inside = np.arange(width) < lengths[:, None]
        assert (ids[np.arange(len(ids)), lengths - 1] == 1).all()
        assert ((ids != 0) == inside).all()
    queries = _text(tokenizer, pairs["query_ids"])
    documents = _text(tokenizer, pairs["document_ids"])
    wholes = _text(tokenizer, pairs["whole_ids"])
    removed = 0
    for row, pair in enumerate(expected):
        assert pair.query.startswith(queries[row])
        # Decoding gives single spaces.
        for given, text in (
            (documents[row], PROMPT + pair.document),
            (wholes[row], PROMPT + whole[pair.document_id]),
        ):
            assert " ".join(text.split()).startswith(given)
        assert pair.query in " ".join(whole[pair.document_id].split())
        removed += pair.query not in " ".join(pair.document.split())
    assert removed > len(expected) / 2
    # One key a document, whatever passages it was cut into.
    owner = [pair.document_id.rpartition("#")[0] for pair in expected]
    assert pairs["document_key"].dtype == np.int64 and pairs["document_key"].min() >= 0
    assert len(set(zip(owner, pairs["document_key"].tolist()))) == len(set(owner))
    assert len(set(pairs["document_key"].tolist())) == len(set(owner))


def test_text_rows_hold_every_token_of_the_documents(tokenizer, stores):
    texts = stores[1].take(np.arange(len(stores[1])))
    found = [
        row[:length].tolist()
        for row, length in zip(texts["text_ids"], texts["text_lengths"])
    ]
    assert not any(row[n:].any() for row, n in zip(texts["text_ids"], map(len, found)))
    expected = []
    for ids in tokenizer.pieces([d.content for d in _documents()]):
        expected += [ids[i : i + LENGTH].tolist() for i in range(0, len(ids), LENGTH)]
    assert found == expected
    nothing = list(pretraining.text_rows([Document("x", "", "")], tokenizer, 5))
    assert [rows["text_ids"].shape for rows in nothing] == [(0, 5)]


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


def _batches(stores, tokenizer, seed=0, pairs=8, texts=4, **shares):
    return pretraining.Batches(
        *stores, tokenizer, VOCABULARY + SENTINELS, pairs, texts, seed, **shares
    )


def test_a_batch_is_a_function_of_seed_and_number_alone(stores, tokenizer):
    one, same = _batches(stores, tokenizer), _batches(stores, tokenizer)
    forward = [one(number) for number in range(4)]
    backward = [same(number) for number in (3, 2, 1, 0)][::-1]
    for first, second in zip(forward, backward):
        assert first.keys() == second.keys()
        for name in first:
            np.testing.assert_array_equal(first[name], second[name])
    for one, other in itertools.combinations(
        [*forward, _batches(stores, tokenizer, seed=1)(0)], 2
    ):
        assert (one["query_ids"] != other["query_ids"]).any()


def test_batches_hold_pseudo_queries_and_then_corrupted_texts(stores, tokenizer):
    batch = _batches(stores, tokenizer, whole=0.0, bare=0.0)(5)
    shapes = {name: (v.shape, v.dtype) for name, v in batch.items()}
    assert shapes == {
        "document_ids": ((12, LENGTH), np.int32),
        "document_lengths": ((12,), np.int32),
        "query_ids": ((12, QUERY), np.int32),
        "query_lengths": ((12,), np.int32),
        "document_key": ((8,), np.int64),
    }
    pairs = stores[0].take(np.arange(len(stores[0])))
    known = {
        (d.tobytes(), q.tobytes(), int(k))
        for d, q, k in zip(
            pairs["document_ids"], pairs["query_ids"], pairs["document_key"]
        )
    }
    for row in range(8):
        d, q = batch["document_ids"][row], batch["query_ids"][row]
        assert (d.tobytes(), q.tobytes(), int(batch["document_key"][row])) in known
    sentinels = batch["query_ids"][8:, 0]
    assert (sentinels == VOCABULARY + SENTINELS - 1).all()
    assert batch["document_ids"].max() < VOCABULARY + SENTINELS


def test_shares_of_rows_without_prompt_and_of_whole_documents(stores, tokenizer):
    sources = {}
    for whole, bare in itertools.product((0.0, 1.0), repeat=2):
        batch = _batches(stores, tokenizer, whole=whole, bare=bare)(2)
        sources[whole, bare] = batch
        ids, lengths = batch["document_ids"][:8], batch["document_lengths"][:8]
        assert (ids[np.arange(8), lengths - 1] == 1).all()
        assert ((ids != 0) == (np.arange(LENGTH) < lengths[:, None])).all()
    pairs = stores[0].take(np.arange(len(stores[0])))
    for whole, name in ((0.0, "document"), (1.0, "whole")):
        dressed = sources[whole, 0.0]["document_ids"][:8]
        rows = {row.tobytes() for row in pairs[f"{name}_ids"]}
        assert all(row.tobytes() in rows for row in dressed)
        undressed = _text(tokenizer, sources[whole, 1.0]["document_ids"][:8])
        for one, other in zip(_text(tokenizer, dressed), undressed):
            assert one.startswith(PROMPT.strip())
            assert one == f"{PROMPT}{other}"
    # The seed draws whose; the shares are those asked for: of 800, deviation 14.
    batches = _batches(stores, tokenizer, pairs=400, whole=0.3, bare=0.5)
    bare = 0
    for number in (0, 1):
        found = _text(tokenizer, batches(number)["document_ids"][:400])
        bare += sum(not text.startswith(PROMPT.strip()) for text in found)
    assert abs(bare - 400) < 75


def test_sentinels_need_embeddings_of_their_own(stores, tokenizer):
    with pytest.raises(InputError, match="414 embeddings, and needs 100 for sentinels"):
        pretraining.Batches(
            *stores, tokenizer, VOCABULARY + SENTINELS - 1, 2, 2, seed=0
        )


def test_shares_of_replicas_have_their_part_of_both_kinds_of_rows(stores, tokenizer):
    batches = _batches(stores, tokenizer)
    whole, shares = batches(3), [batches(3, replica, 4) for replica in range(4)]
    for name in whole:
        pairs = np.concatenate([share[name][:2] for share in shares])
        np.testing.assert_array_equal(pairs, whole[name][:8])
        if name != "document_key":
            texts = np.concatenate([share[name][2:] for share in shares])
            np.testing.assert_array_equal(texts, whole[name][8:])


def test_data_goes_on_at_a_step(stores, tokenizer):
    batches = _batches(stores, tokenizer)
    found = list(batches.dataset(3, 5).as_numpy_iterator())
    assert len(found) == 2
    for number, batch in zip((3, 4), found):
        np.testing.assert_array_equal(batch["query_ids"], batches(number)["query_ids"])
