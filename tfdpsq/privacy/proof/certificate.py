"""`certificate.json`: what was guaranteed, by which mechanism, and what was not.

Every artefact derived from private queries carries one. The spec, M, σ and the steps
that were *paid* are its free numbers. All others follow from them, and
`verify_certificate` recomputes them from the file alone; words are never compared. No
file can show that a run took place as stated; the data's owner has its ledger. A run
that started from released weights states the ε of all runs (see `budget`), and lists
the certificate of those weights under `earlier`.

Weights copied without their certificate would look like public ones. So the JSON files
that every user of an artefact reads state the certificate's digest (`MARK`): where it
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
# Of a T5, a retriever, and a search or a reranker that may be deployed alone.
CONFIGS = tuple(f"{at}config.json" for at in ("", "model/", "search/", "reranker/"))
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
        "units. Epochs count in full: no amplification by sampling is claimed.",
    ),
}
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
      plan: the spec, M and σ.
      steps: logical steps that were paid.
      description: what was trained, on what, in a sentence.
      sensitivity_argument: why one unit moves the sum by at most `plan.sensitivity`.
      training: optimizer, engine, learning rate, trained parameters and so on.
      fingerprints: SHA-256 of the "code" and the data; of the private "pairs", keyed.
      private_reads: `PrivateReads.entries`.
      run_id: `Ledger.run`.
      earlier: certificate of the weights or histogram that the run started from.
      disjoint: "time" if its log was declared to share no query with those of earlier
        runs, "user" if no user; else `None`.
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
        _require_format(fields)
        try:
            mechanism, stated = fields["mechanism"], fields["spec"]
            epsilon = math.inf if stated["epsilon"] == "inf" else stated["epsilon"]
            spec = PrivacySpec(**{**stated, "epsilon": epsilon})
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
            raise validation.InputError(f"bad or missing entry: {error}") from error

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

        `guarantee` and the ε of `accounting` are of all runs; the rest of the last one.
        """
        plan, spec, steps = self.plan, self.plan.spec, self.steps
        epsilons = {name: plan.epsilon(steps, name) for name in ("pld", "rdp")}
        delta, continuation = spec.target_delta, {}
        if self.earlier is not None:
            total = budget.compose(budget.sharing(self.runs()))
            continuation["continuation"] = {
                "runs_counted": total.runs,
                "epsilon_of_this_run": epsilons[spec.accountant],
                "delta_of_this_run": delta,
                "epsilon_sum": total.epsilon_sum,
                "delta_sum": total.delta_sum,
            }
            delta = total.delta
            epsilons = {"pld": total.epsilon_pld, "rdp": total.epsilon_rdp}
        shuffled = spec.sampler == "shuffled"
        return {
            "private": spec.private,
            "plan": plan.fingerprint,
            "spec": dataclasses.asdict(spec),
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
                # No amplification is claimed for shuffled batches.
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
            **continuation,
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
            drawn += " Of each user drawn, up to {rows_per_unit} random rows are used."
        if spec.num_microbatches is not None:
            drawn += " Each is dealt, independently and uniformly, to one of"
            drawn += " {num_microbatches} groups, which are clipped as one."
        sizes = {**dataclasses.asdict(spec), "maximum": self.plan.max_batch_size}
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
                f"One {spec.unit} can be in the logs of {max(map(len, groups))} of "
                f"{len(runs)} runs{declared}. If settings were chosen after looking at "
                "earlier releases, epsilon_sum at delta_sum holds."
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
    """Returns `Certificate.to_json` of a run; `stated` are its other attributes."""
    return Certificate(plan, steps_executed, **stated).to_json()


def _warnings(runs: Sequence[budget.Run]) -> list[str]:
    specs = [run.plan.spec for run in runs]
    warnings = [spec.delta_warning for spec in specs if spec.delta_warning]
    early = [run for run in runs if run.steps < run.plan.spec.steps]
    if early and specs[0].private:
        steps = " and ".join(f"{run.steps} of {run.plan.spec.steps}" for run in early)
        warnings.append(
            f"Training stopped after {steps} planned steps. If noised weights decided "
            "that, the target epsilon applies (of several runs, epsilon_sum at "
            "delta_sum); if private losses or metrics did, no epsilon covers it."
        )
    return list(dict.fromkeys(warnings))


def _limits(plan: PrivacyPlan) -> list[str]:
    """Returns what (ε, δ) does not speak of, as far as it depends on the plan.

    Group privacy, for k units of one owner: by k steps of the definition,
    P(S) ≤ e^{kε}·Q(S) + (1 + e^ε + … + e^{(k−1)ε})·δ, the sum being at most
    k·e^{(k−1)ε} (Vadhan 2017, *The Complexity of Differential Privacy*, lemma 2.2). For
    k units the noise multiplier is σ/k: at the same δ they cost more than k·ε.
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

    By post-processing, it is that of the one guaranteed artefact, or of the last of a
    chain of continued runs; an unprotected one leaves no guarantee. `None` is public.

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
            "two artefacts have guarantees of their own, which would add up. Use one."
        )
    return present[0] if present else None


@dataclasses.dataclass(frozen=True)
class Verification:
    """Result of recomputing a certificate, which holds if there are no problems.

    ε is at the certificate's δ, for its executed steps; NaN if it cannot be computed.
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
    rounding = accounting.PLD_ROUNDING * accounts["releases_counted"]
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
            found = validation.shown(found)
            problems.append(f"{path} is {found}, but what was run gives {value!r}.")
    epsilons = float(accounts["epsilon_pld"]), float(accounts["epsilon_rdp"])
    return Verification(*epsilons, tuple(problems))


def verified_runs(
    certificate: Mapping[str, Any], name: str = "the certificate"
) -> list[budget.Run]:
    """Verifies a certificate, and returns its runs.

    Raises:
      InputError: it does not hold, or guarantees nothing.
    """
    for problem in verify_certificate(certificate).problems:
        raise validation.InputError(f"{name} does not hold: {problem} Restore it.")
    if not certificate["private"]:
        raise validation.InputError(
            f"{name} is of a run without privacy (epsilon inf): no total is finite."
        )
    return runs_of(certificate)


def ledger_problems(
    certificate: Mapping[str, Any], ledger: LedgerSummary
) -> tuple[str, ...]:
    """Lists where a ledger contradicts the certificate of its run, or one after it."""
    chain = (certificate, *parents_of(certificate))
    own = next((each for each in chain if each["run_id"] == ledger.run), certificate)
    return tuple(
        f"the certificate states {what} {stated!r}, but the ledger {paid!r}."
        for what, stated, paid in (
            ("plan", own["plan"], ledger.plan),
            ("paid steps", own["accounting"]["steps_executed"], ledger.steps_paid),
            ("run", own["run_id"], ledger.run),
        )
        if stated != paid
    )


def _agree(stated: Any, expected: Any, lower: float, higher: float) -> bool:
    """Compares an entry with the recomputed one, up to relative tolerances."""
    if not isinstance(expected, float) or not isinstance(stated, (int, float)):
        return stated == expected
    return expected * (1 - lower) <= stated <= expected * (1 + higher)


def _entries(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the leaves of nested mappings by dotted path."""
    if not isinstance(value, Mapping):
        yield path, value
        return
    for key, inner in value.items():
        yield from _entries(inner, f"{path}.{key}" if path else key)


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


def _require_format(certificate: Any) -> None:
    if not isinstance(certificate, Mapping) or certificate.get("format") != FORMAT:
        raise validation.InputError(f"it is no {FORMAT}. Make the artefact again.")


def load_certificate(path: str | os.PathLike) -> dict[str, Any]:
    """Reads a file; raises a `DataError` unless it is a certificate of this version."""
    try:
        certificate = validation.parse_json(pathlib.Path(path).read_text("utf-8"))
        _require_format(certificate)
    except (OSError, ValueError) as error:
        problem = f"is not a certificate ({error})"
        raise validation.DataError(path, problem, f"Give a {FILE_NAME}.") from error
    return certificate


def read_certificate(directory: str | os.PathLike) -> dict[str, Any] | None:
    """Reads the certificate in an artefact's directory; `None` for public content.

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
            problem = "missing" if certificate is None else "of something else"
            problem += f", while {marked.name} says that private queries had a part in "
            problem += f"this, by certificate {digest}"
            remedy = "Copy that certificate.json from where this was made"
            raise validation.DataError(path, problem, remedy)
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
    """Returns an entry of a JSON file; `None` if either is missing or damaged."""
    try:
        values = validation.parse_json(path.read_text("utf-8"))
    except (OSError, ValueError):  # its own reader says what is wrong with it
        return None
    return values.get(key) if isinstance(values, dict) else None
