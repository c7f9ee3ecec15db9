"""Training the retriever itself under DP: how far one pair can move a gradient.

DP-SGD adds noise in proportion to the *sensitivity* of the sum of clipped
gradients: the furthest it can move when one pair is added to, or removed from,
the batch. For a loss that is a sum over pairs this is the clip norm C. The
in-batch softmax is none: every pair is a negative of every other. Three ways out,
for neighbouring data sets of which one is the other plus one pair:

| method | what is clipped to C | sensitivity | the step must draw |
|---|---|---|---|
| `naive` | the gradient of a row's in-batch loss | (2n − 1)·C | Poisson, at most n |
| `microbatch` | that of a group's summed losses | 2·C | Poisson, then dealt to groups |
| `public_negatives` | that of a row's loss among public documents | C | Poisson |

The losses are in `direct_losses`. Each function here has the derivation, and the
tests search for neighbours that come near the bound and beyond none.

Source: Carranza et al. 2024 (`naive`, their direct DP-SGD baseline); `microbatch` and
`public_negatives` are ours.
"""

from __future__ import annotations

from tfdpsq.validation import positive_integer

METHODS = ("naive", "microbatch", "public_negatives")


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

    Neighbours that *replace* a pair instead move the sum by up to 2nC: both rows n
    count, 2C, and the others 2(n − 1)C.

    What a row's loss reads besides the batch, its `positive_keys`, must be known from
    the row alone. So train on one pair a query, as `BeirDirectory.pairs` gives, without
    `encode_pairs`'s `positives`: those it finds among the *other* pairs, so that a pair
    would change rows of batches that it is not in.

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


def microbatch_sensitivity_multiplier() -> int:
    """Sensitivity of the sum of clipped group gradients, in units of C: 2.

    Every pair drawn is dealt to one of G groups by a throw of its own; the softmax
    is that of the group, and what is clipped is the gradient h_g of the group's
    summed losses. Let S + x be S and one pair more, dealt to group g. The other
    groups hold the same pairs as before (that dealing leaves them alone is shown by
    `privacy.randomness.sampling.DealtSampler`), and their losses read nothing else. So

      ‖Σ_g clip(h_g(S + x)) − Σ_g clip(h_g(S))‖ = ‖clip(h_g(S + x)) − clip(h_g(S))‖
                                                ≤ 2C,

    which is reached when x turns its group's gradient around. If the group had one
    pair or none before, it is C: one pair among none has loss 0. Replacing a pair
    moves the sum by 2C too, if both are dealt in the same way. Inside a group anything
    may depend on anything: in-group masks, a row that finds no place, even batch
    normalisation.

    What would break it: to cut a shuffled batch into groups one after the other, for
    a pair more shifts all later ones; or a softmax that reads another group.

    Returns:
      2.
    """
    return 2


def public_negatives_sensitivity_multiplier() -> int:
    """Sensitivity of the sum of clipped row gradients among public negatives: 1.

    Documents are public. So row i is scored against its own document d_i and a set N
    of documents from the public corpus, whose embeddings are constants to the
    gradient: ℓ_i = −log softmax(s_ii; N(i)), with N(i) what is left of N without row
    i's own document and its query's known answers. ℓ_i reads pair i, the weights and
    N, and no other pair. The sum of clipped gradients is one over pairs:

      ‖Σ_{i≤n} clip(∇ℓ_i) − Σ_{i<n} clip(∇ℓ_i)‖ = ‖clip(∇ℓ_n)‖ ≤ C,

    at any batch size, scale and size of N: ordinary DP-SGD (replacing a pair: 2C).
    Known answers must come with the row, not be looked up among the other pairs: see
    `naive_sensitivity_multiplier`.

    *Amplification by Poisson sampling holds.* It needs that, all else given, the step
    sees f(S) or, with probability q, f(S + x). What else is there: the weights θ,
    which are the output of earlier steps; and N with its embeddings, made from θ (or
    an earlier one), the public corpus and public random numbers. N is drawn without
    looking at which rows are in the step, or in the data. So (θ, N) has one joint law
    with the past outputs, whether x is in the data or not, except through those
    outputs; given it, S and the throw for x are independent of it. The step is the
    subsampled Gaussian mechanism conditionally on (θ, N), and adaptive composition
    takes care of θ. N may be published.

    What would break it: negatives from the sampled rows' documents (in-batch), or
    from the documents that occur in the training pairs, a set which the private
    queries decide; negatives that are mined for one row and shared with others (for
    its own row alone they may depend on its query); a number of negatives that
    follows the batch; embeddings refreshed by anything but released weights.

    What the guarantee covers: the queries, and which document each is paired with.
    Not the documents, which are public here.

    Returns:
      1.
    """
    return 1
