"""BM25 against its formula written out, and against the rules it states."""

import collections
import math
import random
import weakref

import pytest
from bm25s.stopwords import STOPWORDS_EN

from tfdpsq.evaluation import BM25
from tfdpsq.validation import InputError
from tfdpsq.words import words_of


def words(text):
    return [word for word in next(words_of([text])) if word not in STOPWORDS_EN]


def _naive(documents, query, k1=1.5, b=0.75):
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


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_equals_the_formula(seed):
    documents, queries = _corpus(seed)
    run = BM25(documents).search(queries, k=len(documents))
    for query_id, text in queries.items():
        expected = _naive(documents, text)
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


def test_bad_documents_are_refused():
    with pytest.raises(InputError, match="id comes twice"):
        BM25(lambda: [("a", "word"), ("a", "other")])
    with pytest.raises(InputError, match="none of the 2 documents"):
        BM25({"a": "", "b": "the"}.items, in_memory=0).search({"q": "word"})


def _letters(count, seed=5):
    """Documents of few words, so that many scores are equal, and queries."""
    draw = random.Random(seed)
    texts = {
        f"d{n}": " ".join(draw.choices(["x", "bb", "cc", "日本", "the"], k=n % 4))
        for n in range(count)
    }
    return texts, {"q0": "X bb", "q1": "cc cc 日本", "q2": "z", "q3": "the", "q4": ""}


@pytest.mark.parametrize(
    "given, k, chunk",
    [("zipf", 10, 7), ("zipf", 100, 1), ("ties", 1, 7), ("ties", 10, 1)],
)
def test_streaming_equals_the_index(chunk, k, given):
    """To the last bit, ties at the cut included, however the documents are cut."""
    documents, queries = _corpus(4) if given == "zipf" else _letters(60)
    index = BM25(documents)
    streamed = BM25(documents.items, in_memory=len(documents) - 1, chunk=chunk)
    run, expected = streamed.search(queries, k), index.search(queries, k)
    assert run == expected and streamed.settings == index.settings
    assert BM25(documents.items).search(queries, k) == expected
    assert list(run) == list(expected)
    for query_id, hits in run.items():
        assert list(hits.items()) == list(expected[query_id].items())


def test_streaming_keeps_no_document():
    """Whoever reads on has let go of what came before, but for two batches of words."""
    alive = []

    class Text(str):
        """A text whose life can be watched."""

        def __init__(self, *_):
            alive.append(weakref.ref(self))

    def documents():
        for number in range(5000):
            yield f"d{number}", Text(f"word{number % 3} and more")
            if number % 500 == 0:
                assert sum(ref() is not None for ref in alive) <= 2100

    run = BM25(documents, in_memory=9, chunk=4).search({"q": "word1"}, k=3)
    assert list(run["q"]) == ["d997", "d994", "d991"] and len(alive) == 10_010
