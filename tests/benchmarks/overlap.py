"""Overlap with a large corpus: speed, memory, and recall of planted texts.

    python tests/benchmarks/overlap.py --gigabytes 1

Draws 10,000 documents and queries of the embedded corpus three times, and scans records
made of phrases of up to six words cut from the same documents: their short runs of
words are those of real text, whole texts occur in them only where they were planted, as
records of their own and inside others. Prints one JSON line.
"""

import argparse
import json
import pathlib
import time

import numpy as np

from tfdpsq import evaluation
from tfdpsq.data import build_pydocs

_RECORD = 100  # phrases, about 2 kB


def phrases_of(documents, random, count=200_000):
    """Returns pieces of documents, each of one to six words."""
    pieces = [document.split() for document in documents]
    found = []
    for number in random.integers(0, len(pieces), count):
        first = int(random.integers(0, max(1, len(pieces[number]) - 6)))
        length = int(random.integers(1, 7))
        found.append(" ".join(pieces[number][first : first + length]))
    return found


def records_of(size, phrases, equal, inside, random):
    """Yields records of `size` characters in all, with planted texts spread in them."""
    plain = int(size / (20 * _RECORD))
    places = set(random.integers(0, plain, len(equal) + len(inside)).tolist())
    waiting = [(True, text) for text in equal] + [(False, text) for text in inside]
    for number in range(plain):
        parts = [phrases[n] for n in random.integers(0, len(phrases), _RECORD)]
        while waiting and (number in places or number == plain - 1):
            places.discard(number)
            alone, text = waiting.pop()
            if alone:
                yield text.upper()
            else:
                parts.insert(int(random.integers(0, len(parts))), text.upper())
        yield ". ".join(parts)


def resident_mib(field):
    """Returns VmRSS, or VmHWM, its maximum so far."""
    status = pathlib.Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) / 1024


def main():
    """Scans, compares, prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--planted", type=int, default=60, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random = np.random.default_rng(options.seed)
    beir = build_pydocs()
    everything = [d.content for d in beir.documents()]
    sample = []
    for texts in (everything, list(beir.queries().values())):
        draws = evaluation.draw_samples(len(texts), 10_000, 3, options.seed)
        sample += [texts[n] for n in np.unique(np.concatenate(draws))]
    long = [n for n, text in enumerate(sample) if len(text.split()) >= 20]
    equal, inside = random.choice(long, (2, options.planted), replace=False).tolist()
    phrases = phrases_of(everything, random)
    planted = ([sample[n] for n in kind] for kind in (equal, inside))
    scan = evaluation.OverlapScan(sample)
    before = resident_mib("VmRSS")
    started = time.perf_counter()
    scan.scan(records_of(options.gigabytes * 1e9, phrases, *planted, random))
    seconds = time.perf_counter() - started
    overlap = scan.result()
    others = np.array(sorted(set(long) - {*equal, *inside}))
    result = {
        "benchmark": "overlap",
        **vars(options),
        "texts": len(sample),
        "corpus_MB": round(overlap.corpus_bytes / 1e6, 1),
        "records": overlap.records,
        "MB_per_s": round(overlap.corpus_bytes / 1e6 / seconds, 1),
        "peak_growth_MiB": round(resident_mib("VmHWM") - before),
        "found_equal": int(overlap.equal[equal].sum()),
        "found_inside": int(overlap.contained[inside].sum()),
        "others_contained": int(overlap.contained[others].sum()),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
