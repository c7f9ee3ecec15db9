"""The word splitter, script by script, in Python and in a graph."""

import unicodedata

import pytest
import tensorflow as tf

from tfdpsq import words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Latin: one-letter words stay, apostrophes separate, underscores do not.
        ("Don't PANIC! x_1 2.5", "don t panic x_1 2 5"),
        # One word in two normal forms, ligatures, full width, folding.
        ("CAFÉ cafe\u0301 ﬁle Straße ２", "café café file strasse 2"),
        ("\u200bso\u00adft 1\ufe0f\u20e3 ❤\ufe0f — …", "soft 1\u20e3"),
        # Cyrillic, Greek (final sigma folds), Arabic with and without vowel marks.
        ("Ещё один ПОИСК", "ещё один поиск"),
        ("Ὀδυσσεύς ΣΟΦΟΣ", "ὀδυσσεύσ σοφοσ"),
        ("كيفَ أبحث؟", "كيفَ أبحث"),
        # Hebrew, and Indic scripts, whose vowels are combining marks.
        ("שָׁלוֹם עולם", "שָׁלוֹם עולם"),
        ("हिन्दी में खोज कैसे करें।", "हिन्दी में खोज कैसे करें"),
        ("বাংলা ভাষা", "বাংলা ভাষা"),
        ("தமிழ் மொழி", "தமிழ் மொழி"),
        ("ქართული ენა", "ქართული ენა"),
        # Without spaces: pairs of characters, each with its marks.
        ("東京都に", "東京 京都 都に"),
        ("データ、ガ カ\u3099 ｶﾞ", "デー ータ ガ ガ ガ"),
        ("Python3で書く", "python3 で書 書く"),
        ("한국어는 검색", "한국 국어 어는 검색"),
        ("ไทยดี", "ไท ทย ยดี"),
        ("ລາວ", "ລາ າວ"),
        ("ខ្មែរ", "ខ្មែ មែរ"),
        ("မြန်မာ", "မြန် န်မာ"),
        ("中 。文", "中 文"),
    ],
)
def test_words(text, expected):
    # Hebrew's presentation forms and others are compared in one normal form.
    (found,) = words.words_of([text])
    assert found == unicodedata.normalize("NFKC", expected).split()


def test_texts_stay_apart_and_in_order():
    texts = ["b a", "", "?", "日本", "c"] * 700  # more than one batch
    found = list(words.words_of(iter(texts)))
    assert found == [["b", "a"], [], [], ["日本"], ["c"]] * 700
    assert list(words.words_of([])) == []


def test_a_graph_splits_as_python_does(tmp_path):
    module = tf.Module()
    module.split = tf.function(
        lambda texts: words.split_words(texts).to_tensor(),
        input_signature=[tf.TensorSpec([None], tf.string)],
    )
    tf.saved_model.save(module, str(tmp_path))
    found = tf.saved_model.load(str(tmp_path)).split(tf.constant(["Ab日本語", "x"]))
    assert [[w.decode() for w in row] for row in found.numpy()] == [
        ["ab", "日本", "本語"],
        ["x", "", ""],
    ]


def test_hashes_follow_words():
    texts = ["Sort a list", "sort  A list!", "a list", "", "??", "a-b c"]
    hashes, ends = words.word_hashes(texts)
    assert ends.tolist() == [0, 3, 6, 8, 8, 8, 11]
    assert hashes[:3].tolist() == hashes[3:6].tolist() and len(set(hashes)) == 5
    whole = list(words.text_hashes(texts))
    assert whole[0] == whole[1] != whole[2] and whole[3] == whole[4]
    # Where one word ends and the next begins is part of it.
    assert len(set(words.text_hashes(["ab c", "a bc", "abc"]))) == 3


def test_half_a_surrogate_pair_separates_words():
    assert list(words.words_of(["a\ud800b"])) == [["a", "b"]]
