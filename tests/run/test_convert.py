"""`convert`: each format to each, with what lies beside the weights, or nothing."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

from tfdpsq import validation
from tfdpsq.data import train_vocabulary
from tfdpsq.generator import checkpoints
from tfdpsq.layers import T5Backbone, T5Config
from tfdpsq.privacy import read_certificate
from tfdpsq.privacy.proof import certificate as certificates
from tfdpsq.run import convert as command
from tfdpsq.run.convert import convert
from tfdpsq.run.core import records, releases, workdir
from tfdpsq.validation import InputError

PIECES = 290


def write_certificate(directory, **changes):
    content = {
        "format": certificates.FORMAT,
        "private": True,
        "guarantee": {"epsilon": 7.5},
    }
    content["digest"] = certificates.digest_of(content)
    text = json.dumps({**content, **changes})
    (directory / certificates.FILE_NAME).write_text(text)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    texts = [f"query {i} reads what every gradient said of it" for i in range(40)]
    place = tmp_path_factory.mktemp("vocabulary") / "some.model"
    return train_vocabulary(texts, PIECES, place)


@pytest.fixture(scope="module", params=["1.0", "1.1"])
def generator(request, tmp_path_factory, vocabulary):
    """A version, and a generator as `finetune` leaves it, with its certificate."""
    directory = tmp_path_factory.mktemp("generator")
    config = T5Config(310, 1, 2, 6, 5, 4, request.param)
    checkpoints.save(directory, config, T5Backbone(config), vocabulary=vocabulary)
    write_certificate(directory)
    records.write_certificate(directory, read_certificate(directory))
    return request.param, directory


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """A T5 1.1 without vocabulary and certificate."""
    directory = tmp_path_factory.mktemp("one")
    config = T5Config(310, 1, 2, 6, 5, 4, "1.1")
    checkpoints.save(directory, config, T5Backbone(config))
    return directory


def test_there_and_back_everything_comes_back(generator, tmp_path):
    _, directory = generator
    before = directory
    for form in ("keras", "huggingface"):
        after = tmp_path / form
        text = convert(before, after, form)
        assert checkpoints.open_checkpoint(after).format == form
        assert f"{PIECES} pieces" in text and "epsilon 7.5" in text
        before = after

    files = ["model.safetensors", "config.json", "spiece.model", "certificate.json"]
    files += ["tokenizer.json", "tokenizer_config.json"]
    for name in files:
        assert (before / name).read_bytes() == (directory / name).read_bytes()
    assert sorted(path.name for path in before.iterdir()) == sorted(files)


def test_what_a_killed_command_left_is_removed(one, tmp_path):
    """kill -9 left `.out.….partial` with weights in it, and nothing removed it."""
    left = tmp_path / ".out.0123456789ab.partial"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".other.0123456789ab.partial").mkdir()
    convert(one, tmp_path / "out", "keras")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [".other.0123456789ab.partial", "out"]


def test_an_encoder_alone_goes_to_hugging_face(one, tmp_path):
    convert(one, tmp_path / "out", "huggingface", encoder_only=True)
    _, encoder = checkpoints.load_encoder(tmp_path / "out")
    _, expected = checkpoints.load_encoder(one)

    for ours, theirs in zip(encoder.get_weights(), expected.get_weights()):
        assert np.array_equal(ours, theirs)


def test_what_is_private_stays_so_and_a_lost_certificate_is_missed(one, tmp_path):
    """A finite epsilon was all that was left of a generator trained on canaries."""
    before = tmp_path / "audited"
    shutil.copytree(one, before)
    write_certificate(before)
    workdir.write_stage(
        before,
        releases.Output(before, releases.PRIVATE, "x"),
        {"config": {}, "inputs": {}},
    )
    for form in ("keras", "huggingface"):
        with pytest.raises(InputError, match="must stay private"):
            convert(before, tmp_path / "release" / form, form)
        convert(before, tmp_path / form, form)
        before = tmp_path / form
        assert releases.stated(before) == releases.PRIVATE
        assert before.stat().st_mode & 0o077 == 0
    assert not (tmp_path / "release").exists()
    for form in ("keras", "huggingface"):
        (tmp_path / form / "certificate.json").unlink()
        with pytest.raises(InputError, match="certificate.json: missing"):
            convert(tmp_path / form, tmp_path / "out", form)


def test_the_command_converts_or_ends_in_one_line(one, vocabulary, tmp_path, capsys):
    given = [f"--input={one}", f"--output={tmp_path / 'out'}"]
    for wrong, message in (
        (["--format=gguf"], "format is 'gguf'"),
        (["--format=huggingface", "--dtype=int8"], "huggingface is 'int8'"),
        (["--format=keras", "--encoder_only"], "keras has no place for an encoder"),
        (["--format=keras", "--input=absent"], "absent does not exist"),
    ):
        with pytest.raises(SystemExit) as stopped:
            command.main(["convert", *given, *wrong])
        text = capsys.readouterr().err
        assert stopped.value.code == 2 and text.count("\n") == 1
        assert text.startswith("error: ") and message in text
    with pytest.raises(SystemExit):
        command.main(["convert", *given, "--format=keras", "more"])
    assert "usage: python -m tfdpsq.run.convert" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []

    given += [f"--vocabulary={vocabulary}", "--dtype=bfloat16", "--format=huggingface"]
    with pytest.raises(SystemExit) as stopped:
        command.main(["convert", *given])
    assert not stopped.value.code
    # Embedding and head 2 × 310 × 6; positions 2 × 32 × 2; attention 3 × 4 × 6 × 8;
    # feed-forward 2 × 3 × 6 × 5; norms (2 + 3 + 2) × 6.
    count = 2 * 310 * 6 + 2 * 64 + 3 * 4 * 48 + 2 * 90 + 7 * 6
    assert f"{count:,} parameters in bfloat16" in capsys.readouterr().out
    tensor = load_file(tmp_path / "out" / "model.safetensors")["shared.weight"]
    assert (tensor.shape, tensor.dtype.name) == ((310, 6), "bfloat16")


def _set_nan(directory):
    """Makes the last value of the file, a float32, no number."""
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + b"\x00\x00\xc0\x7f")


def _cut(directory):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])


def _set_hidden(directory):
    file = directory / "config.json"
    file.write_text(file.read_text().replace('"d_model": 6', '"d_model": 7'))


@pytest.mark.parametrize(
    ("damage", "messages"),
    [
        (_set_nan, ["model.safetensors: tensor shared.weight", "NaN"]),
        (_cut, ["model.safetensors: ", "truncated"]),
        (_set_hidden, ["model.safetensors: tensor ", "7]", "6]"]),
    ],
)
def test_bad_input_is_named_and_nothing_is_written(one, tmp_path, damage, messages):
    shutil.copytree(one, tmp_path / "bad")
    damage(tmp_path / "bad")
    with pytest.raises(validation.DataError) as caught:
        convert(tmp_path / "bad", tmp_path / "out", "keras")

    text = str(caught.value)
    assert text.startswith(str(tmp_path / "bad"))
    assert all(message in text for message in messages), text
    assert [path.name for path in tmp_path.iterdir()] == ["bad"]


def test_a_vocabulary_of_another_model_and_a_taken_place_are_refused(
    one, vocabulary, tmp_path
):
    config = T5Config(PIECES - 1, 1, 2, 6, 5, 4, "1.1")
    (tmp_path / "small").mkdir()
    checkpoints.save(tmp_path / "small", config, T5Backbone(config))
    with pytest.raises(InputError, match="290 pieces, the model 289"):
        convert(tmp_path / "small", tmp_path / "out", "keras", vocabulary=vocabulary)
    with pytest.raises(InputError, match="already exists"):
        convert(one, tmp_path, "keras")
    assert [path.name for path in tmp_path.iterdir()] == ["small"]
