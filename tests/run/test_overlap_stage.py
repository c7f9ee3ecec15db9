"""The stage `overlap`: what it reads, draws, writes, records, refuses, goes on with."""

import dataclasses
import json
import pathlib
import re
import shutil

import pytest
from helpers import tiny as _tiny

from tfdpsq.data import BeirDirectory, records
from tfdpsq.data.tfds_builder import BeirDirectoryBuilder
from tfdpsq.run import overlap
from tfdpsq.run.core import sources
from tfdpsq.run.passes import passes
from tfdpsq.validation import DataError, InputError


@pytest.fixture
def base(tmp_path):
    """60 training pairs, and a corpus that holds some of their texts."""
    _tiny.write_pairs(tmp_path / "pairs")
    beir = BeirDirectory(tmp_path / "pairs")
    queries = list(beir.queries().values())
    documents = [document.content for document in beir.documents()]
    (tmp_path / "corpus").mkdir()
    _write(tmp_path / "corpus" / "a.txt", [queries[3].upper(), "nothing of it"])
    inside = f"Before: {documents[5]} And after."
    _write(tmp_path / "corpus" / "b.txt", ["first", f"so {queries[4]}!", inside])
    changed = documents[7].replace("second", "other")
    _write(tmp_path / "corpus" / "c.txt", [documents[6], changed])
    return tmp_path


def _write(path, lines):
    path.write_text("".join(line + "\n" for line in lines))


def _config(base, **options):
    return _tiny.config(
        overlap, options, data=str(base / "pairs"), corpus=(str(base / "corpus"),)
    )


def _run(base, name="private/overlap", **options):
    stage = overlap.run(_config(base, **options), base / name)
    found = json.loads((base / name / overlap.OVERLAP_FILE).read_text())
    lines = (base / name / overlap.MATCHES_FILE).read_text().splitlines()
    return found, [json.loads(line) for line in lines], stage


def test_shares_and_examples_are_those_of_what_was_planted(base):
    found, matches, stage = _run(base)
    size = sum(len(file.read_text()) for file in (base / "corpus").glob("*"))
    assert found["corpus"]["parts"] == 3 and found["corpus"]["records"] == 7
    assert found["corpus"]["bytes"] == size - 7  # all but the ends of lines
    queries, documents = found["queries"], found["documents"]
    assert (queries["population"], documents["population"]) == (60, 84)
    assert queries["equal"]["share"] == pytest.approx(1 / 60)
    assert queries["contained"]["share"] == pytest.approx(2 / 60)
    assert queries["contained"]["by_draw"] == pytest.approx([2 / 60])
    assert documents["equal"]["share"] == pytest.approx(1 / 84)
    assert documents["contained"]["share"] == pytest.approx(2 / 84)
    # At least the one with a word changed: templates make them much alike.
    assert documents["near"]["share"] >= 3 / 84 > documents["near"]["low"]
    assert 0 < documents["containment"]["mean"] < documents["coverage"]["mean"] < 1
    assert "NFKD" in found["normalisation"] and found["n"] == 8
    assert stage["result"]["queries"] == pytest.approx(2 / 60)
    by_match = {(m["of"], m["match"]): m for m in matches if m["match"] != "near"}
    assert {key: m["id"] for key, m in by_match.items()} == {
        ("queries", "equal"): "q3",
        ("queries", "contained"): "q4",
        ("documents", "equal"): "d6",
        ("documents", "contained"): "d5",
    }
    contained = by_match["documents", "contained"]
    assert contained["corpus_part"] == str(base / "corpus" / "b.txt")
    assert contained["record_from_0"] == 2 and contained["containment"] == 1.0
    near = [match for match in matches if match["match"] == "near"]
    assert "d7" in {match["id"] for match in near}
    assert all(m["corpus_part"] is None and m["coverage"] >= 0.8 for m in near)


def test_draws_are_of_the_size_asked_for(base):
    found, _, _ = _run(base, draws=4, draw_size=20, seed=3)
    for kind in ("queries", "documents"):
        assert found[kind]["draw_size"] == 20
        assert found[kind]["seeds"] == [[3, 0], [3, 1], [3, 2], [3, 3]]
        by_draw = found[kind]["contained"]["by_draw"]
        assert len(by_draw) == 4 and found[kind]["distinct_drawn"] > 20
        assert found[kind]["contained"]["share"] == pytest.approx(sum(by_draw) / 4)
    again, _, _ = _run(base, "private/again", draws=4, draw_size=20, seed=3)
    assert again == found
    other, _, _ = _run(base, "private/other", draws=4, draw_size=20, seed=4)
    means = [each["documents"]["coverage"]["by_draw"] for each in (found, other)]
    assert means[0] != means[1]


