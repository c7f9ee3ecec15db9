"""Retrievers in sentence-transformers' layout: the same embeddings both ways."""

import json
import shutil

import numpy as np
import pytest
import safetensors.numpy
from helpers import framed
from helpers import tiny as _tiny

from tfdpsq import retriever
from tfdpsq.data import Tokenizer
from tfdpsq.generator import checkpoints
from tfdpsq.run.stages.convert import STAGE
from tfdpsq.validation import DataError, InputError

TEXTS = ["who sorts it 3", "", "It reads the matrix twice and gives back a list " * 4]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A retriever as `train_retriever` leaves it, and its conversion."""
    base = tmp_path_factory.mktemp("sentence")
    _tiny.write_start(base, "1.1", dropout=0.1, layers=2)
    _write(base, "trained", base / "public", embedding_dim=12)
    convert(base / "trained", base / "converted")
    return base


def convert(source, out):
    framed.run(STAGE, out, input=str(source), format="sentence-transformers")


def _write(base, name, init, **options):
    """Writes a retriever that starts with other weights; returns it."""
    lengths = {"document_length": 24, "query_length": 10}
    model = retriever.TwoTower.from_preset(init, **lengths, **options)
    (base / name).mkdir()
    retriever.save(model, base / name / "model")
    return model


def _embedded(model, base, length=24):
    ids, lengths = Tokenizer(base / "spiece.model").encode(TEXTS, length)
    return model.encode_documents(ids, lengths).numpy()


def _numpy_embeddings(directory):
    """T5's encoder, pooling, projection and unit length, from the files alone."""
    config = json.loads((directory / "config.json").read_text())
    w = safetensors.numpy.load_file(directory / "model.safetensors")
    w = {name: value.astype(np.float64) for name, value in w.items()}
    dense = safetensors.numpy.load_file(directory / "2_Dense" / "model.safetensors")
    heads, eps = config["num_heads"], config["layer_norm_epsilon"]

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * w[f"{name}.weight"]

    def bucket(distance):  # of a key from its query, both directions, 32 in all
        side, size = 16 * (distance > 0), abs(distance)
        if size < 8:
            return side + size
        far = 8 + int(np.log(size / 8) / np.log(128 / 8) * 8)
        return side + min(far, 15)

    def gelu(x):
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    def encode(ids):
        x, n = w["shared.weight"][ids], len(ids)
        first = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        bias = np.array([[w[first][bucket(k - q)] for k in range(n)] for q in range(n)])
        for layer in range(config["num_layers"]):
            at = f"encoder.block.{layer}.layer.0"
            y = norm(x, f"{at}.layer_norm")
            q, k, v = (
                (y @ w[f"{at}.SelfAttention.{part}.weight"].T).reshape(n, heads, -1)
                for part in "qkv"
            )
            scores = np.einsum("qhd,khd->hqk", q, k) + bias.transpose(2, 0, 1)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            mixed = np.einsum("hqk,khd->qhd", weights, v).reshape(n, -1)
            x = x + mixed @ w[f"{at}.SelfAttention.o.weight"].T
            at = f"encoder.block.{layer}.layer.1"
            y = norm(x, f"{at}.layer_norm")
            at += ".DenseReluDense"
            inner = gelu(y @ w[f"{at}.wi_0.weight"].T) * (y @ w[f"{at}.wi_1.weight"].T)
            x = x + inner @ w[f"{at}.wo.weight"].T
        pooled = norm(x, "encoder.final_layer_norm").mean(0)
        found = dense["linear.weight"].astype(np.float64) @ pooled
        return found / np.linalg.norm(found)

    length = json.loads((directory / "sentence_bert_config.json").read_text())
    ids, lengths = Tokenizer(directory / "spiece.model").encode(
        TEXTS, length["max_seq_length"]
    )
    return np.stack([encode(row[:size]) for row, size in zip(ids.numpy(), lengths)])


