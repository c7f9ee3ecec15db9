"""`certificate.json`: what was guaranteed, by which mechanism, and what was not.

Every artefact derived from private queries carries one. Few of its numbers are free:
the spec, M, σ and the steps that were *paid*. All others follow from them, and
`verify_certificate` recomputes them from the file alone; words are rendered, and never
compared. That a run took place as stated, no file can show; the data's owner can
compare the certificate with the run's ledger. A run that started from released weights
states the ε of all runs (see `budget`), and lists the certificate of those weights
under `earlier`.

Weights copied without their certificate would look like public ones. So the JSON files
that no artefact is used without state the certificate's digest (`MARK`), and where one
is stated, the certificate has to be there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import tfdpsq
from tfdpsq import validation
from tfdpsq.privacy import accounting
from tfdpsq.privacy.plan import PrivacyPlan
from tfdpsq.privacy.proof import budget
from tfdpsq.privacy.proof.ledger import LedgerSummary
from tfdpsq.privacy.randomness import secure
from tfdpsq.privacy.spec import PrivacySpec

FORMAT = "tfdpsq-certificate/4"
FILE_NAME = "certificate.json"
MARK = "certificate_digest"
# Configs of a T5, a retriever, and a search that may be deployed alone.
CONFIGS = ("config.json", "model/config.json", "search/config.json")
# All files that are marked; a set's manifest holds the certificate itself.
MARKED = (*CONFIGS, "stage.json", "manifest.json")
# The privacy class in a `stage.json`, and its value if no certificate covers all of it.
GUARANTEE, PRIVATE = "guarantee", "private"
_TOLERANCE = 1e-6
# A coarser version of the accountant states a higher ε, which is still true.
_HIGHER = 1e-2

_UNIT = {
    "query": "one query, together with the document it is paired with",
    "pair": "one pair: one query with one of its documents",
    "user": "one user: all of that user's queries, with their documents",
}
_SEVERAL = {
    "query": "A person who wrote several queries",
    "pair": "A query with several documents, or a person who wrote several queries",
    "user": "A group of users, such as a household",
}
_SAMPLERS = {
    "poisson": (
        "Poisson-subsampled Gaussian mechanism (DP-SGD)",
        "Every step draws each unit independently with probability {batch_size}/"
        "{num_units}, and keeps at most {maximum}; what this costs is part of delta.",
    ),
    "shuffled": (
        "Gaussian mechanism on shuffled batches (DP-SGD)",
        "Every epoch cuts a fresh permutation into batches of exactly {batch_size} "
        "units. These are no Poisson samples: no amplification by sampling is claimed, "
        "and epsilon counts every epoch in full.",
    ),
}
_DEALT = (
    " Each is dealt, independently and uniformly, to one of {num_microbatches} groups, "
    "whose gradient is clipped as one."
)
_NOT_COVERED = (
    "The documents: they are public, and the guarantee is for queries only.",
    "Hyperparameters, if they were chosen by looking at results on private queries.",
    "Other artefacts made from the same queries: epsilons and deltas add up.",
    "Training curves, reports and metrics computed on private queries: they stay with "
    "the data's owner.",
)
_FLOATING_POINT = (
    "Attacks on floating-point arithmetic and on pseudorandom generators: noise is "
    "added in floating point, from two draws of Philox, and samples come from PCG64, "
    "both with 128 secret bits. The setting secure protects from these attacks."
)
_SECURE = (
    f"Attacks on {secure.GENERATOR}, which draws samples and noise, on the operating "
    "system's entropy, and on times and memory of the machine. Rounding before the "
    "clipped sum is put on its grid, and dropout, whose generator is not cryptographic."
)


@dataclasses.dataclass(frozen=True)
class Certificate:
    """The free entries of a certificate, from which all others follow.

    Attributes:
      plan: what was run: the spec, M and σ.
      steps: logical steps that were paid.
      description: what was trained, on what, in a sentence.
      sensitivity_argument: why one unit moves the sum of clipped gradients by at
        most `plan.sensitivity`.
      training: optimizer, engine, learning rate, trained parameters and so on.
      fingerprints: SHA-256 of the code, "code", and of the data; "pairs" is that of the
        private pairs, keyed.
      private_reads: reads of private data that no ε covers, each with "what" and
        "where".
      run_id: `Ledger.run` of the ledger that paid for the steps.
      earlier: certificate of the released weights, or the histogram, that the run
        started from.
      disjoint: "time" if the log of this run was declared to share no query with those
        of the earlier runs, "user" if no user; `None` if nothing was declared.
    """

    plan: PrivacyPlan
    steps: int
    description: str
    sensitivity_argument: str
    training: Mapping[str, Any]
    fingerprints: Mapping[str, str]
    private_reads: Sequence[Mapping[str, str]] = ()
    run_id: str | None = None
    earlier: Mapping[str, Any] | None = None
    disjoint: str | None = None

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Certificate:
        """Reads the free entries; raises an `InputError` if one is bad or missing."""
        require_format(fields)
        try:
            mechanism = fields["mechanism"]
            spec = PrivacySpec.from_recorded(fields["spec"])
            maximum = fields["sampler"]["max_batch_size"]
            names = "description", "training", "fingerprints", "private_reads", "run_id"
            return cls(
                PrivacyPlan(spec, maximum, mechanism["noise_multiplier"]),
                fields["accounting"]["steps_executed"],
                sensitivity_argument=mechanism["sensitivity_argument"],
                **{name: fields[name] for name in names},
                earlier=next(iter(fields.get("earlier", ())), None),
                disjoint=fields.get("disjoint"),
            )
        except (KeyError, TypeError) as error:
            raise validation.InputError(f"the certificate lacks {error}") from error

    def runs(self) -> list[budget.Run]:
        """Returns this run and those it follows, the last one first."""
        before = Certificate.from_json(self.earlier).runs() if self.earlier else []
        # A run without a ledger has no id: its statements tell it from others.
        key = self.run_id or digest_of(dataclasses.asdict(self))
        pairs = self.fingerprints.get("pairs")
        own = budget.follow(self.plan, self.steps, pairs, before, self.disjoint)
        return [dataclasses.replace(own, key=key), *before]

    def numbers(self) -> dict[str, Any]:
        """Returns the entries that `verify_certificate` compares.

        `guarantee` and the two ε of `accounting` are of all runs together; the rest is
        of the last one.
        """
        plan, spec, steps = self.plan, self.plan.spec, self.steps
        # By both accountants: "ε by PLD" can be checked against "by RDP".
        epsilons = {name: plan.epsilon(steps, name) for name in ("pld", "rdp")}
        delta, continuation = spec.target_delta, None
        if self.earlier is not None:
            total = budget.compose(budget.sharing(self.runs()))
            continuation = {
                "runs_counted": total.runs,
                "epsilon_of_this_run": epsilons[spec.accountant],
                "delta_of_this_run": delta,
                "epsilon_sum": total.epsilon_sum,
                "delta_sum": total.delta_sum,
            }
            delta = total.delta
            epsilons = {"pld": total.epsilon_pld, "rdp": total.epsilon_rdp}
        # No probability where none was used: nobody shall amplify by it.
        shuffled = spec.sampler == "shuffled"
        return {
            "private": spec.private,
            "plan": plan.fingerprint,
            "spec": spec.recorded(),
            "guarantee": {
                "epsilon": epsilons[spec.accountant],
                "delta": delta,
                "unit": spec.unit,
            },
            "mechanism": {
                "noise_multiplier": plan.noise_multiplier,
                "clip_norm": spec.clip_norm,
                "sensitivity": plan.sensitivity,
                "noise_stddev": plan.noise_stddev,
            },
            "sampler": {
                "name": spec.sampler,
                "n": spec.num_units,
                "expected_batch_size": spec.batch_size,
                "sampling_probability": None if shuffled else plan.sampling_probability,
                "max_batch_size": plan.max_batch_size,
            },
            "accounting": {
                "target_epsilon": spec.epsilon,
                "steps_planned": spec.steps,
                "steps_executed": steps,
                "releases_counted": plan.releases(steps)[1],
                "epsilon_pld": epsilons["pld"],
                "epsilon_rdp": epsilons["rdp"],
                "delta_for_truncation": plan.truncation_delta(steps),
            },
            **({"continuation": continuation} if continuation else {}),
        }

    def to_json(self) -> dict[str, Any]:
        """Returns the content of `certificate.json`; infinite ε is the string "inf".

        Raises:
          InputError: more steps than the plan covers; no total is proved.
        """
        found, runs, spec = self.numbers(), self.runs(), self.plan.spec
        reads = [*self.private_reads, *(self.earlier or {}).get("private_reads", ())]
        mechanism, drawn = _SAMPLERS[spec.sampler]
        if spec.unit == "user":
            drawn += " Up to {rows_per_unit} rows of each user take part, drawn anew."
        if spec.num_microbatches is not None:
            drawn += _DEALT
        sizes = {**spec.recorded(), "maximum": self.plan.max_batch_size}
        found["guarantee"] |= {
            "unit_in_words": _UNIT[spec.unit],
            "adjacency": budget.adjacency_of(runs),
        }
        found["mechanism"] |= {
            "name": mechanism if spec.private else "none: no clipping and no noise",
            "sensitivity_argument": self.sensitivity_argument,
        }
        found["sampler"]["in_words"] = drawn.format(**sizes)
        found["accounting"]["library"] = f"dp-accounting {version('dp-accounting')}"
        if self.earlier is not None:
            groups = budget.sharing(runs)
            declared = ", as was declared and nothing checks" * (len(groups) > 1)
            found |= {"earlier": [self.earlier], "disjoint": self.disjoint}
            found["continuation"]["in_words"] = (
                "It starts from the release under earlier. One "
                f"{spec.unit} can be in the logs of {max(map(len, groups))} of "
                f"{len(runs)} runs{declared}. Their costs compose if all settings were "
                "fixed without looking at earlier releases; else epsilon_sum at "
                "delta_sum holds."
            )
        limits = [line for run in runs for line in _limits(run.plan)]
        certificate = as_json(
            {
                "format": FORMAT,
                "run_id": self.run_id,
                "description": self.description,
                "training": self.training,
                "fingerprints": self.fingerprints,
                "private_reads": [r for i, r in enumerate(reads) if r not in reads[:i]],
                **found,
                "warnings": _warnings(runs),
                "not_covered": list(dict.fromkeys((*_NOT_COVERED, *limits))),
            }
        )
        return {**certificate, "digest": digest_of(certificate)}


def make_certificate(
    plan: PrivacyPlan, steps_executed: int, **stated: Any
) -> dict[str, Any]:
    """Returns the content of `certificate.json` for one finished training run.

    `stated` holds the other attributes of `Certificate`; errors are those of `to_json`.
    """
    return Certificate(plan, steps_executed, **stated).to_json()


def _warnings(runs: Sequence[budget.Run]) -> list[str]:
    specs = [run.plan.spec for run in runs]
    warnings = [spec.delta_warning for spec in specs if spec.delta_warning]
    early = [run for run in runs if run.steps < run.plan.spec.steps]
    if early and specs[0].private:
        steps = " and ".join(f"{run.steps} of {run.plan.spec.steps}" for run in early)
        warnings.append(
            f"Training stopped after {steps} planned steps. If noised weights decided "
            "that, the target epsilon of the whole plan applies (of several runs, "
            "epsilon_sum at delta_sum); if losses or metrics of private data, it is a "
            "read that no epsilon covers."
        )
    return list(dict.fromkeys(warnings))


def _limits(plan: PrivacyPlan) -> list[str]:
    """Returns what (ε, δ) does not speak of, as far as it depends on the plan.

    For k units of one owner, group privacy: M and M' of neighbours at distance k; by k
    steps of the definition, P(S) ≤ e^{kε}·Q(S) + (1 + e^ε + … + e^{(k−1)ε})·δ, and the
    sum is at most k·e^{(k−1)ε} (Vadhan 2017, *The Complexity of Differential Privacy*,
    lemma 2.2). The noise of a Gaussian mechanism is σ/k for k units, so that at the
    same δ it costs them more than k·ε.
    """
    spec = plan.spec
    return [
        _SECURE if spec.secure else _FLOATING_POINT,
        f"{_SEVERAL[spec.unit]}: each {spec.unit} is protected by itself. k of them "
        "together have k times epsilon only at a delta of up to "
        "k * exp((k - 1) * epsilon) times as much; at the same delta, far more.",
        "The number of units n, which was declared public."
        if spec.n_is_public
        else "The upper bound n on the number of units, which was public before.",
    ]


def runs_of(certificate: Mapping[str, Any]) -> list[budget.Run]:
    """Returns the runs behind a certificate, its own first."""
    return Certificate.from_json(certificate).runs()


def parents_of(certificate: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the certificates that one follows, the last one first."""
    for parent in certificate.get("earlier", ()):
        yield parent
        yield from parents_of(parent)


