"""Links below `release/` to parts of an artefact, which cost what all of it does.

A link to the whole directory was counted, and one to its only file, or to a folder in
it, was free.
"""

import json
import shutil

import pytest
from test_budget import _certificate, _exit, _runs_counted, _write

from tfdpsq.data.records import PART_FILE
from tfdpsq.run.core import spending


@pytest.fixture
def base(tmp_path):
    """One artefact that is released, and others, with their files, that are not."""
    work, made = tmp_path / "work", tmp_path / "made"
    _write(work / "release" / "one", _certificate(head="a"))
    other = _certificate(head="b")
    marked = {"certificate_digest": other["digest"], "guarantee": "certified"}
    _write(made / "adapter", other, **marked)
    _write(made / "old", other)  # of a version that marked nothing
    _write(made / "set", other)
    manifest = {"certificate": other, "guarantee": "certified"}
    (made / "set" / "manifest.json").write_text(json.dumps(manifest))
    # A stage that keeps its certificate inside the set, and a retriever's model.
    _write(made / "stage" / "set", other)
    (made / "stage" / "stage.json").write_text('{"guarantee": "certified"}')
    _write(made / "retriever", other)
    _write(work / "private" / "kept", other)
    for path in (
        "made/adapter/adapter.npy",
        "made/adapter/documents/part.npy",
        "made/old/adapter.npy",
        f"made/set/beir/{PART_FILE}",
        "made/set/beir/queries.jsonl",
        "made/stage/examples.txt",
        "made/retriever/model/weights.h5",
        "work/private/kept/documents/deep/down/part.npy",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("numbers")
    config = {"certificate_digest": other["digest"]}
    (made / "retriever" / "model" / "config.json").write_text(json.dumps(config))
    return tmp_path


def _runs(capsys, *words):
    code, out, _ = _exit(capsys, *words, "--json")
    assert code == 0, out
    return json.loads(out)["logs"][0]["runs"]


@pytest.mark.parametrize(
    "target",
    [
        "made/adapter",
        "made/adapter/adapter.npy",
        "made/adapter/documents",
        "made/adapter/documents/part.npy",
        "made/old/adapter.npy",
        "made/set/beir",
        "made/set/beir/queries.jsonl",
        "made/stage/examples.txt",
        "made/retriever/model/weights.h5",
        "work/private/kept/documents",
        "work/private/kept/documents/deep/down",
        "work/private/kept/documents/deep/down/part.npy",
    ],
)
def test_a_link_to_a_part_costs_what_all_of_it_does(base, capsys, monkeypatch, target):
    release = base / "work" / "release"
    assert _runs(capsys, release) == 1
    (release / "deep").mkdir()
    (release / "deep" / "link").symlink_to(base / target)
    assert _runs(capsys, release) == 2
    # Nor is the next stage allowed what it spent.
    assert _runs_counted(monkeypatch, [], release / "next") == 3


def test_links_to_several_files_of_an_artefact_are_one_run(base, capsys):
    """Also where copies could not be told from other runs, as no ledger is known."""
    folder = base / "work" / "release" / "links"
    folder.mkdir()
    nameless = json.dumps(_certificate(head=None))
    (base / "made" / "old" / "certificate.json").write_text(nameless)
    (folder / "a.npy").symlink_to(base / "made" / "old" / "adapter.npy")
    (folder / "b.npy").symlink_to(base / "made" / "old" / "adapter.npy")
    (folder / "old").symlink_to(base / "made" / "old")
    assert _runs(capsys, base / "work" / "release") == 2
    assert _runs(capsys, base / "work") == 2


def test_only_what_links_release_or_show_is_counted(base, capsys):
    work, target = base / "work", base / "made" / "adapter" / "adapter.npy"
    (work / "private" / "notes").symlink_to(target)
    assert _runs(capsys, work) == 1
    # A folder that is called neither is walked, and what it holds counts.
    (work / "shared").mkdir()
    (work / "shared" / "adapter.npy").symlink_to(target)
    assert _runs(capsys, work) == 2


def test_a_link_to_what_is_public_is_free(base, capsys):
    release, public = base / "work" / "release", base / "made" / "stage" / "public"
    public.mkdir()
    (public / "stage.json").write_text('{"guarantee": "public"}')
    (public / "spiece.model").write_text("words")
    (base / "corpus.jsonl").write_text("a table")
    (release / "spiece.model").symlink_to(public / "spiece.model")
    (release / "corpus.jsonl").symlink_to(base / "corpus.jsonl")
    assert _runs(capsys, release) == 1


@pytest.mark.parametrize(
    ("target", "lost", "why"),
    [
        ("adapter/adapter.npy", "adapter", "missing, while stage.json says"),
        ("adapter/documents", "adapter", "missing, while stage.json says"),
        ("set/beir", "set", "missing, while manifest.json says"),
        ("stage/examples.txt", "stage/set", "but there is no certificate.json in"),
    ],
)
def test_a_link_to_a_part_whose_certificate_is_lost_is_named(
    base, capsys, target, lost, why
):
    (base / "made" / lost / "certificate.json").unlink()
    release = base / "work" / "release"
    (release / "link").symlink_to(base / "made" / target)
    code, out, _ = _exit(capsys, release, "--budget=5")
    assert code == 1 and "what is left is unknown" in out
    assert why in out.split("NOT COMPOSED")[1]


def test_a_link_to_rows_without_their_set_is_named(base, capsys):
    """Nothing there tells whether the set was public, and what it cost otherwise."""
    copy, link = base / "copy", base / "work" / "release" / "rows.jsonl"
    shutil.copytree(base / "made" / "set" / "beir", copy)
    link.symlink_to(copy / "queries.jsonl")
    refused = spending.find_certificates(base / "work").refused
    assert [*refused] == [str(link)]
    assert f"releases {copy}/queries.jsonl, a part of a set" in refused[str(link)]
    # As what they were copied from, they would be free.
    (copy / "manifest.json").write_text('{"guarantee": "public"}')
    assert not spending.find_certificates(base / "work").refused


def test_a_certificate_above_a_private_directory_does_not_cover_its_keys(base):
    """It is of what lies next to that directory."""
    work, link = base / "work", base / "work" / "release" / "key"
    (work / "certificate.json").write_text(json.dumps(_certificate(head="a")))
    (work / "private" / "fingerprint.key").write_text("0")
    link.symlink_to(work / "private" / "fingerprint.key")
    refused = spending.find_certificates(work / "release").refused
    assert [*refused] == [str(link)]
    assert "in private/, where nothing states a guarantee" in refused[str(link)]
