"""`certificate.json`: what was guaranteed, by which mechanism, and what was not.

Every artefact derived from private queries carries one. Its ε is computed from the
steps that were executed, never copied from the target. Nearly every number follows from
a few others, which is what `verification` checks; words are rendered, and never
compared. A run that started from released weights states the ε of all runs, and lists
the certificate of those weights under `earlier` (see `budget`).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from tfdpsq import validation
from tfdpsq.privacy import accounting
from tfdpsq.privacy.plan import PrivacyPlan
from tfdpsq.privacy.proof import budget
from tfdpsq.privacy.randomness import grid, secure

FORMAT = "tfdpsq-certificate/3"
FILE_NAME = "certificate.json"
# Of more that were continued one after another, `verify` would take minutes.
MOST_EARLIER = 12
_REMEDY = "Make the artefact again; a certificate must not be edited."

_UNIT_IN_WORDS = {
    "query": "one query, together with the document it is paired with",
    "pair": "one pair: one query with one of its documents. A query that is paired "
    "with several documents is as many units",
    "user": "one user: all of that user's queries, with the documents they are "
    "paired with",
}
_OF_EARLIER = "Of the runs before this one: "
_SAMPLER_NAME = {"poisson": "truncated Poisson", "shuffled": "shuffled epochs"}

# The unit, singular and plural.
NOUNS = {
    "query": ("query", "queries"),
    "pair": ("pair", "pairs"),
    "user": ("user", "users"),
}
_SEVERAL = {
    "query": "A person who wrote several queries: each query is protected by itself. "
    "k of them together have k times epsilon only at a delta of at most "
    "k * exp((k - 1) * epsilon) times as much; at the same delta they can have far "
    "more.",
    "pair": "A query with several documents, and a person who wrote several queries: "
    "each pair is protected by itself, not the query that it is of. k pairs together "
    "have k times epsilon only at a delta of at most k * exp((k - 1) * epsilon) times "
    "as much; at the same delta they can have far more.",
    "user": "A group of users, such as a household: each user is protected by itself. "
    "k of them together have k times epsilon only at a delta of at most "
    "k * exp((k - 1) * epsilon) times as much; at the same delta they can have far "
    "more.",
}
_DEFAULT = (
    "Attacks on floating-point arithmetic and on pseudorandom generators: noise is "
    "drawn and added in floating point, from the bits of two draws of Philox, and "
    "samples by numpy's PCG64; neither is a cryptographic generator. Both follow from "
    "128 bits of the operating system's entropy, compiled by XLA or not. "
    "Each of the two draws has a Philox key of 63 bits and as many secret bits in its "
    "counter. The setting secure protects from these attacks."
)
_SECURE = (
    "Attacks on the cryptographic generator itself or on the operating system's "
    "entropy, and on times and memory of the machine. Rounding errors where clipped "
    "gradients are computed and summed up, in floating point, before the sum is put "
    "on its grid: the sensitivity is that of exact sums. Dropout masks, which "
    "TensorFlow draws from a secret seed, but not by a cryptographic generator."
)

# Begins the warning of a run that took fewer steps than planned.
STOPPED = "Training stopped after"
HYPERPARAMETERS = (
    "Hyperparameters, if they were chosen by looking at results on private queries."
)
# True of every run: what (ε, δ) does not speak of.
_NEVER_COVERED = (
    "The documents: they are public, and the guarantee is for queries only.",
    HYPERPARAMETERS,
    "Other artefacts made from the same queries: whoever sees several of them must "
    "add up their epsilons and their deltas.",
    "Training curves, reports and metrics computed on private queries: they stay "
    "with the data's owner.",
)


def make_certificate(
    plan: PrivacyPlan,
    steps_executed: int,
    *,
    description: str,
    sensitivity_argument: str,
    training: Mapping[str, Any],
    fingerprints: Mapping[str, str],
    private_reads: Sequence[Mapping[str, str]] = (),
    run_id: str | None = None,
    earlier: Mapping[str, Any] | None = None,
    disjoint: str | None = None,
) -> dict[str, Any]:
    """The certificate of one finished training run.

    Args:
      plan: what was run.
      steps_executed: logical steps that really ran.
      description: what was trained, on what, in a sentence.
      sensitivity_argument: why one unit moves the sum of clipped gradients by at
        most `plan.sensitivity`.
      training: optimizer, engine, learning rate, trained parameters and so on.
      fingerprints: SHA-256 of the code, "code", and of the data; "pairs" is that of the
        private pairs, keyed.
      private_reads: further reads of private data, each with "what" and "where";
        none of them is covered by ε.
      run_id: `Ledger.run` of the ledger that paid for the steps.
      earlier: certificate of the released weights, or the histogram, that the run
        started from.
      disjoint: "time" if the log of this run was declared to share no query with those
        of the earlier runs, "user" if no user; `None` if nothing was declared.

    Returns:
      A dict of plain JSON values; infinite ε is the string "inf".

    Raises:
      InputError: more steps than the plan covers, a value that JSON cannot hold, or
        earlier runs with which no total is proved.
    """
    for name, text in (
        ("description", description),
        ("sensitivity_argument", sensitivity_argument),
    ):
        if not isinstance(text, str):
            raise validation.InputError(
                f"{name} is {validation.shown(text)}. Give a sentence, as text."
            )
    for name, entries in (("training", training), ("fingerprints", fingerprints)):
        if not isinstance(entries, Mapping):
            raise validation.InputError(
                f"{name} is {validation.shown(entries)}. Give a dict of values by name."
            )
    reads = [*private_reads, *_of_earlier(earlier, "private_reads")]
    found = computed(plan, steps_executed, fingerprints.get("pairs"), earlier, disjoint)
    found["format"] = FORMAT
    found["description"] = description
    found["mechanism"]["sensitivity_argument"] = sensitivity_argument
    found["accounting"]["library_version"] = library_version()
    found["run_id"] = run_id
    found["training"] = dict(training)
    found["fingerprints"] = dict(fingerprints)
    found["private_reads"] = [dict(read) for read in reads]
    if earlier is not None:
        found["earlier"], found["disjoint"] = [dict(earlier)], disjoint
        if run_id and any(run.key == run_id for run in budget.runs_of(earlier)):
            raise validation.InputError(
                f"run_id {run_id} is that of a run that it continues. Every run has a "
                "ledger of its own."
            )
    try:
        text = json.dumps(found, allow_nan=False, default=_plain)
    except (TypeError, ValueError) as error:
        raise validation.InputError(
            f"the certificate holds what JSON cannot: {error}. Give training, "
            "fingerprints and private_reads as texts and finite numbers."
        ) from error
    # Read back, so that the digest is of what a file will hold.
    certificate = json.loads(text)
    certificate["digest"] = digest_of(certificate)
    return certificate


def computed(
    plan: PrivacyPlan,
    steps_executed: int,
    pairs: str | None = None,
    earlier: Mapping[str, Any] | None = None,
    disjoint: str | None = None,
) -> dict[str, Any]:
    """All of a certificate that follows from the runs; arguments as there.

    `guarantee` and the two ε of `accounting` are of all runs together; `spec`,
    `mechanism`, `sampler` and the steps of `accounting` are of the last one.

    Raises:
      InputError: more steps than the plan covers; earlier runs with which no total is
        proved.
    """
    spec = plan.spec
    # Both accountants are always given: "ε by PLD" can be checked against "by RDP".
    epsilons = {name: plan.epsilon(steps_executed, name) for name in ("pld", "rdp")}
    shuffled = spec.sampler == "shuffled"
    found: dict[str, Any] = {
        "private": spec.private,
        "spec": {name: json_number(value) for name, value in spec.recorded().items()},
        "plan": plan.fingerprint,
        "guarantee": {
            "epsilon": json_number(epsilons[spec.accountant]),
            "delta": spec.target_delta,
            "unit": spec.unit,
            "unit_in_words": _UNIT_IN_WORDS[spec.unit],
            "adjacency": budget.adjacency_of(spec),
        },
        "mechanism": {
            "name": _mechanism(spec),
            "noise_multiplier": plan.noise_multiplier,
            "clip_norm": spec.clip_norm,
            "sensitivity": plan.sensitivity,
            "noise_stddev": plan.noise_stddev,
            "normalised_by": "expected batch size",
            **_cancelling(plan),
        },
        "sampler": {
            "name": _SAMPLER_NAME[spec.sampler],
            "in_words": _sampler_in_words(plan),
            "n": spec.num_units,
            "n_in_words": "the exact number of units, declared to be public"
            if spec.n_is_public
            else "a public upper bound on the number of units",
            "expected_batch_size": spec.batch_size,
            # No probability where none was used: nobody shall amplify by it.
            "sampling_probability": None if shuffled else plan.sampling_probability,
            "max_batch_size": plan.max_batch_size,
            "rows_per_unit": spec.rows_per_unit,
            **({} if spec.clip_groups is None else {"clip_groups": spec.clip_groups}),
        },
        "accounting": {
            "accountant": spec.accountant,
            "library": "dp-accounting",
            "pld_interval": accounting.pld_interval(plan.noise_multiplier)
            if spec.private
            else None,
            "target_epsilon": json_number(spec.epsilon),
            "steps_planned": spec.steps,
            "steps_executed": steps_executed,
            "releases_counted": plan.releases(steps_executed)[1],
            "epsilon_pld": json_number(epsilons["pld"]),
            "epsilon_rdp": json_number(epsilons["rdp"]),
            "delta_for_truncation": plan.truncation_delta(steps_executed),
        },
        "randomness": randomness(plan),
        "warnings": _warnings(plan, steps_executed),
        "not_covered": _not_covered(plan),
    }
    if earlier is not None:
        _add_earlier(found, plan, steps_executed, pairs, earlier, disjoint)
    return found


def _add_earlier(
    found: dict[str, Any],
    plan: PrivacyPlan,
    steps_executed: int,
    pairs: str | None,
    earlier: Mapping[str, Any],
    disjoint: str | None,
) -> None:
    """Makes a certificate's guarantee that of its run and of all before it."""
    before = budget.runs_of(earlier)
    if len(before) > MOST_EARLIER:
        raise validation.InputError(
            f"it follows {len(before)} runs, one after the other; {MOST_EARLIER} at "
            "most. Start from public weights."
        )
    own = budget.follow(plan, steps_executed, pairs, before, disjoint)
    total = budget.compose(budget.sharing([own, *before]))
    alone = dict(found["guarantee"])
    by = {"pld": total.epsilon_pld, "rdp": total.epsilon_rdp}
    found["guarantee"].update(
        epsilon=by[plan.spec.accountant],
        delta=total.delta,
        adjacency=total.adjacency,
        unit_in_words=f"{alone['unit_in_words']}, of any of the logs that were "
        "trained on one after the other",
    )
    found["accounting"].update(
        epsilon_pld=total.epsilon_pld, epsilon_rdp=total.epsilon_rdp
    )
    found["continuation"] = {
        "in_words": _continued_in_words(plan.spec.unit, total, disjoint),
        "runs_counted": total.runs,
        "epsilon_of_this_run": alone["epsilon"],
        "delta_of_this_run": alone["delta"],
        "epsilon_sum": total.epsilon_sum,
        "delta_sum": total.delta_sum,
    }
    found["warnings"] += _of_earlier(earlier, "warnings")
    if total.stopped_early:
        # A run's own line names its target, which is not that of all runs.
        lines = [line for line in found["warnings"] if STOPPED not in line]
        lines.append(
            f"{STOPPED} fewer steps than planned in {total.stopped_early} of all "
            f"{total.runs} runs. If that was decided by looking at noised weights, "
            "epsilon_sum at delta_sum applies instead; if by losses or metrics of "
            "private data, that choice is a private read, which no epsilon covers."
        )
        found["warnings"] = lines
    if own.apart:
        one, _ = NOUNS[plan.spec.unit]
        found["not_covered"].append(
            f"A {one} that is in several of the logs: they were declared to share "
            "none, which nothing here checks."
        )
    lines = _of_earlier(earlier, "not_covered")
    found["not_covered"] += [
        line
        for line in lines
        if line.removeprefix(_OF_EARLIER) not in found["not_covered"]
    ]


