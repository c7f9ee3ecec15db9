"""Records of JSON whose form is odd, or not ours: named, never a traceback."""

import json

import pytest
from helpers import tiny

from tfdpsq.data import tables
from tfdpsq.run.attacks import audit_subject
from tfdpsq.run.convert import convert
from tfdpsq.run.core import layout, sources, workdir
from tfdpsq.run.training import outcomes
from tfdpsq.validation import DataError, InputError


def _stage(directory, **entries):
    directory.mkdir(exist_ok=True)
    stage = json.dumps({**tiny.STAGE, **entries})
    (directory / workdir.STAGE_FILE).write_text(stage)
    return directory / workdir.STAGE_FILE


@pytest.mark.parametrize("part", [3, None, "x", []])
def test_a_generator_whose_config_is_odd_is_named(tmp_path, part):
    """It was an AttributeError: 'int' object has no attribute 'get'."""
    _stage(tmp_path / "odd", config={"finetune": part})
    with pytest.raises(DataError, match="odd/stage.json: .*'config.finetune'.*Restore"):
        sources.require_prompt("prompt", "a prompt", tmp_path / "odd")


@pytest.mark.parametrize("config", [{}, {"a.b": 1}, {"finetune": {"a.b": 1}}])
def test_a_generator_whose_config_no_stage_wrote_is_named(tmp_path, config):
    """It was a ValueError of ml_collections: a name with a dot in it."""
    _stage(tmp_path / "odd", config=config)
    with pytest.raises(InputError, match="odd is not a generator that finetune"):
        audit_subject.training_of(str(tmp_path / "odd"), str(tmp_path))


@pytest.mark.parametrize("result", ["x", 3, None, ["diverged"]])
def test_a_result_that_is_no_object_is_named(tmp_path, result):
    path = _stage(tmp_path / "odd", result=result)
    with pytest.raises(DataError, match="odd/stage.json: .* no sound entry 'result'"):
        workdir.read_json(path)


def test_a_stage_without_a_result_has_an_empty_one(tmp_path):
    stage = workdir.read_json(_stage(tmp_path / "plain"))
    outcomes.require_converged(stage, tmp_path, 0.1)
    assert stage["result"] == {}


@pytest.mark.parametrize(
    "config", [{}, {"vocabulary": 3, "init": ""}, {"vocabulary": "", "init": None}]
)
def test_a_retriever_whose_config_is_odd_is_named(tmp_path, config):
    """It was a KeyError: 'vocabulary'."""
    _stage(tmp_path / "odd", config=config)
    (tmp_path / "odd" / layout.RETRIEVER_MODEL).mkdir()
    with pytest.raises(DataError, match="odd/stage.json: vocabulary is .*--vocabulary"):
        convert(tmp_path / "odd", tmp_path / "out", "onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["odd"]


@pytest.mark.parametrize("name", ["\ud800.arrow", "a\0.arrow", 3, "none.arrow"])
def test_a_hugging_face_set_that_lists_odd_files_is_named(tmp_path, name):
    """A name that is no UTF-8 was a UnicodeEncodeError."""
    state = {"_data_files": [{"filename": name}]}
    (tmp_path / "state.json").write_text(json.dumps(state))
    with pytest.raises(DataError, match="state.json: it (is damaged|lists )"):
        tables.files_of(str(tmp_path))


FOREIGN = ['{"version": 1, "schema": "https://example.org/dataset"}', '{"a"', "{}"]


@pytest.mark.parametrize("content", FOREIGN)
def test_a_beir_directory_with_another_programs_manifest_is_no_set(tmp_path, content):
    """It was taken for a damaged set, which a message told to delete."""
    tiny.write_pairs(tmp_path / "pairs", train=8, dev=2, test=2)
    manifest = tmp_path / "pairs" / "manifest.json"
    manifest.write_text(content)
    found = sources.load_source(str(tmp_path / "pairs"))
    assert found.private and found.count == 8
    # Elsewhere a damaged manifest is a set's: its reader says what is wrong with it.
    for name, inside in (("set", "records"), ("bare", "beir")):
        (tmp_path / name / inside).mkdir(parents=True)
        (tmp_path / name / "manifest.json").write_text(content)
        with pytest.raises(DataError, match="manifest.json: ") as refused:
            sources.load_source(str(tmp_path / name))
        assert "elete" not in str(refused.value)
        assert "move the set away" in str(refused.value) or content == "{}"
    (tmp_path / "pairs" / "records").mkdir()
    assert sources.is_free(str(tmp_path / "pairs"))


def test_a_certified_set_is_none_of_raw_pairs_whatever_its_manifest_says(tmp_path):
    """One private query may have moved all of its rows; ε would count them singly."""
    (tmp_path / "corpus.jsonl").write_text("")
    (tmp_path / "manifest.json").write_text('{"a": 1}')
    assert not sources.is_free(str(tmp_path))
    (tmp_path / "certificate.json").write_text("{}")
    assert sources.is_free(str(tmp_path))
