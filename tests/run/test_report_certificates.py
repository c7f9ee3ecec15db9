"""Certificates in words: the certificate's own numbers, and no promise beyond."""

import functools
import math
import re

from helpers import plans
from helpers import report_page as _page

from tfdpsq.privacy import (
    Selection,
    TrainedRun,
    make_selection_certificate,
)
from tfdpsq.run.core import releases
from tfdpsq.run.reporting import data_card

_plan = functools.partial(plans.plan, num_units=2000, batch_size=100, steps=20)


def _text(tmp_path, *certificates):
    """Returns the guarantee's section of a report, as its reader sees it."""
    items = [
        {"name": name, "certificate": certificate} for name, certificate in certificates
    ]
    page = _page.write(tmp_path, certificates=items, curves={}, epsilon_curves={})
    text = _page.text(page)
    start = text.index("The guarantee, in words")
    return text[start : text.index("Original and synthetic queries", start)]


def _certificate(epsilon, **changes):
    return plans.certificate(
        _plan(epsilon=epsilon, **changes),
        15,
        description="T5 fine-tuned on pydocs",
        sensitivity_argument="each loss depends on one query",
        private_reads=[{"what": "validation loss", "where": "finetune"}],
    )


def test_certificate_in_words_carries_the_certificates_numbers(tmp_path):
    certificate = _certificate(2.0)
    text = _text(tmp_path, ("T5", certificate))
    epsilon = certificate["guarantee"]["epsilon"]

    # 15 of 20 steps ran: less was spent than the target, and that is what counts.
    assert epsilon < 2.0
    shown = float(
        re.search(r"ε = ([.\d]+), δ = 0.00025; the target was ε = 2", text)[1]
    )
    assert epsilon <= shown < epsilon + 0.01
    factor = float(re.search(r"e\^ε = ([.\d]+) times", text)[1])
    assert math.exp(epsilon) <= factor < math.exp(epsilon) * 1.001
    assert "Steps executed 15 of 20 planned" in text
    assert "n = 2,000, a public upper bound on the number of units" in text
    assert "truncated Poisson. Every step draws each unit independently" in text
    assert "with probability 100/2000" in text
    assert "add or remove one unit" in text
    assert "each loss depends on one query" in text
    assert "validation loss: finetune" in text
    for line in certificate["not_covered"]:
        assert line in text
    assert certificate["warnings"]
    for line in certificate["warnings"]:
        assert line in text


def test_a_sets_card_says_what_its_certificate_says():
    certificate = _certificate(2.0)
    manifest = {"count": 3, "documents": 2, "certificate": certificate}
    released, private = (
        data_card.text({**manifest, "guarantee": guarantee})
        for guarantee in (releases.CERTIFIED, releases.PRIVATE)
    )
    # Of canaries' pairs a set is private, however small its epsilon.
    assert "**Not for release**" in private and "Not for release" not in released
    for text in (released, private):
        assert "validation loss: finetune" in text
        for line in certificate["not_covered"]:
            assert line in text


def test_shuffled_batches_are_called_what_they_are(tmp_path):
    certificate = _certificate(2.0, sampler="shuffled", n_is_public=True)
    text = _text(tmp_path, ("T5", certificate))

    assert "Had any query been replaced by nothing" in text
    assert "been left out of the private data" not in text
    assert "no amplification by sampling was claimed" in text
    assert "the exact number of units, declared to be public" in text
    assert "with probability" not in text


def test_certificate_without_privacy_or_without_numbers_promises_nothing(tmp_path):
    for certificate in (
        _certificate(math.inf),
        {},
        {"guarantee": {"epsilon": 1.0}},
        {"guarantee": {"delta": 1e-5}},
    ):
        text = _text(tmp_path, ("T5", certificate))

        assert "No guarantee (ε = ∞)" in text
        assert "times as likely" not in text


def test_what_no_guarantee_covers_is_said_once(tmp_path):
    def item(extra):
        guarantee = {"epsilon": 1.0, "delta": 1e-5}
        lines = ["Documents are public.", extra]
        return extra, {"guarantee": guarantee, "not_covered": lines}

    text = _text(tmp_path, item("Only A."), item("Only B."))

    assert text.count("Documents are public.") == 1
    assert text.index("Documents are public.") > text.rindex("Only B.")
    assert "Not covered Only A." in text and "Not covered Only B." in text


def test_releasing_several_artefacts_adds_up(tmp_path):
    def item(epsilon, delta=1e-5):
        return "n", {"guarantee": {"epsilon": epsilon, "delta": delta}}

    both = _text(tmp_path, item(8.0), item(4.5), item("inf"))

    assert "all 2 protected runs" in both
    assert "ε = 12.5, δ = 2e-05" in both
    assert "at the sum" not in _text(tmp_path, item(8.0), item("inf"))


def test_a_run_chosen_among_several_says_so_and_what_is_not_covered(tmp_path):
    plan = _plan(epsilon=1.0, delta=1e-4)
    own = {**_certificate(2.0), "private_reads": []}
    runs = {name: TrainedRun(plan, {}, None) for name in "ab"}
    texts = {}
    for choice_epsilon in (3.5, None):
        selection = Selection(runs, "a", 2.0, 2e-4, choice_epsilon, "sentence BLEU")
        certificate = make_selection_certificate(selection, own, [])
        text = texts[choice_epsilon] = _text(tmp_path, ("T5", certificate))
        assert "all 2 runs" in text and "sentence BLEU" in text
    # The ε of the choice is the larger one here, and holds for every query.
    assert f"e^ε = {math.exp(3.5):.4g} times" in texts[3.5]
    assert "Had any query been left out" in texts[3.5]
    assert "the choice 3.5" in texts[3.5]
    assert "Had any query that was trained on been left out" in texts[None]
    assert "the choice not covered" in texts[None]
    # Nor does it hold for them if training goes on from what was chosen.
    chosen = make_selection_certificate(
        Selection(runs, "a", 2.0, 2e-4, None, "sentence BLEU"), own, []
    )
    further = {**_certificate(2.0), "continuation": {"parent": chosen}}
    text = _text(tmp_path, ("T5", further))
    assert "Had any query that was trained on been left out" in text
    assert "nothing is guaranteed" in texts[None]