def _continued_in_words(unit: str, total: budget.Total, disjoint: str | None) -> str:
    one, many = NOUNS[unit]
    condition = (
        " That holds if the settings of these runs were fixed without looking at what "
        "was released before; else epsilon_sum at delta_sum holds."
    )
    start = "This run came after the release whose certificate is under earlier."
    if total.rests_on_declarations:
        shared = "no user" if disjoint == budget.USER else "no query"
        return (
            f"{start} The logs were declared to share {shared}. For {many} of an "
            f"earlier log this run is post-processing; for {many} of this log, the "
            "weights that it started from are the same whether or not the "
            f"{one} is there. So the largest epsilon and the largest delta hold."
            + condition
            * (total.runs_of_one_unit > 1)
        )
    return (
        f"{start} One {one} can be in the logs of all {total.runs} runs, so epsilon "
        f"composes them.{condition}"
    )


def _of_earlier(earlier: Mapping[str, Any] | None, name: str) -> list[Any]:
    """Lines, or reads, of the earlier certificate, marked as such."""

    def marked(text: str) -> str:
        return text if text.startswith(_OF_EARLIER) else f"{_OF_EARLIER}{text}"

    return [
        {**entry, "what": marked(entry["what"])}
        if isinstance(entry, Mapping)
        else marked(entry)
        for entry in (earlier or {}).get(name, ())
    ]