def test_looking_for_queries_is_a_recorded_read_and_for_documents_none(base):
    found, matches, _ = _run(base, "documents", texts=("documents",), strict=True)
    assert "queries" not in found and {m["of"] for m in matches} == {"documents"}
    assert not (base / "private" / "private_reads.jsonl").exists()
    with pytest.raises(InputError, match="strict"):
        _run(base, strict=True)
    assert not (base / "private" / "overlap").exists()
    _run(base)
    (entry,) = map(
        json.loads, (base / "private" / "private_reads.jsonl").read_text().splitlines()
    )
    assert entry == {
        "what": "which queries of split 'train' occur in a public corpus",
        "where": "overlap/overlap.json and matches.jsonl",
    }


def test_a_finished_stage_is_not_redone_and_another_corpus_refused(base):
    _, _, first = _run(base)
    assert _run(base)[2]["run"] == first["run"]
    _write(base / "corpus" / "d.txt", ["more"])
    with pytest.raises(InputError, match=r"other inputs \(inputs\.corpus"):
        _run(base)


def _watch(monkeypatch, read, fails_after=None):
    """Notes the names of the parts that are read; after some of them, fails."""
    parts = overlap.corpus_parts

    def records(part):
        read.append(pathlib.Path(part.name).name)
        if len(read) == fails_after:
            raise KeyboardInterrupt
        return part.records()

    monkeypatch.setattr(
        overlap,
        "corpus_parts",
        lambda *arguments: [
            dataclasses.replace(p, records=lambda p=p: records(p))
            for p in parts(*arguments)
        ],
    )


def test_an_interrupted_scan_goes_on_after_the_last_shard(base, monkeypatch):
    whole, examples, _ = _run(base, "private/whole")
    read = []
    _watch(monkeypatch, read, fails_after=3)
    with pytest.raises(KeyboardInterrupt):
        _run(base)
    shards = base / "private" / ".overlap.shards"
    assert shards.is_dir() and not (base / "private" / "overlap").exists()
    found, matches, _ = _run(base)
    assert read == ["a.txt", "b.txt", "c.txt", "c.txt"]
    assert (found, matches) == (whole, examples) and not shards.exists()


@pytest.mark.parametrize("shards", [1, 2, 64])
def test_commands_that_share_the_corpus_find_what_one_finds(base, shards):
    """In any order, with any number of parts in a shard."""
    whole, examples, _ = _run(base, "private/whole")
    config = _config(base, shards=shards)
    directory = base / "private" / "shared"
    for index in (2, 0, 1):
        overlap.run(config, directory, passes.Launch(3, index))
    found = json.loads((directory / overlap.OVERLAP_FILE).read_text())
    lines = (directory / overlap.MATCHES_FILE).read_text().splitlines()
    assert (found, [json.loads(line) for line in lines]) == (whole, examples)


