"""The main job, killed on the way and started again: what it leaves, and what it keeps.

`helpers.tiny_job` runs it once through the command line; these tests only read it.
"""

import json
import shutil

import pytest
from helpers import tiny, tiny_job

from tfdpsq.privacy import read_certificate
from tfdpsq.run import jobs
from tfdpsq.run.common import canary_set
from tfdpsq.run.frame import settings
from tfdpsq.run.stages.pipeline import STAGE
from tfdpsq.validation import InputError

pytestmark = [pytest.mark.xdist_group("job"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def results(job):
    return json.loads((job.directory / "private" / "results.json").read_text())


def _config(job):
    pairs = job.directory.parent / "pairs"
    return tiny.tiny_config(pairs, pairs.with_name("embedded"))


def _run(config, workdir):
    return jobs.run(STAGE, settings.from_config(STAGE.Settings, config), workdir)


# -- Killed and restarted ------------------------------------------------------------


def test_killed_job_keeps_what_it_had_finished(job):
    after = tiny_job.stages(job.directory)
    made = "prepare public_model histogram_eps0.4 generator_inf synthetic_inf "
    made += "retriever_untrained retriever_public_only retriever_original "
    made += "retriever_synthetic_inf"
    assert {path.parent.name for path in job.before} == set(made.split())
    assert job.before.items() <= after.items()
    assert not list((job.directory / "private" / "partial").iterdir())
    assert "Synthetic, ε = 8 " in job.table


def test_moved_job_is_found_finished(job, tmp_path):
    moved = tmp_path / "elsewhere"
    shutil.copytree(job.directory, moved)
    made = tiny_job.stages(moved)
    (moved / "private" / "report.html").unlink()
    _run(_config(job), moved)
    assert tiny_job.stages(moved) == made and len(made) >= 20
    assert (moved / "private" / "report.html").is_file()


def test_job_of_changed_pairs_is_refused(job, tmp_path):
    """Finished stages were made from other data: refused, not silently mixed."""
    queries = job.directory.parent / "pairs" / "queries.jsonl"
    before = queries.read_text()
    try:
        queries.write_text(before.replace("who ", "what ", 1))
        with pytest.raises(InputError, match="inputs.pairs"):
            _run(_config(job), job.directory)
    finally:
        queries.write_text(before)


def test_retrievers_are_validated_on_pairs_that_are_free(job):
    def hit_rates(name):
        events = (job.directory / "private" / "logs" / name).rglob("events.out.*")
        return any(b"factorized_top_k" in path.read_bytes() for path in events)

    assert hit_rates("retriever_synthetic_eps8") and hit_rates("retriever_public_only")
    assert not hit_rates("retriever_original")  # its pairs are private


# -- Numbers -------------------------------------------------------------------------


def test_results_have_every_row_with_its_epsilon(results):
    expected = (
        "bm25 public_only untrained original synthetic_inf synthetic_eps8 direct_eps8 "
        "encoder adapter_inf adapter_eps8 adapter_eps0_5 reranked_public_only "
        "reranked_inf reranked_eps8"
    )
    assert [row["name"] for row in results["rows"]] == expected.split()
    for row in results["rows"]:
        low, high = row["ndcg@10_ci"]
        assert 0 <= low <= row["ndcg@10"] <= high <= 1
        assert 0 <= row["recall@10"] <= 1
    epsilons = {row["name"]: row["epsilon"] for row in results["rows"]}
    for name in ("bm25", "untrained", "public_only", "reranked_public_only"):
        assert epsilons[name] is None
    for name in ("original", "synthetic_inf", "reranked_inf"):
        assert epsilons[name] == "inf"
    for name in ("synthetic_eps8", "direct_eps8", "adapter_eps8", "reranked_eps8"):
        assert 7.8 <= epsilons[name] <= 8.0  # spent, not the target
    assert results["seconds"]["Generator, ε = 8"] > 0
    assert set(results["fingerprints"]) == {"pairs", "code"}


def test_what_is_made_of_the_synthetic_set_has_its_certificate(job):
    release = job.directory / "release"
    certificate = read_certificate(release / "generator_eps8")
    for name in ("synthetic_eps8/set", "retriever_synthetic_eps8"):
        assert read_certificate(release / name) == certificate
    for name in ("public_model", "retriever_public_only"):
        assert read_certificate(release / name) is None


def test_private_reads_are_recorded_and_in_the_certificate(job):
    lines = (job.directory / "private" / "private_reads.jsonl").read_text().splitlines()
    recorded = [json.loads(line) for line in lines]
    certificate = read_certificate(job.directory / "release" / "generator_eps8")
    # Before the generator: hard negatives, and the losses of every training.
    trained = next(n for n, r in enumerate(recorded) if "training loss" in r["what"])
    for read in recorded[: trained + 1]:
        assert read in certificate["private_reads"]
    assert any("judgements" in read["what"] for read in recorded[trained:])


def test_logs_agree_with_ledgers_and_certificates(job):
    private = job.directory / "private"
    for name in ("generator_inf", "generator_eps8", "retriever_direct_eps8"):
        log = (private / "logs" / name / "log.jsonl").read_text().splitlines()
        points = [json.loads(line) for line in log]
        ledger = (private / "runs" / name / "ledger.jsonl").read_text()
        steps = range(1, len(ledger.splitlines()))
        assert [point["step"] for point in points] == [*steps], name
        (path,) = job.directory.glob(f"*/{name}/certificate.json")
        certificate = json.loads(path.read_text())
        own = certificate["guarantee"]["epsilon"]
        if "continuation" in certificate:  # of a histogram
            own = certificate["continuation"]["epsilon_of_this_run"]
        found = points[-1].get("epsilon", "inf")
        assert own == found == "inf" or found == pytest.approx(own, rel=1e-6)


# -- Files ---------------------------------------------------------------------------


def test_every_stage_before_the_evaluation_has_the_jobs_seed(job):
    seeds = {
        path.parent.name: json.loads(path.read_text())["settings"].get("seed")
        for path in job.directory.glob("*/*/stage.json")
    }
    assert seeds.pop("mined") is None  # nothing is drawn
    assert seeds.pop("evaluation") == 0
    assert seeds.pop("canaries") == -1  # drawn afresh: a seed would tell the secrets
    assert len(seeds) >= 11 and set(seeds.values()) == {5}


def test_canaries_are_audited_and_stay_private(job):
    private = job.directory / "private"
    made = canary_set.read_canaries(private / "canaries")
    found = json.loads((private / "audit_eps8" / "audit.json").read_text())
    assert found["epsilon_certified"] <= 8.0 and found["unit"] == "query"
    forms = {entry["form"] for entry in found["canaries"]}
    assert forms == {*canary_set.OUR_FORMS, "all"}
    secrets = [canary.secret.encode() for canary in made]
    for path in (job.directory / "release").rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        assert not any(secret in content for secret in secrets), path
    # Only what was trained on canaries tells of them.
    trained = json.loads(
        (private / "audited_generator_eps8" / "stage.json").read_text()
    )
    assert trained["settings"]["pairs"].endswith("private/canaries/data")