def _mechanism(spec: Any) -> str:
    if not spec.private:
        return "none: no clipping and no noise"
    if spec.noise_window is not None:
        return "Gaussian mechanism on shuffled batches, matrix factorisation (DP-MF)"
    if spec.sampler == "shuffled":
        return "Gaussian mechanism on shuffled batches (DP-SGD)"
    return "Poisson-subsampled Gaussian mechanism (DP-SGD)"


def _cancelling(plan: PrivacyPlan) -> dict[str, Any]:
    window = plan.noise_window
    if window is None:
        return {}
    return {
        "noise_window": window.steps,
        "noise_in_words": f"Within every {window.steps} steps of an epoch of "
        f"{window.steps_per_epoch}, the noise of a step is a weighted sum of its own "
        "draw and of those of the steps before it: the inverse of a lower triangular "
        "Toeplitz matrix, whose square adds up the steps and whose columns have norm 1 "
        "at most, times independent noise of deviation noise_stddev. A unit is in one "
        "step of an epoch, so that the matrix times the sums of clipped gradients "
        "moves by the sensitivity at most, once an epoch.",
    }


def _sampler_in_words(plan: PrivacyPlan) -> str:
    spec = plan.spec
    rows = (
        f" Of each, up to {spec.rows_per_unit} of its rows, drawn anew in every step."
        if spec.unit == "user"
        else ""
    )
    if spec.clip_groups is not None:
        rows = (
            f" Each is then dealt, independently and uniformly, to one of "
            f"{spec.clip_groups} groups, of which each keeps at most "
            f"{plan.group_capacity}"
            + ("; clipped is the gradient of a group." if spec.private else ".")
        )
    if spec.sampler == "poisson":
        return (
            f"Every step draws each unit independently with probability "
            f"{spec.batch_size}/{spec.num_units}, and keeps at most "
            f"{plan.max_batch_size} of them; what this truncation costs is part of "
            f"delta.{rows}"
        )
    return (
        f"Every epoch cuts a fresh permutation into batches of exactly "
        f"{spec.batch_size} units.{rows} These are not Poisson samples, and no "
        "amplification by sampling was claimed: epsilon counts every epoch in full. "
        "The smaller epsilon that Poisson accounting would state does not hold for "
        "what ran."
    )