def test_a_damaged_shard_is_named_and_alone_made_again(base, monkeypatch, caplog):
    whole, examples, _ = _run(base, "private/whole")
    for index in (0, 2):
        launch = passes.Launch(3, index)
        assert overlap.run(_config(base), base / "private" / "overlap", launch) is None
    held = sorted((base / "private" / ".overlap.shards").glob("*.npz"))
    held[0].write_bytes(held[0].read_bytes()[:-7])
    data = bytearray(held[1].read_bytes())
    data[len(data) // 2] ^= 1
    held[1].write_bytes(bytes(data))
    read = []
    _watch(monkeypatch, read)
    with caplog.at_level("WARNING", logger="absl"):
        found, matches, _ = _run(base)
    assert f"{held[0]}: has " in caplog.text  # so many bytes, its mark says
    assert f"{held[1]}: SHA-256 is" in caplog.text
    assert sorted(read) == ["a.txt", "b.txt", "c.txt"]
    assert (found, matches) == (whole, examples)


def test_shards_of_another_corpus_are_not_taken_up(base):
    (base / "corpus" / "c.txt").write_bytes(b"\xff\n")
    with pytest.raises(DataError, match=r"c\.txt:1: byte 1 .* 0xff"):
        _run(base)
    # Of a.txt as it was: what was found there is not in it any more.
    _write(base / "corpus" / "a.txt", ["x", "y", "z"])
    (base / "corpus" / "c.txt").unlink()
    with pytest.raises(InputError, match=r"is of another pass.*inputs\.corpus.*away"):
        _run(base)
    shutil.rmtree(base / "private" / ".overlap.shards")
    assert _run(base)[0]["corpus"]["records"] == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"corpus": ()}, "no corpus was given"),
        ({"corpus": ("/no/such.txt",)}, "/no/such.txt: no such file"),
        ({"texts": ()}, "texts is empty; name 'queries', 'documents' or both"),
        ({"texts": ("answers",)}, r"texts\[0\] is 'answers'; choose one of 'queries'"),
        ({"draws": 0}, "draws is 0"),
        ({"draw_size": 0}, "draw_size is 0"),
        ({"n": 0}, "n is 0"),
        ({"threads": 0}, "threads is 0"),
        ({"shards": 0}, "shards is 0"),
        ({"near": 0.0}, r"near is 0.0; it must lie in \(0, 1\]"),
        ({"confidence": 1.0}, r"confidence is 1.0; it must lie in \(0, 1\)"),
        ({"examples": -1}, "examples is -1"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_read(base, options, message):
    with pytest.raises(InputError, match=message):
        _run(base, **options)
    assert not (base / "private").exists()


def test_an_empty_corpus_is_refused(base):
    for path in (base / "corpus").glob("*.txt"):
        path.write_text("\n")
    with pytest.raises(InputError, match=r"the corpus .* is empty: its \d"):
        _run(base)


def test_the_corpus_of_public_results_is_no_private_text(base):
    """It was told, under release/, which documents occur in private queries."""
    copy, pairs = base / "copy", base / "pairs"
    copy.mkdir()
    (copy / records.PART_FILE).write_text("{}")
    _write(copy / "texts.txt", ["synthetic queries"])
    (base / "link.jsonl").symlink_to(pairs / "queries.jsonl")
    for corpus, why in (
        (pairs, "queries.jsonl, which holds the queries of a BEIR"),
        (base / "link.jsonl", "holds the queries of a BEIR"),
        (copy / "texts.txt", "is part of a synthetic set"),
    ):
        with pytest.raises(InputError, match=f"corpus has .*{why}.* give public files"):
            _run(base, "release/overlap", texts=("documents",), corpus=(str(corpus),))
    assert not (base / "release").exists()
    _run(base, "release/overlap", texts=("documents",))


def test_a_tfds_set_of_private_pairs_is_no_public_text(base):
    builder = BeirDirectoryBuilder(
        path=str(base / "pairs"), data_dir=str(base / "tfds")
    )
    builder.download_and_prepare()
    options = {
        "texts": ("documents",),
        "corpus": (f"tfds:{builder.info.full_name.replace('/1', ':1')}",),
        "field": "query",
        "data_dir": str(base / "tfds"),
    }
    with pytest.raises(InputError, match="tfds:beir_directory/.* is of a BEIR directo"):
        _run(base, "release/overlap", **options)
    assert not (base / "release").exists()
    _run(base, **{**options, "texts": ("queries",)})  # whose results are private
    # Any other set, by where it was prepared.
    moved = _config(base, **options)
    (base / "tfds" / "private.json").write_text('{"guarantee": "private"}')
    with pytest.raises(InputError, match="depends on private queries"):
        overlap._require_public(
            dataclasses.replace(part, name="tfds:other/1.0.0 train")
            for part in overlap._parts(moved)
        )


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("work/report.html", "is of a job and shows private queries"),
        ("work/results.json", "is of a job and shows private queries"),
        ("work/private/notes.txt", "is in .*work/private, where stages keep"),
        ("work/private/deep/notes.txt", "is in .*work/private, where stages keep"),
        ("pairs/qrels/train.tsv", "holds judgements"),
        ("away/queries.jsonl", "holds the queries of a BEIR"),
        ("away/queries.jsonl.gz", "holds the queries of a BEIR"),
        ("away/private_reads.jsonl", "is a record of a private training run"),
        ("away/ledger.jsonl", "is a record of a private training run"),
        ("logs/generator/log.jsonl", "is a log of training"),
        ("away/report.html", None),
        ("away/log.jsonl", None),
        ("private/docs.txt", None),  # a folder of somebody else
    ],
)
def test_private_files_of_a_job_are_no_public_text(tmp_path, path, why):
    for each in ("work/config.json", "work/private/fingerprint.key", path):
        (tmp_path / each).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / each).write_text("who sorts a list")
    link = tmp_path / "public.txt"
    link.symlink_to(tmp_path / path)
    for place in (tmp_path / path, link):
        found = sources.why_not_public(str(place))
        assert re.match(why, found or "") if why else found is None, found
        # As raw private pairs, they are their owner's.
        assert sources.why_not_public(str(place), raw_pairs=False) is None
