"""Retrievers in sentence-transformers' layout: the same embeddings both ways."""

import json
import pathlib
import shutil

import numpy as np
import pytest
import safetensors.numpy
from helpers import tiny as _tiny

from tfdpsq import retriever
from tfdpsq.data import Tokenizer, train_vocabulary
from tfdpsq.generator import checkpoints
from tfdpsq.privacy.proof import certificate as certificates
from tfdpsq.run import convert as command
from tfdpsq.run import train_retriever
from tfdpsq.run.convert import RETRIEVERS, convert
from tfdpsq.run.core import layout, releases
from tfdpsq.validation import DataError, InputError

TEXTS = ["who sorts it 3", "", "It reads the matrix twice and gives back a list " * 4]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A retriever as `train_retriever` leaves it, and its conversion."""
    base = tmp_path_factory.mktemp("sentence")
    _tiny.write_start(base, "1.1", dropout=0.1, layers=2)
    rows = ((f"who sorts {i}", f"d{i}", f"It sorts {i}.") for i in range(8))
    _tiny.write_set(base / "set", rows)
    _train(base, "trained", init=str(base / "public"))
    convert(base / "trained", base / "converted", RETRIEVERS)
    return base


def _train(base, name, **options):
    model, _ = _tiny.train_retriever(
        base / name,
        options,
        pairs=str(base / "set"),
        document_length=24,
        query_length=10,
        embedding_dim=12,
        batch_size=4,
        steps=0,
    )
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
    model = retriever.load(base / "trained" / layout.RETRIEVER_MODEL)
    ours = _embedded(model, base)
    np.testing.assert_allclose(ours, _numpy_embeddings(base / "converted"), atol=1e-5)
    again = _train(base, "again", init=str(base / "converted"))
    np.testing.assert_array_equal(_embedded(again, base), ours)
    modules = json.loads((base / "converted" / "modules.json").read_text())
    kinds = [each["type"].rpartition(".")[2] for each in modules]
    assert kinds == ["Transformer", "Pooling", "Dense", "Normalize"]
    assert json.loads((base / "again" / "stage.json").read_text())["inputs"]["init"]


def test_what_is_private_stays_so(base, tmp_path):
    """A finite epsilon was all that was left of a retriever trained on canaries."""
    audited = tmp_path / "audited"
    shutil.copytree(base / "trained", audited)
    certificate = {
        "format": certificates.FORMAT,
        "private": True,
        "guarantee": {"epsilon": 7.5},
    }
    certificate["digest"] = certificates.digest_of(certificate)
    (audited / "certificate.json").write_text(json.dumps(certificate))
    stage = json.loads((audited / "stage.json").read_text())
    (audited / "stage.json").write_text(json.dumps({**stage, "guarantee": "private"}))
    convert(audited, tmp_path / "out", RETRIEVERS)
    assert releases.stated(tmp_path / "out") == releases.PRIVATE
    with pytest.raises(InputError, match="must stay private"):
        convert(audited, tmp_path / "release" / "out", RETRIEVERS)
    _, output = command._output(tmp_path / "out", tmp_path / "again")
    assert output.guarantee == releases.PRIVATE


def test_newer_configs_and_an_encoder_without_projection_are_read(base, tmp_path):
    copied = tmp_path / "copied"
    shutil.copytree(base / "converted", copied)
    pooling = {"embedding_dimension": 16, "pooling_mode": "cls"}
    (copied / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    modules = json.loads((copied / "modules.json").read_text())
    del modules[2]
    (copied / "modules.json").write_text(json.dumps(modules))
    config = train_retriever.default_config()
    config.update(init=str(copied), pooling="first", embedding_dim=16)
    model = train_retriever._untrained(config)
    assert np.array_equal(model.query_tower.get_layer("projection").kernel, np.eye(16))


def _change(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def _reordered(directory):
    path = directory / "modules.json"
    path.write_text(json.dumps(json.loads(path.read_text())[::-1]))


def _misshapen(directory):
    matrix = {"linear.weight": np.zeros([5, 5], np.float32)}
    safetensors.numpy.save_file(matrix, directory / "2_Dense" / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_reordered, "its modules are Normalize, Dense, Pooling, Transformer, not Tr"),
        (
            lambda d: _change(d / "2_Dense/config.json", bias=True),
            "bias is True, not F",
        ),
        (
            lambda d: _change(
                d / "2_Dense/config.json",
                activation_function="torch.nn.modules.activation.Tanh",
            ),
            "activation_function is 'torch.nn.modules.activation.Tanh', not",
        ),
        (
            lambda d: _change(
                d / "1_Pooling/config.json", pooling_mode_max_tokens=True
            ),
            "it pools by pooling_mode_max_tokens, pooling_mode_mean_tokens",
        ),
        (
            lambda d: _change(d / "sentence_bert_config.json", do_lower_case=True),
            "do_lower_case is true",
        ),
        (_misshapen, r"not linear.weight of shape \[12, 16\]"),
        (lambda d: (d / "2_Dense/model.safetensors").unlink(), "it has no weights"),
        (lambda d: (d / "modules.json").write_text("{}"), "it holds no JSON list"),
    ],
)
def test_another_encoder_is_refused_by_what_makes_it_one(
    base, tmp_path, change, message
):
    shutil.copytree(base / "converted", tmp_path / "copied")
    change(tmp_path / "copied")
    with pytest.raises(DataError, match=message):
        checkpoints.read_sentence_encoder(tmp_path / "copied")


def test_settings_that_make_another_model_of_it_are_refused(base, tmp_path):
    converted = str(base / "converted")
    for options, message in (
        ({"embedding_dim": 8}, "embedding_dim is 8, but .* has 12. Set embedding_dim"),
        ({"pooling": "first"}, "pooling is 'first', but .* has 'mean'"),
    ):
        with pytest.raises(InputError, match=message):
            _train(tmp_path, "x", pairs=str(base / "set"), init=converted, **options)
    assert not (tmp_path / "x").exists()


def test_what_is_not_one_shared_tower_is_not_converted(base, tmp_path):
    out = tmp_path / "out"
    for source, options, message in (
        (
            base / "public",
            {},
            "public is not a retriever. Give an output of train_retriever",
        ),
        (base / "trained", {"dtype": "bfloat16"}, "dtype is 'bfloat16', which does no"),
        (base / "trained", {"ignore": ["a"]}, r"ignore is \['a'\], which does nothing"),
        (
            base / "trained",
            {"vocabulary": _other(tmp_path)},
            "was trained with another",
        ),
    ):
        with pytest.raises(InputError, match=message):
            convert(source, out, RETRIEVERS, **options)
    _train(base, "two", init=str(base / "public"), shared=False)
    with pytest.raises(InputError, match="one encoder for both. Train with shared=Tr"):
        convert(base / "two", out, RETRIEVERS)
    assert not pathlib.Path(out).exists()


def _other(directory):
    return train_vocabulary(["some other words here"] * 40, 271, directory / "other")


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