def _warnings(plan: PrivacyPlan, steps_executed: int) -> list[str]:
    warnings = [plan.spec.delta_warning] if plan.spec.delta_warning else []
    if plan.spec.private and steps_executed < plan.spec.steps:
        warnings.append(
            f"{STOPPED} {steps_executed} of {plan.spec.steps} planned "
            "steps. If that was decided by looking at the noised weights, the target "
            f"epsilon of the whole plan, {plan.spec.epsilon:g}, applies instead; if by "
            "losses or metrics of private data, that choice is a private read, which "
            "no epsilon covers."
        )
    return warnings


def _not_covered(plan: PrivacyPlan) -> list[str]:
    spec = plan.spec
    number = (
        "The number of units n, which was declared to be public: it sets delta and "
        "the sampling probability."
        if spec.n_is_public
        else "The upper bound n on the number of units, which was public before; the "
        "number itself is protected like the rest."
    )
    never = list(_NEVER_COVERED)
    never.insert(3, not_covered(plan))
    return [*never, several_units(spec.unit), number]


def inherited_certificate(
    *certificates: Mapping[str, Any] | None,
) -> dict[str, Any] | None:
    """The certificate of what is made from several artefacts and public data.

    By post-processing, what is made from one guaranteed artefact has its guarantee;
    what an unprotected artefact had any part in has none. The guarantee of a run that
    continued others holds for all that was made from any of them.

    Args:
      *certificates: of the artefacts used; `None` for public ones.

    Returns:
      The one that applies, or `None` if all were public.

    Raises:
      InputError: two different finite guarantees, which would have to be added.
    """
    present = [dict(c) for c in certificates if c is not None]
    for certificate in present:
        if not certificate["private"]:
            return certificate
    earlier = {
        digest_of(parent) for own in present for parent in budget.parents_of(own)
    }
    present = [own for own in present if digest_of(own) not in earlier]
    if any(certificate != present[0] for certificate in present):
        raise validation.InputError(
            "two artefacts with guarantees of their own meet here, and their "
            "epsilons would add up. Start from public weights, or from the artefact "
            "that the other one was made from."
        )
    return present[0] if present else None


def json_number(value: Any) -> Any:
    """The value, or "inf" for infinity, which JSON has none of."""
    return "inf" if value == math.inf else value


def library_version() -> str:
    """The version of dp-accounting that computes here."""
    return importlib.metadata.version("dp-accounting")