def test_a_converted_retriever_has_the_same_embeddings(base):
    """By numpy from its files; and again as a start of training."""
    model = retriever.load(base / "trained" / "model")
    ours = _embedded(model, base)
    np.testing.assert_allclose(ours, _numpy_embeddings(base / "converted"), atol=1e-5)
    again = _write(base, "again", base / "converted")
    np.testing.assert_array_equal(_embedded(again, base), ours)
    modules = json.loads((base / "converted" / "modules.json").read_text())
    kinds = [each["type"].rpartition(".")[2] for each in modules]
    assert kinds == ["Transformer", "Pooling", "Dense", "Normalize"]
    tokenizer = json.loads((base / "converted" / "tokenizer_config.json").read_text())
    assert tokenizer["model_input_names"] == ["input_ids", "attention_mask"]


@pytest.mark.slow
def test_sentence_transformers_gives_the_same_embeddings(base):
    library = pytest.importorskip("sentence_transformers")
    theirs = library.SentenceTransformer(str(base / "converted"), device="cpu")
    ours = _embedded(retriever.load(base / "trained" / "model"), base)
    np.testing.assert_allclose(theirs.encode(TEXTS), ours, atol=1e-5)


def test_another_encoder_is_refused_by_what_makes_it_one(base, tmp_path):
    for file, changes in (
        ("2_Dense/config.json", {"bias": True}),
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}),
        ("sentence_bert_config.json", {"do_lower_case": True}),
    ):
        path = tmp_path / next(iter(changes)) / file
        shutil.copytree(base / "converted", tmp_path / next(iter(changes)))
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
        with pytest.raises(DataError, match=next(iter(changes))):
            checkpoints.read_sentence_encoder(tmp_path / next(iter(changes)))


def test_another_size_and_two_towers_are_refused(base, tmp_path):
    with pytest.raises(InputError, match="embedding_dim is 8, but .* has 12"):
        _write(tmp_path, "x", base / "converted", embedding_dim=8)
    _write(base, "two", base / "public", shared=False)
    with pytest.raises(InputError, match="one encoder for both"):
        convert(base / "two", tmp_path / "out")
    assert not (tmp_path / "out").exists() and not (tmp_path / "x").exists()


def test_the_tokenizer_for_transformers_has_the_same_pieces(base):
    """By the likeliest split, found here; bytes where nothing else is known."""
    made = json.loads((base / "converted" / "tokenizer.json").read_text("utf-8"))
    vocabulary = made["model"]["vocab"]
    ids = {piece: i for i, (piece, _) in enumerate(vocabulary)}
    # Unknown and bytes come last: below every known piece.
    scores = {p: s for p, s in vocabulary if len(p) < 6 or not p.startswith("<")}
    assert made["model"]["byte_fallback"] and made["model"]["unk_id"] == 2
    kinds = [step["type"] for step in made["normalizer"]["normalizers"]]
    assert kinds == ["Precompiled", "Strip", "Replace"]

    def split(word):
        best = [(0.0, [])]
        for end in range(1, len(word) + 1):
            found = []
            for start in range(end):
                piece = word[start:end]
                if piece in scores:
                    step = best[start][0] + scores[piece], [ids[piece]]
                elif end - start == 1:
                    names = [f"<0x{byte:02X}>" for byte in piece.encode()]
                    step = best[start][0] - 1e3, [ids[name] for name in names]
                else:
                    continue
                found.append((step[0], best[start][1] + step[1]))
            best.append(max(found))
        return best[-1][1]

    texts = ["who sorts it 3", "", "It is X y  a  list", "écart 日"]
    expected = [
        [*(i for word in text.split() for i in split("\u2581" + word)), 1]
        for text in texts
    ]
    got, lengths = Tokenizer(base / "spiece.model").encode(texts, 64)
    assert [row[:size].tolist() for row, size in zip(got.numpy(), lengths)] == expected
