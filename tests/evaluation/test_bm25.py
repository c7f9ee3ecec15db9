"""BM25 against its formula written out, and against the rules it states."""

import collections
import math
import random
import weakref

import pytest

from tfdpsq.evaluation import BM25, bm25_streamed
from tfdpsq.evaluation.ranking.bm25 import words
from tfdpsq.validation import InputError


def _naive(documents, query, k1, b):
    """Lucene's BM25 in float64, document by document."""
    bags = {d: collections.Counter(words(text)) for d, text in documents.items()}
    lengths = {d: sum(bag.values()) for d, bag in bags.items()}
    mean = sum(lengths.values()) / len(lengths)
    scores = {}
    for document, bag in bags.items():
        total = 0.0
        for word in words(query):  # a repeated word counts again
            df = sum(word in other for other in bags.values())
            idf = math.log(1 + (len(bags) - df + 0.5) / (df + 0.5))
            norm = k1 * (1 - b + b * lengths[document] / mean)
            total += idf * bag[word] / (bag[word] + norm)
        if total > 0:
            scores[document] = total
    return scores


def _corpus(seed):
    draw = random.Random(seed)
    vocabulary = [f"word{n}" for n in range(40)] + ["the", "of", "Tensor", "naïve"]
    weights = [1 / (n + 1) for n in range(len(vocabulary))]

    def text(length):
        return " ".join(draw.choices(vocabulary, weights, k=length))

    documents = {f"d{n}": text(draw.randint(0, 60)) for n in range(50)}
    queries = {f"q{n}": text(draw.randint(1, 8)) for n in range(20)}
    return documents, queries


@pytest.mark.parametrize(
    ("seed", "k1", "b"), [(0, 1.5, 0.75), (1, 0.9, 0.4), (2, 2, 0)]
)
def test_equals_the_formula(seed, k1, b):
    documents, queries = _corpus(seed)
    run = BM25(documents, k1=k1, b=b).search(queries, k=len(documents))
    for query_id, text in queries.items():
        expected = _naive(documents, text, k1, b)
        assert run.get(query_id, {}) == pytest.approx(expected, rel=2e-6)


def test_ties_at_the_cut_go_by_id_descending():
    # Five equal documents: as strings d9 > d7 > d30 > d10 > d1.
    documents = {d: "same words here" for d in ("d1", "d30", "d9", "d10", "d7")}
    documents["other"] = "nothing alike"
    hits = BM25(documents).search({"q": "words"}, k=3)["q"]
    assert list(hits) == ["d9", "d7", "d30"]


def test_empty_documents_are_allowed_but_not_a_corpus_of_them():
    assert list(BM25({"a": "", "b": "word"}).search({"q": "word"})["q"]) == ["b"]
    with pytest.raises(InputError, match="none of the 2 documents"):
        BM25({"a": "", "b": "the"})
    with pytest.raises(InputError, match="none of the 0 documents"):
        BM25({})


def test_bad_settings_are_refused():
    for settings in ({"k1": 0}, {"b": 2}):
        with pytest.raises(InputError, match=next(iter(settings))):
            BM25({"a": "word"}, **settings)
    with pytest.raises(InputError, match="'a' comes twice"):
        BM25([("a", "word"), ("a", "other")])
    with pytest.raises(InputError, match="none of the 2 documents"):
        bm25_streamed({"a": "", "b": "the"}.items, {"q": "word"})


def _letters(count, seed=5):
    """Documents of few words, so that many scores are equal, and queries."""
    draw = random.Random(seed)
    texts = {
        f"d{n}": " ".join(draw.choices(["aa", "bb", "cc", "dd", "the"], k=n % 4))
        for n in range(count)
    }
    return texts, {"q0": "aa bb", "q1": "cc cc dd", "q2": "zz", "q3": "the", "q4": ""}


@pytest.mark.parametrize(
    "given, k, chunk",
    [("zipf", 10, 7), ("zipf", 100, 1), ("ties", 1, 7), ("ties", 10, 1)],
)
def test_streaming_equals_the_index(chunk, k, given):
    """To the last bit, ties at the cut included, however the documents are cut."""
    documents, queries = _corpus(4) if given == "zipf" else _letters(60)
    index = BM25(documents, k1=0.9, b=0.4)
    run, settings = bm25_streamed(
        documents.items, queries, k, k1=0.9, b=0.4, chunk=chunk
    )
    expected = index.search(queries, k)
    assert run == expected and settings == index.settings
    assert list(run) == list(expected)
    for query_id, hits in run.items():
        assert list(hits.items()) == list(expected[query_id].items())


def test_streaming_keeps_no_document():
    """A chunk at a time: whoever reads on has let go of what came before."""
    alive = []

    class Text(str):
        """A text whose life can be watched."""

        def __init__(self, *_):
            alive.append(weakref.ref(self))

    def documents():
        for number in range(40):
            yield f"d{number}", Text(f"word{number % 3} and more")
            assert sum(ref() is not None for ref in alive) <= 9

    run, _ = bm25_streamed(documents, {"q": "word1"}, k=3, chunk=4)
    assert list(run["q"]) == ["d7", "d4", "d37"] and len(alive) == 80
