"""Training the retriever itself under DP: how far one pair can move a gradient.

DP-SGD adds noise in proportion to the *sensitivity* of the sum of clipped
gradients: the furthest it can move when one pair is added to, or removed from,
the batch. For a loss that is a sum over pairs this is the clip norm C. The
in-batch softmax is none: every pair is a negative of every other.
"""

from __future__ import annotations

from tfdpsq.validation import positive_integer


def naive_sensitivity_multiplier(max_batch_size: int) -> int:
    """Sensitivity of the clipped sum of in-batch gradients, in units of C: 2n − 1.

    The paper's baseline ("direct DP") keeps the in-batch softmax, clips the
    gradient of each row's loss to norm C, and sums over rows. Two batches are
    neighbours when one is the other plus one pair. Let the larger have the rows
    1..n, n being the new one, with clipped gradients g_i; and let g'_i be those of
    the rows 1..n−1 in the smaller batch.

      ‖Σ_{i≤n} g_i − Σ_{i<n} g'_i‖ = ‖g_n + Σ_{i<n} (g_i − g'_i)‖
                                   ≤ ‖g_n‖ + Σ_{i<n} (‖g_i‖ + ‖g'_i‖)
                                   ≤ C + 2(n − 1)C = (2n − 1)C.

    Row i < n had no say in whether pair n exists, yet its loss has one more
    document in its softmax, so nothing holds g_i near g'_i: they can point in
    opposite directions. The bound is nearly reached (see the tests), so noise for
    C alone, as ordinary DP-SGD would add, protects nothing here.

    With Poisson sampling of the pairs the other rows are drawn independently of
    pair n, and given them the step releases f(S), or, with probability q, f(S + n):
    the subsampled Gaussian mechanism at sensitivity (2n − 1)C, whose amplification
    holds as usual. The bound must cover every batch that can be drawn, so n is the
    static maximum at which draws are truncated, never the realised size. Padding
    rows have loss 0 and are no one's negatives: they move nothing.

    What a row's loss reads besides the batch, its `positive_keys`, are the known
    positives of its *own* query. They belong to the row, and go with it.

    Args:
      max_batch_size: n, the most pairs a batch can hold.

    Returns:
      The factor by which C is to be multiplied, 2n − 1.

    Raises:
      InputError: n below 1.

    Source: the direct-DP baseline of Carranza et al. 2024; Kong et al. 2023 (arXiv
      2310.03104) discuss why in-batch losses need more noise than C.
    """
    return 2 * positive_integer("max_batch_size", max_batch_size) - 1