def digest_of(certificate: Mapping[str, Any]) -> str:
    """SHA-256, in hex, over the canonical JSON of all but `digest` itself.

    Raises:
      ValueError: a value that JSON cannot hold.
      TypeError: likewise.
    """
    content = {key: value for key, value in certificate.items() if key != "digest"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def load_certificate(path: str | os.PathLike) -> dict[str, Any]:
    """The content of a certificate file, of which only the format is checked.

    Raises:
      InputError: the path is empty, or a URL.
      DataError: it cannot be read, is no JSON object, says a thing twice, or is of
        another format.
    """
    name = os.fspath(path)
    if not name.strip() or "://" in name:
        raise validation.InputError(
            f"{name!r} is not a path of this machine. Give a {FILE_NAME}, copied here "
            "first where it lies elsewhere."
        )
    path = pathlib.Path(path)
    try:
        certificate = validation.parse_json(
            path.read_text("utf-8"),
            object_pairs_hook=_without_repetition,
            parse_constant=_no_number,
        )
    except OSError as error:
        raise validation.DataError(
            path, f"cannot be read ({error.strerror})", f"Give a {FILE_NAME}."
        ) from error
    except (ValueError, RecursionError) as error:
        raise validation.DataError(
            path, f"is not a certificate ({error})", _REMEDY
        ) from error
    problem = format_problem(certificate)
    if problem:
        raise validation.DataError(path, problem, _REMEDY)
    return certificate


def format_problem(certificate: Any) -> str | None:
    """Says why a value cannot be a certificate of this format, or returns `None`."""
    if sum(1 for _ in budget.parents_of(certificate)) > MOST_EARLIER:
        return f"it continues more than {MOST_EARLIER} certificates, one after another"
    if not isinstance(certificate, Mapping) or "format" not in certificate:
        return f"this is no {FORMAT} file"
    found = certificate["format"]
    if found != FORMAT:
        return (
            f"its format is {validation.shown(found)}, and this tfdpsq reads {FORMAT!r}"
        )
    return None


def _without_repetition(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    # Readers differ in which of two equal keys they believe.
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"{validation.shown(twice)} stands there twice")
    return found


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


def _plain(value: Any) -> Any:
    """A number of numpy as a number of Python; json asks for what it cannot do."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{value!r} is of type {type(value).__name__}")


def several_units(unit: str) -> str:
    """States what (ε, δ) means for k units of one owner, by group privacy.

    M and M' of neighbours at distance k: by k steps of the definition,
    P(S) ≤ e^{kε}·Q(S) + (1 + e^ε + … + e^{(k−1)ε})·δ, and the sum is at most
    k·e^{(k−1)ε} (Vadhan 2017, *The Complexity of Differential Privacy*, lemma 2.2). The
    noise of a Gaussian mechanism is σ/k for k units, so that at the same δ it costs
    them more than k·ε.

    Args:
      unit: "query", "pair" or "user".
    """
    return _SEVERAL[unit]


def not_covered(plan: PrivacyPlan) -> str:
    """The attacks on random numbers that (ε, δ) does not speak of."""
    return _SECURE if plan.spec.secure else _DEFAULT


def randomness(plan: PrivacyPlan) -> dict[str, Any]:
    """The entry that says what random numbers were drawn with."""
    if not plan.spec.secure:
        return {
            "secure": False,
            "generator": "numpy's PCG64 for samples, Philox for noise; neither is "
            "cryptographic",
            "key_bits": {"samples": 128, "noise": 128},
            "grid_step": None,
            "in_words": "Noise is drawn and added in floating point. What this does "
            "not protect from stands under not_covered.",
        }
    words = (
        f"Samples, their dealing to groups and noise come from {secure.GENERATOR}, "
        f"under keys that HKDF-SHA256 derives for each from {secure.KEY_BITS} bits of "
        "the operating system's entropy."
    )
    if plan.grid_step is not None:
        words += (
            f" The clipped sum is rounded to multiples of {plan.grid_step!r}, and the "
            "noise is a Gaussian rounded to the same grid, drawn exactly up to a total "
            "variation of 2^-100 a weight; both are added as integers. So what is "
            "released is a function of a Gaussian mechanism in real numbers, and its "
            "low-order bits tell nothing more. The stated sensitivity includes the "
            f"rounding of up to 2^{grid.MOST_WEIGHTS.bit_length() - 1} weights, a "
            "share of 2^-16."
        )
    return {
        "secure": True,
        "generator": f"{secure.GENERATOR} of the package cryptography (OpenSSL)",
        "key_bits": {"samples": secure.KEY_BITS, "noise": secure.KEY_BITS},
        "grid_step": plan.grid_step,
        "in_words": words,
    }
