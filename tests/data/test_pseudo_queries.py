"""Pseudo-queries are prose of the document, the same whatever the order."""

import random

from tfdpsq.data.pseudo_queries import pseudo_pairs
from tfdpsq.data.texts import Document

PROSE = Document(
    "p",
    "The title",
    "The castle was built in 1320 by a duke. It fell into ruin after the long war. "
    "Today a museum shows what is left of it, and many people visit.",
)
DOCSTRING = Document(
    "d",
    "",
    """This operation clips every gradient to a fixed norm before
the average is taken.

Args:
  norm: The largest norm that a gradient may keep.
  axis: int

x : array_like of shape (n,)
    The values that should be clipped here.

Returns:
  A tensor with clipped values.

>>> clip(x, 3.0) is not None and this is a doctest
True
```python
value = clip(gradient, norm=1.0)
```
""",
)


def pairs_of(document, seed=0, **kwargs):
    return list(pseudo_pairs([document], seed, **kwargs))


def test_sentences_of_prose_are_found():
    found = {pair.query for pair in pairs_of(PROSE, per_document=10)}
    assert found == {
        "The castle was built in 1320 by a duke",
        "It fell into ruin after the long war",
        "Today a museum shows what is left of it, and many people visit",
    }


def test_paragraphs_of_docstrings_come_before_their_lists():
    found = [pair.query for pair in pairs_of(DOCSTRING, per_document=10)]
    assert found == [
        "This operation clips every gradient to a fixed norm before the average is "
        + "taken"
    ]


def test_code_headers_and_types_of_docstrings_are_passed_over():
    lists = Document("l", "", DOCSTRING.text.split("\n\n", 1)[1])
    found = {pair.query for pair in pairs_of(lists, per_document=10)}
    assert found == {
        "The largest norm that a gradient may keep",
        "The values that should be clipped here",
        "A tensor with clipped values",
    }


def test_the_sentence_is_taken_out_of_the_document():
    """Else a retriever could learn to match the words alone."""
    for pair in pairs_of(PROSE, per_document=10):
        assert pair.query not in pair.document
        assert pair.document.startswith("The title ")
        left = len(PROSE.content.split()) - len(pair.query.split())
        # A final stop may stand alone where clauses were cut.
        assert len(pair.document.split()) in (left, left + 1)


def test_the_choice_depends_on_seed_and_document_alone():
    documents = [
        Document(
            f"d{i}", "", " ".join(f"Sentence {w} of text {i} here." for w in "abcdefgh")
        )
        for i in range(30)
    ]
    first = {p.document_id: p.query for p in pseudo_pairs(documents, 1)}
    mixed = random.Random(0).sample(documents[:20], 20)
    for pair in pseudo_pairs(mixed, 1):
        assert first[pair.document_id] == pair.query
    other = {p.document_id: p.query for p in pseudo_pairs(documents, 2)}
    assert sum(first[key] != other[key] for key in first) > 15  # 7/8 of 30 expected.
