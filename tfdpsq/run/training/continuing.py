"""Private training that comes after another release: of weights, or of a histogram.

What both guarantee together is in `privacy.proof.budget`. Weights that it starts
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
from tfdpsq.privacy.proof import budget
from tfdpsq.privacy.proof.certificate import verified_runs
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
    return {"continues": settings.Text("", ("", COMPOSED, *budget.DISJOINT))}


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
    name = f"the certificate of the histogram {config.histogram}"
    earlier = verified_runs(context.histogram, name)
    return budget.plan_within(spec, earlier)


def earlier_of(
    config: ml_collections.ConfigDict, context: contexts.Context
) -> tuple[dict[str, Any] | None, str | None]:
    """Returns the certificate that a run follows, and how the logs are disjoint."""
    if not config.continues:
        return context.histogram, None
    return context.parent, None if config.continues == COMPOSED else config.continues


def planned_runs(
    config: ml_collections.ConfigDict,
    context: contexts.Context,
    plan: privacy.PrivacyPlan,
) -> list[budget.Run]:
    """Returns the run to its last step, and those that it follows.

    Raises:
      InputError: the earlier certificate does not hold, or both cannot be composed.
    """
    parent, disjoint = earlier_of(config, context)
    place = config.init if config.continues else config.get("histogram")
    earlier = (
        [] if parent is None else verified_runs(parent, f"the certificate of {place}")
    )
    pairs, name = context.inputs["pairs"], os.path.basename(context.run_dir)
    own = budget.follow(plan, plan.spec.steps, pairs, earlier, disjoint)
    runs = [dataclasses.replace(own, key=f"planned {name}"), *earlier]
    if earlier:
        total = budget.compose(budget.sharing(runs))  # before anything is spent
        logging.info(
            "%s: with what was released before, epsilon is %.4g at delta %.3g",
            name,
            total.epsilon_rdp if plan.spec.accountant == "rdp" else total.epsilon_pld,
            total.delta,
        )
    return runs


def certificate_of(
    config: ml_collections.ConfigDict,
    context: contexts.Context,
    plan: privacy.PrivacyPlan,
    steps: int,
    **stated: Any,
) -> dict[str, Any]:
    """Returns the certificate of a private run, and of what it follows.

    `steps` are the logical steps that were paid; `stated` is what
    `privacy.make_certificate` takes besides.
    """
    earlier, disjoint = earlier_of(config, context)
    return privacy.make_certificate(
        plan,
        steps,
        run_id=private_training.run_id(context.run_dir),
        earlier=earlier,
        disjoint=disjoint,
        **stated,
    )