def inherited_certificate(
    *certificates: Mapping[str, Any] | None,
) -> dict[str, Any] | None:
    """Returns the certificate of what is made from several artefacts and public data.

    By post-processing, what is made from one guaranteed artefact has its guarantee;
    what an unprotected artefact had any part in has none. The guarantee of a run that
    continued others holds for all that was made from any of them. `None` is public.

    Raises:
      InputError: two different finite guarantees, which would have to be added.
    """
    present = [dict(c) for c in certificates if c is not None]
    for certificate in present:
        if not certificate["private"]:
            return certificate
    earlier = [parent for own in present for parent in parents_of(own)]
    present = [own for own in present if own not in earlier]
    if any(certificate != present[0] for certificate in present):
        raise validation.InputError(
            "two artefacts with guarantees of their own meet here, and their epsilons "
            "would add up. Use one of them, or one made from the other."
        )
    return present[0] if present else None


# -- Verification --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Verification:
    """Result of recomputing a certificate.

    Attributes:
      epsilon_pld: ε by PLD, at the certificate's δ and for its executed steps; NaN
        if it cannot be computed.
      epsilon_rdp: ε by RDP.
      problems: what is wrong, a sentence each; none if the certificate holds.
    """

    epsilon_pld: float
    epsilon_rdp: float
    problems: tuple[str, ...]


