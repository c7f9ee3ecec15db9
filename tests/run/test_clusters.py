"""Clusters of documents by what they are about, from a file as from memory."""

import pickle

import numpy as np

from tfdpsq.data.texts import Document
from tfdpsq.run.common.documents import DocumentClusters

_SUBJECTS = (
    "river bank water boat fish flood bridge delta".split(),
    "court judge appeal verdict law statute jury clerk".split(),
    "oven flour yeast bread butter sugar dough salt".split(),
)


def _documents(count=240, seed=0):
    """Documents of eight words of one subject each, in turn, and of words of all."""
    random = np.random.default_rng(seed)
    for number in range(count):
        own = random.choice(_SUBJECTS[number % len(_SUBJECTS)], 8)
        text = " ".join([*own, *random.choice(["the", "a", "and", "of"], 8)])
        yield Document(f"d{number}", "", text)


def _fitted(**options):
    return DocumentClusters.fit(_documents, **{"clusters": 3, "seed": 0, **options})


def test_documents_on_one_subject_share_a_cluster():
    fitted = _fitted()
    found = fitted.of([document.content for document in _documents(90, seed=1)])
    of_subject = [set(found[at::3].tolist()) for at in range(3)]
    assert [len(each) for each in of_subject] == [1, 1, 1]
    assert len(set.union(*of_subject)) == len(fitted.centres) == 3
    assert fitted.of([]).shape == (0,)
    # A document without a known word has a cluster as well.
    assert fitted.of(["", "12"]).shape == (2,)


def test_clusters_depend_on_the_document_alone():
    fitted = _fitted(clusters=7)
    contents = [document.content for document in _documents(50, seed=2)]
    found = fitted.of(contents)
    alone = np.concatenate([fitted.of([content]) for content in contents])
    assert found.tolist() == alone.tolist() and len(set(found.tolist())) > 3
    loaded = pickle.loads(pickle.dumps(fitted))  # as Beam's workers have it
    streamed = list(loaded.stream(_documents(50, seed=2)))
    assert [cluster for _, cluster in streamed] == found.tolist()
    assert [document.id for document, _ in streamed] == [f"d{n}" for n in range(50)]
