"""Private training that comes after another release: of weights, or of a histogram.

What both guarantee together is in `privacy.proof.continuation`. Weights that it starts
from have the ε of their own run, and `epsilon` is that of this one. What a histogram
costs is taken off `epsilon`.
"""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

import ml_collections
from absl import logging

from tfdpsq import privacy, validation
from tfdpsq.privacy.proof import budget, composition
from tfdpsq.run.core import settings, sources
from tfdpsq.run.training import context as contexts
from tfdpsq.run.training import private_training

COMPOSED = "composed"


def declared() -> dict[str, settings.Setting]:
    """Declares how a run on new pairs relates to the runs that `init` came from.

    "" refuses weights that were trained on private queries. "composed" counts all runs
    together, whatever their pairs; "time" declares that no query, and "user" that no
    user, of these pairs was among theirs, so that the largest ε holds.
    """
    return {"continues": settings.Text("", ("", COMPOSED, *composition.DISJOINT))}


def require_continuable(
    config: ml_collections.ConfigDict, parent: dict[str, Any] | None
) -> None:
    """Refuses starting weights that do not fit `continues`.

    `parent` is the certificate of the starting weights, `None` for public ones.

    Raises:
      InputError: private weights without `continues`, or `continues` without them or
        without a finite ε.
    """
    epsilon = config.epsilon
    histogram = config.get("histogram")
    if histogram and (config.continues or not math.isfinite(float(epsilon))):
        raise validation.InputError(
            f"histogram is {histogram}, whose cost counts within a finite epsilon of "
            f"a run from public weights, but epsilon is {epsilon} and continues "
            f"{config.continues!r}. Leave histogram out."
        )
    if config.continues and parent is None:
        raise validation.InputError(
            f"continues is {config.continues!r}, but init ({config.init!r}) has no "
            "certificate: no private run is continued. Leave continues out."
        )
    if config.continues and not math.isfinite(float(epsilon)):
        raise validation.InputError(
            f"continues is {config.continues!r} and epsilon {epsilon}: nothing would "
            "be guaranteed. Leave continues out, or give a finite epsilon."
        )
    if not config.continues:
        remedy = "Start from public weights"
        if math.isfinite(float(epsilon)):
            remedy += (
                ", or set continues: 'composed' counts all runs together; 'time' or "
                "'user' declares that these pairs share no query, or no user, with the "
                "earlier ones"
            )
        consequence = f"epsilon {epsilon} would not be all that was spent"
        sources.require_public(config.init, parent, consequence, remedy)


def make_plan(
    config: ml_collections.ConfigDict,
    context: contexts.Context,
    spec: privacy.PrivacySpec,
) -> privacy.PrivacyPlan:
    """Returns the plan of a run, which with its histogram stays within the spec's ε.

    Raises:
      InputError: the histogram's certificate does not hold, or its cost is above 5 %.
    """
    if context.histogram is None:
        return privacy.make_plan(spec)
    name = f"the histogram {config.histogram}"
    earlier = budget.release_of(context.histogram, f"the certificate of {name}")
    return budget.plan_within(spec, {name: earlier})


def continuation_of(
    config: ml_collections.ConfigDict,
    context: contexts.Context,
    plan: privacy.PrivacyPlan,
) -> privacy.Continuation | None:
    """Returns the run to its last step and what it continues; `None` if nothing.

    Raises:
      InputError: the earlier certificate does not hold, or both cannot be composed.
    """
    parent, place = context.histogram, config.get("histogram")
    if config.continues:  # and no histogram, by `require_continuable`
        parent, place = context.parent, config.init
    if parent is None:
        return None
    disjoint = None if config.continues in ("", COMPOSED) else config.continues
    found = privacy.Continuation(
        plan,
        plan.spec.steps,
        context.inputs["pairs"],
        parent,
        budget.release_of(parent, f"the certificate of {place}"),
        disjoint,
    )
    total = found.total()  # before anything is spent
    logging.info(
        "%s: with what was released before, epsilon is %.4g at delta %.3g",
        os.path.basename(context.run_dir),
        total.epsilon_rdp if plan.spec.accountant == "rdp" else total.epsilon_pld,
        total.delta,
    )
    return found


def certificate_of(
    config: ml_collections.ConfigDict,
    context: contexts.Context,
    plan: privacy.PrivacyPlan,
    steps: int,
    **stated: Any,
) -> dict[str, Any]:
    """Returns the certificate of a private run, and of what it continues.

    `steps` are the logical steps that were paid; `stated` is what
    `privacy.make_certificate` takes besides.
    """
    run_id = private_training.run_id(context.run_dir)
    continuation = continuation_of(config, context, plan)
    if continuation is None:
        return privacy.make_certificate(plan, steps, run_id=run_id, **stated)
    done = dataclasses.replace(continuation, steps=steps, run_id=run_id)
    return privacy.make_continuation_certificate(done, **stated)