def verify_certificate(certificate: Mapping[str, Any]) -> Verification:
    """Recomputes σ → ε, δ, truncation and sensitivity, of earlier runs, too."""
    try:
        own = Certificate.from_json(certificate)
        expected = as_json(own.numbers())
    except (validation.InputError, ArithmeticError, TypeError) as error:
        return Verification(math.nan, math.nan, (f"what was run is unknown: {error}",))
    earlier = verify_certificate(own.earlier).problems if own.earlier else ()
    problems = [f"the earlier certificate: {problem}" for problem in earlier]
    accounts = expected["accounting"]
    # PLD rounds differently on other machines, by a share of δ; ε differs by no more.
    rounding = accounting.pld_rounding(accounts["releases_counted"])
    by_pld = _TOLERANCE + min(rounding / expected["guarantee"]["delta"], 1e-2)
    by_rdp = {"accounting.epsilon_rdp"}
    if own.plan.spec.accountant == "rdp":
        by_rdp |= {"guarantee.epsilon", "continuation.epsilon_of_this_run"}
    entries = dict(_entries(certificate))
    for path, value in _entries(expected):
        found = entries.get(path)
        spent = path.rpartition(".")[2].startswith("epsilon")
        lower = _TOLERANCE if path in by_rdp else by_pld
        if not _agree(found, value, *((lower, _HIGHER) if spent else (1e-9, 1e-9))):
            problems.append(
                f"{path} is {validation.shown(found)}, but what was run gives "
                f"{value!r}."
            )
    return Verification(
        float(accounts["epsilon_pld"]), float(accounts["epsilon_rdp"]), tuple(problems)
    )


