"""T5's pretraining task: spans of a text are cut out and have to be written.

Raffel et al. 2020, section 3.1.4: 15 % of the tokens are dropped, in spans of 3 on
average. Each span is replaced by a sentinel of its own; the target is every sentinel
followed by what it stands for.
"""

from __future__ import annotations

import numpy as np

from tfdpsq import validation

# T5 has so many; their ids come after the vocabulary's pieces, the first one last.
SENTINELS = 100


def corrupt_spans(
    ids: np.ndarray,
    length: int,
    input_length: int,
    target_length: int,
    first_sentinel: int,
    random: np.random.Generator,
    eos_id: int = 1,
    density: float = 0.15,
    mean_span: float = 3.0,
) -> tuple[np.ndarray, int, np.ndarray, int]:
    """Makes one example of a text.

    Args:
      ids: [L] tokens of the text; those beyond `length` are ignored, and so is an
        EOS at its end.
      length: real tokens.
      input_length: tokens of the input, EOS included; a longer text is cut.
      target_length: tokens of the target, EOS included; spans that it has no room for
        are not cut out.
      first_sentinel: the id of the first span's sentinel; the next ones count down.
      random: draws which spans.
      eos_id: what ends input and target.
      density: share of the tokens that are dropped.
      mean_span: tokens of a span on average.

    Returns:
      Input [input_length] int32 padded with 0 and its length; target [target_length]
      int32 padded with 0 and its length. Putting the target's spans in the place of
      the sentinels gives back the text.

    Raises:
      InputError: density or mean_span out of range, or lengths below 3.
    """
    validation.in_range("density", density, 0, 1, low_open=True, high_open=True)
    validation.in_range("mean_span", mean_span, 1, float("inf"))
    for name, value in (
        ("input_length", input_length),
        ("target_length", target_length),
    ):
        if value < 3:
            raise validation.InputError(f"{name} is {value}; it must be at least 3.")
    text = ids[:length]
    if len(text) and text[-1] == eos_id:
        text = text[:-1]
    text = text[: input_length - 1]
    source: list[int] = []
    target: list[int] = []
    position = 0
    sentinel = first_sentinel
    for kept, dropped in _spans(len(text), density, mean_span, random):
        source += text[position : position + kept].tolist()
        position += kept
        span = text[position : position + dropped].tolist()
        if len(target) + len(span) + 2 <= target_length:
            source.append(sentinel)
            target += [sentinel, *span]
            sentinel -= 1
        else:
            source += span
        position += dropped
    source += text[position:].tolist()
    return (
        *_padded([*source, eos_id], input_length),
        *_padded([*target, eos_id], target_length),
    )


def _spans(
    length: int, density: float, mean_span: float, random: np.random.Generator
) -> list[tuple[int, int]]:
    """(tokens kept, tokens dropped) in turn, with a random cut of each sum."""
    if length < 2:
        return []
    dropped = min(max(1, round(length * density)), length - 1)
    # At least one token is kept before each span, so that spans stay apart.
    most = min(dropped, length - dropped, SENTINELS)
    spans = min(max(1, round(dropped / mean_span)), most)
    kept = _composition(length - dropped, spans + 1, random)
    return list(zip(kept, _composition(dropped, spans, random)))


def _composition(total: int, parts: int, random: np.random.Generator) -> list[int]:
    """A uniformly drawn way to write `total` as so many positive numbers.

    The last one may be 0 where there are not enough for all.
    """
    if total < parts:
        return [1] * total + [0] * (parts - total)
    cuts = np.sort(random.choice(total - 1, parts - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], cuts, [total]])).tolist()


def _padded(tokens: list[int], length: int) -> tuple[np.ndarray, int]:
    row = np.zeros([length], np.int32)
    row[: len(tokens)] = tokens
    return row, len(tokens)
