"""The traps that the suite must not walk into: one textual replacement each.

Every entry is a mistake that somebody made, in this project or in one that it looks
up to, written as the change to the source that brings it back. `tests` are the quick
ones that must then fail; the rest of the suite may fail as well.

    python tests/privacy/mutations/catalogue.py

prints how many there are of each kind.
"""

import collections
import dataclasses
import pathlib
import runpy

FOLDER = pathlib.Path(__file__).parent
ROOT = FOLDER.parents[2]
# By what they mistake; see each file.
FILES = (
    "of_clipping.py",
    "of_trials.py",
    "of_precision.py",
    "of_noise.py",
    "of_sampling.py",
    "of_secure.py",
    "of_records.py",
    "of_retrieval.py",
    "of_draws.py",
    "of_weights.py",
    "of_accounts.py",
    "of_releases.py",
    "of_places.py",
    "of_statements.py",
    "of_books.py",
    "of_resumes.py",
    "of_budgets.py",
    "of_limits.py",
    "of_derivations.py",
    "of_continuations.py",
    "of_audits.py",
    "of_histograms.py",
    "of_choices.py",
    "of_adapters.py",
    "of_callbacks.py",
    "of_jobs.py",
)
# Parts of the guarantee that a mistake can be in.
KINDS = (
    "sampling",
    "keys",
    "weights",
    "coefficients",
    "clipping",
    "noise",
    "ledger",
    "certificate",
    "composition",
    "reads",
    "release",
    "negatives",
    "ties",
    "LoRA",
    "filters",
    "resumes",
    "precision",
    "secure",
)

# The classic ones, which must always be there.
ASKED_FOR = (
    "clip_without_cross_terms",
    "second_forward_for_norms",
    "noise_per_replica",
    "noise_per_microstep",
    "noise_key_reused_across_variables",
    "divide_by_realised_batch",
    "skip_empty_batches",
    "nan_propagates",
    "epsilon_from_target_instead_of_executed",
    "shuffle_accounted_as_poisson",
    "num_microbatches_below_batch_at_sensitivity_c",
    "padding_rows_counted",
    "ledger_written_after_the_update",
    "seed_stored_in_the_release",
    "unregistered_layer_skipped",
)


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One mistake.

    Attributes:
      name: says what the mutated code does.
      kind: one of KINDS, the part of the guarantee that it breaks.
      file: the file it is made in, from the repository's root.
      old: text that stands there exactly once.
      new: what replaces it.
      tests: ids of tests, from the repository's root, of which one or more fail.
      why: what it would cost.
    """

    name: str
    kind: str
    file: str
    old: str
    new: str
    tests: tuple
    why: str

    def __post_init__(self):
        """Checks that there is a change, a test and a reason."""
        if self.old == self.new or not self.tests or not self.why:
            raise ValueError(f"{self.name}: give a change, tests and a reason.")
        if self.kind not in KINDS:
            raise ValueError(f"{self.name}: kind is {self.kind!r}, none of {KINDS}.")
        if isinstance(self.tests, str):
            raise ValueError(f"{self.name}: tests are a tuple of ids.")

    def applied(self):
        """The whole file with the mistake in it."""
        text = (ROOT / self.file).read_text("utf-8")
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.name}: the text to replace stands {text.count(self.old)} "
                f"times in {self.file}, not once. The code has changed: write the "
                "mistake anew, for the code as it is."
            )
        return text.replace(self.old, self.new)


def _mutation(entry):
    """A mutation of its fields by name, or in their order with one test."""
    if isinstance(entry, dict):
        return Mutation(**entry)
    *first, test, why = entry
    return Mutation(*first, (test,), why)


def mutations():
    """All of them, in the order of the files."""
    return [
        _mutation(entry)
        for name in FILES
        for entry in runpy.run_path(str(FOLDER / name))["MUTATIONS"]
    ]


def counts():
    """Kind to number of mutations, in the order of KINDS."""
    found = collections.Counter(mutation.kind for mutation in mutations())
    return {kind: found[kind] for kind in KINDS}


if __name__ == "__main__":
    for kind, number in counts().items():
        print(f"{number:5} {kind}")
    print(f"{len(mutations()):5} in all")
