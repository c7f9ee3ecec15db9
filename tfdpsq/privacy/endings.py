"""Endings of a training run before its last step: on request, or diverged.

Divergence: after every compiled call a run's weights are compared with infinity and
NaN. Where they are not finite any more the run is over, as no later step can mend them,
and the weights are set back to those of the last call after which all were finite.

Privacy: which step that is follows from the iterates alone, that is from what the
mechanism releases in each step. Choosing it, and giving out that step's weights, is
post-processing of the whole plan's output: imagine that the remaining steps are taken
and their output is thrown away. So the guarantee of the whole plan holds, and no
smaller one is claimed: that training ended at step k was decided by looking at noised
weights, which an ε of k steps does not cover. All steps of the plan are therefore paid
for in the ledger, taken or not, and the certificate counts what is paid.

Steps between the last saved state and that call are taken again, with their rows, noise
and dropout. They have to be the same steps, or the weights given out would be those of
a second try, and that the first diverged would say more of the same noise; so a step
that draws what cannot be repeated is refused (`replay.require_repeatable`). Two things
are repeated only up to rounding: sums that a GPU adds up in any order (until
`tf.config.experimental.enable_op_determinism`), and sums over another number of
replicas. Of a first try that a kill ended, nothing leaves the private directory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdpsq import validation


class Preempted(Exception):
    """Training ended before its time because it was asked to (`train`'s `preempted`).

    Attributes:
      executed: logical steps executed. With a directory their state is saved, and
        the same call goes on from there.
    """

    def __init__(self, executed: int):
        """Takes how far the run came."""
        super().__init__(f"training was asked to end, after step {executed}")
        self.executed = executed


class Diverged(validation.InputError):
    """Training diverged; the variables hold weights from before it did.

    Attributes:
      paid: steps paid for: all of the plan.
      diverged_at: the step after which some weight was NaN or infinite.
      weights_of: the step whose weights the variables hold; all of them are finite.
    """

    def __init__(self, paid: int, diverged_at: int, weights_of: int):
        """Takes what was paid, and which steps."""
        super().__init__(
            f"training diverged: after step {diverged_at} the weights hold NaN or "
            f"infinity. Those kept are of step {weights_of}; {paid} steps are paid "
            "for. Lower the learning rate."
        )
        self.paid, self.diverged_at, self.weights_of = paid, diverged_at, weights_of


def finite_check(variables: Sequence[tf.Variable]) -> Callable[[], bool]:
    """Returns a function that says whether all values of the variables are finite.

    Reads each value once; a step differentiates every row of a batch by them.
    """

    @tf.function
    def all_finite() -> tf.Tensor:
        each = [tf.reduce_all(tf.math.is_finite(v)) for v in variables]
        return tf.reduce_all(tf.stack(each))

    return lambda: bool(all_finite())
