"""`prepare` on documents that give no public query."""

import json
import shutil

import numpy as np
import pytest
from helpers import framed

from tfdpsq.data import Document, write_beir
from tfdpsq.run.stages.prepare import STAGE
from tfdpsq.validation import InputError

CHINESE = "这个函数对数组进行排序并返回结果。它需要第二个参数。"


def _run(folder, texts, size=0):
    judgements = {split: [("q0", "d0", 1)] for split in ("train", "test")}
    documents = [Document(f"d{i}", "", text) for i, text in enumerate(texts)]
    write_beir(folder / "pairs", documents, [("q0", "排序")], judgements)
    given = {"data": str(folder / "pairs"), "vocabulary_size": size}
    return framed.run(STAGE, folder / "release" / "prepare", **given)


def test_documents_without_a_sentence_are_refused_by_their_name(tmp_path):
    with pytest.raises(InputError, match="data is .*: none of its 3") as refused:
        _run(tmp_path, ["短", "too short", "x = [1, 2]; y = f(x, *z)"])
    said = str(refused.value)
    assert "3 to 25 words to cut" in said and "partial" not in said
    assert not (tmp_path / "release").exists()


def test_one_document_with_a_sentence_is_enough(tmp_path):
    made = _run(tmp_path, ["too short", CHINESE])
    assert made["result"] == {"documents": 2, "queries": 1}


def test_release_is_the_same_whatever_people_asked(tmp_path):
    """Its guarantee is "public": also the vocabulary is of the documents alone."""
    words = [f"{a}{b}{c}" for a in "bdfgk" for b in "aeiou" for c in "lmnrst"]
    draws = np.random.default_rng(0)
    documents = [
        Document(f"d{n}", "", " ".join(draws.choice(words, 12)) + ".")
        for n in range(60)
    ]
    made = []
    for name, asked in (("one", words), ("other", ["zyx" * n for n in range(1, 9)])):
        ids = [f"q{n}" for n in range(len(asked))]
        pairs = tmp_path / "pairs"
        shutil.rmtree(pairs, ignore_errors=True)
        write_beir(
            pairs,
            documents,
            [*zip(ids, asked)],
            {split: [(each, "d0", 1) for each in ids] for split in ("train", "test")},
        )
        out = tmp_path / "release" / name
        framed.run(STAGE, out, data=str(pairs), vocabulary_size=300)
        files = {path.relative_to(out): path for path in out.rglob("*")}
        made.append(
            {
                name: path.read_bytes()
                for name, path in files.items()
                if path.is_file() and path.name != "stage.json"  # has a random id
            }
        )
        result = json.loads((out / "stage.json").read_text())["result"]
        made[-1]["result"] = result
    assert any(path.name == "spiece.model" for path in made[0] if path != "result")
    assert made[0] == made[1]