def verified_runs(
    certificate: Mapping[str, Any], name: str = "the certificate"
) -> list[budget.Run]:
    """The runs behind a certificate, its own first, after verifying it.

    Raises:
      InputError: it does not hold, or guarantees nothing.
    """
    for problem in verify_certificate(certificate).problems:
        raise validation.InputError(f"{name} does not hold: {problem} Restore it.")
    if not certificate["private"]:
        raise validation.InputError(
            f"{name} is of a run without privacy (epsilon inf), so no total is finite. "
            "Leave it out only if its artefact was never released."
        )
    return runs_of(certificate)


def ledger_problems(
    certificate: Mapping[str, Any], ledger: LedgerSummary
) -> tuple[str, ...]:
    """Lists where a ledger contradicts the certificate of its run, or one after it."""
    chain = (certificate, *parents_of(certificate))
    own = next((each for each in chain if each["run_id"] == ledger.run), certificate)
    accounts = own["accounting"]
    return tuple(
        f"the certificate states {what} {stated!r}, but the ledger {paid!r}."
        for what, stated, paid in (
            ("plan", own["plan"], ledger.plan),
            ("planned steps", accounts["steps_planned"], ledger.steps_allowed),
            ("paid steps", accounts["steps_executed"], ledger.steps_paid),
            ("run", own["run_id"], ledger.run),
        )
        if stated != paid
    )


