"""Keyword queries cut from public documents: a stand-in for private queries.

How to spend ε (which weights to train, how fast, clipped where) must be chosen before
the private pairs are touched, or the choice itself is a private read. So it is chosen
on pairs that are made of the documents alone. Whole sentences would not do where a
model was pretrained to write sentences: what is to be learned from private queries is
their *style*. Keywords are a style that no pretraining here has seen.
"""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Callable, Iterable, Iterator

from tfdpsq.data.pseudo_queries import pseudo_pairs
from tfdpsq.data.texts import Document, Pair
from tfdpsq.validation import positive_integer

_WORD = re.compile(r"[^\W_]+")
# Documents whose words are counted, so that memory does not grow with the corpus.
_COUNTED = 20_000


def keyword_pairs(
    documents: Callable[[], Iterable[Document]], seed: int, most_words: int = 5
) -> Iterator[Pair]:
    """One keyword query for each document that has a sentence to make it of.

    A sentence is cut out as in `pseudo_pairs`; of its words the rarest are kept, in
    their order and lower-cased.

    Args:
      documents: gives the public documents, streamed; called twice.
      seed: any integer; draws the sentences.
      most_words: words of a query at most.

    Yields:
      Pairs whose query is one to `most_words` words; `document` is what is left of the
      document.
    """
    positive_integer("most_words", most_words)
    counts: collections.Counter[str] = collections.Counter()
    for document in itertools.islice(documents(), _COUNTED):
        counts.update(set(_words(document.text)))
    for pair in pseudo_pairs(documents(), seed):
        words = list(dict.fromkeys(_words(pair.query)))
        rarest = set(sorted(words, key=lambda word: (counts[word], word))[:most_words])
        query = " ".join(word for word in words if word in rarest)
        if query:
            yield Pair(pair.query_id, query, pair.document_id, pair.document)


def _words(text: str) -> list[str]:
    return [word.casefold() for word in _WORD.findall(text)]
