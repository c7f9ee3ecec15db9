"""`prepare` on documents that give no public query."""

import pytest

from tfdpsq.data import Document, write_beir
from tfdpsq.run import prepare
from tfdpsq.validation import InputError

CHINESE = "这个函数对数组进行排序并返回结果。它需要第二个参数。"


def _run(folder, texts, size=0):
    judgements = {split: [("q0", "d0", 1)] for split in ("train", "test")}
    documents = [Document(f"d{i}", "", text) for i, text in enumerate(texts)]
    write_beir(folder / "pairs", documents, [("q0", "排序")], judgements)
    config = prepare.default_config()
    config.update(data=str(folder / "pairs"), vocabulary_size=size)
    return prepare.run(config, folder / "release" / "prepare")


@pytest.mark.parametrize("text", [CHINESE, "too short", "x = [1, 2]; y = f(x, *z)"])
def test_documents_without_a_sentence_are_refused_by_their_name(tmp_path, text):
    """It was: /tmp/….partial/.public_pairs….partial/beir: no document was given."""
    with pytest.raises(InputError, match="data is .*/pairs': none of its 3") as refused:
        _run(tmp_path, [text] * 3)
    said = str(refused.value)
    assert "3 to 25 words between spaces" in said and "segmenter" in said
    assert "partial" not in said and not list((tmp_path / "release").iterdir())


def test_it_is_known_before_a_vocabulary_is_learned(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "train_vocabulary", None)
    with pytest.raises(InputError, match="none of its 1 documents"):
        _run(tmp_path, [CHINESE], size=300)


def test_one_document_with_a_sentence_is_enough(tmp_path):
    spaced = "这个 函数 对 数组 进行 排序"
    made = _run(tmp_path, [CHINESE, spaced])
    assert made["result"] == {"documents": 2, "public_pairs": 1}