def _agree(stated: Any, expected: Any, lower: float, higher: float) -> bool:
    """Compares an entry with the recomputed one, up to relative tolerances."""
    number = isinstance(expected, (int, float)) and not isinstance(expected, bool)
    if not number or not isinstance(stated, (int, float)):
        return stated == expected
    return expected * (1 - lower) <= stated <= expected * (1 + higher)


def _entries(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the leaves of nested mappings by dotted path."""
    if not isinstance(value, Mapping):
        yield path, value
        return
    for key, inner in value.items():
        yield from _entries(inner, f"{path}.{key}" if path else key)


# -- Files -------------------------------------------------------------------------


def as_json(value: Any) -> Any:
    """Returns a value as JSON reads it back, with "inf" for infinity.

    Raises:
      KeyError: NaN, which no certificate holds.
    """
    text = json.dumps(value, default=lambda held: held.item())
    return json.loads(text, parse_constant={"Infinity": "inf"}.__getitem__)


def digest_of(certificate: Mapping[str, Any]) -> str:
    """SHA-256, in hex, over the canonical JSON of all but `digest` itself."""
    content = {key: value for key, value in certificate.items() if key != "digest"}
    text = json.dumps(as_json(content), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def code_fingerprint() -> str:
    """Returns the SHA-256 over all sources of the package `tfdpsq`."""
    root = pathlib.Path(tfdpsq.__file__).resolve().parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def require_format(certificate: Any) -> None:
    """Raises an `InputError` unless a value is a certificate of this version."""
    if not isinstance(certificate, Mapping) or certificate.get("format") != FORMAT:
        raise validation.InputError(
            f"it is no {FORMAT}. Make the artefact again by this version."
        )


def load_certificate(path: str | os.PathLike) -> dict[str, Any]:
    """Reads a certificate file, of which only the format is checked.

    Raises:
      DataError: it cannot be read, or is of another format.
    """
    try:
        certificate = validation.parse_json(pathlib.Path(path).read_text("utf-8"))
        require_format(certificate)
    except (OSError, ValueError) as error:
        problem = f"is not a certificate ({error})"
        raise validation.DataError(path, problem, f"Give a {FILE_NAME}.") from error
    return certificate


def read_certificate(directory: str | os.PathLike) -> dict[str, Any] | None:
    """Reads the certificate in a directory; `None` for public content.

    Args:
      directory: of a model, a set, or of anything else that a stage made.

    Raises:
      DataError: the file is not a certificate; it is missing, or another artefact's, as
        a mark next to it says; or the content is private, without a certificate.
    """
    folder = pathlib.Path(directory)
    path, stage = folder / FILE_NAME, folder / "stage.json"
    certificate = load_certificate(path) if path.is_file() else None
    for marked in (folder / name for name in MARKED):
        digest = digest_in(marked)
        if digest is not None and (certificate or {}).get("digest") != digest:
            raise validation.DataError(
                path,
                f"{'missing' if certificate is None else 'of something else'}, while "
                f"{marked.name} says that private queries had a part in this, by "
                f"certificate {digest}",
                "Copy that certificate.json from where this was made",
            )
    guarantee = stated(stage, GUARANTEE) if stage.is_file() else ""
    if certificate is None and guarantee in (PRIVATE, None):
        problem = f"{GUARANTEE} is {guarantee!r}, and no certificate covers it"
        raise validation.DataError(stage, problem, "Use it only for what is private")
    return certificate


def digest_in(marked: pathlib.Path) -> Any:
    """Returns the digest of the certificate that belongs to a file, or `None`."""
    if marked.name != "manifest.json":
        return stated(marked, MARK)
    certificate = stated(marked, "certificate")
    return certificate.get("digest") if isinstance(certificate, dict) else None


def stated(path: pathlib.Path, key: str) -> Any:
    """Returns an entry of a JSON file; `None` without it, or without a sound file."""
    try:
        values = validation.parse_json(path.read_text("utf-8"))
    except (OSError, ValueError):  # its own reader says what is wrong with it
        return None
    return values.get(key) if isinstance(values, dict) else None
