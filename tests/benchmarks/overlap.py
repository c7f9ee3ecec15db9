"""Overlap with a large corpus: speed, memory, and recall of planted texts.

    python tests/benchmarks/overlap.py --gigabytes 1

Draws 10,000 documents and queries of the embedded corpus three times, and writes a
corpus of phrases of up to six words cut from the same documents: its short n-grams are
those of real text, its 8-grams occur elsewhere only by chance. Planted in it are exact
copies (whole records, and inside others) and near ones, with one word in 20 changed; a
third of the last two in records of megabytes, where the scan cuts them into blocks. The
scan finds others too, as some documents are almost the same: --check recounts. The
corpus is written to a temporary directory and removed. Prints one JSON line.
"""

import argparse
import json
import pathlib
import tempfile
import time

import numpy as np

from tfdpsq import evaluation
from tfdpsq.data import build_pydocs, corpus_parts
from tfdpsq.evaluation.overlap.word_stream import words_of

_RECORD = 100  # phrases, about 2 kB
_LONG = 150_000  # phrases, about 3 MB
_SHARDS = 10


def phrases_of(documents, random, count=200_000):
    """Yields pieces of documents, each of one to six words as the scan counts them."""
    pieces = [document.split() for document in documents]
    found = []
    for number in random.integers(0, len(pieces), count):
        length = int(random.integers(1, 7))
        first = int(random.integers(0, max(1, len(pieces[number]) - length)))
        found.append(" ".join(pieces[number][first : first + length]))
    return [
        text for text, words in zip(found, words_of(found)) if words.count(b" ") < 6
    ]


def changed(text):
    """Replaces one word in 20 by a word that occurs nowhere else, evenly spread."""
    words = words_of([text])[0].decode().split()
    changes = len(words) // 20
    for number in range(changes):
        words[(2 * number + 1) * len(words) // (2 * changes)] = f"changedword{number}"
    return " ".join(words)


def plants_of(texts, random, each):
    """Returns {text number: kind} of texts of 20 words or more, and planted strings."""
    long = [n for n, words in enumerate(words_of(texts)) if words.count(b" ") >= 19]
    chosen = random.permutation(long)[: 3 * each].tolist()
    kinds = dict(zip(chosen, ["equal"] * each + ["inside"] * each + ["near"] * each))
    planted = [
        (kind, changed(texts[n]) if kind == "near" else texts[n].upper())
        for n, kind in kinds.items()
    ]
    return kinds, planted


def records_of(size, phrases, planted, random):
    """Yields records of `size` characters in all, with planted texts spread in them."""
    waiting = [planted[n] for n in random.permutation(len(planted))]
    written, due = 0, size / (len(waiting) + 1)
    next_at = due
    while written < size or waiting:
        here = []
        while waiting and (written >= next_at or written >= size):
            here.append(waiting.pop())
            next_at += due
        # A third of those inside others, at random places of a long record.
        long = any(kind != "equal" for kind, _ in here) and random.random() < 1 / 3
        chosen = random.integers(0, len(phrases), _LONG if long else _RECORD)
        parts = [phrases[number] for number in chosen.tolist()]
        for kind, text in here:
            if kind == "equal":
                written += len(text)
                yield text
            else:
                parts.insert(int(random.integers(0, len(parts))), text)
        record = ". ".join(parts)
        written += len(record)
        yield record


def write(directory, records, size):
    """Writes the records to JSON-lines files of about equal size."""
    records = iter(records)
    for shard in range(_SHARDS):
        written = 0
        path = directory / f"part-{shard:02d}.jsonl"
        with open(path, "w", encoding="utf-8") as file:
            for record in records:
                line = {"text": record, "url": "https://example.org"}
                file.write(json.dumps(line) + "\n")
                written += len(record)
                if written > size / _SHARDS and shard < _SHARDS - 1:
                    break


def resident_mib(field):
    """Returns VmRSS, or VmHWM, its maximum so far."""
    status = pathlib.Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) / 1024


def main():
    """Writes, scans, compares, prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=1)
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
    kinds, planted = plants_of(sample, random, options.planted)
    with tempfile.TemporaryDirectory() as folder:
        size = options.gigabytes * 1e9
        phrases = phrases_of(everything, random)
        records = records_of(size, phrases, planted, random)
        write(pathlib.Path(folder), records, size)
        scan = evaluation.OverlapScan(sample, threads=options.threads)
        before, early = resident_mib("VmRSS"), None
        started, used = time.perf_counter(), time.process_time()
        for part in corpus_parts(folder):
            scan.scan(part.records())
            early = early or resident_mib("VmHWM")
        seconds = time.perf_counter() - started
        used = time.process_time() - used
        overlap = scan.result()
        near = overlap.near()
        of = {
            kind: [n for n, k in kinds.items() if k == kind] for kind in kinds.values()
        }
        long = {
            n for n, words in enumerate(words_of(sample)) if words.count(b" ") >= 19
        }
        others = np.array(sorted(long - kinds.keys()))
    result = {
        "benchmark": "overlap",
        **vars(options),
        "texts": len(sample),
        "corpus_MB": round(overlap.corpus_bytes / 1e6, 1),
        "records": overlap.records,
        "MB_per_s": round(overlap.corpus_bytes / 1e6 / seconds, 1),
        "MB_per_cpu_s": round(overlap.corpus_bytes / 1e6 / used, 1),
        "resident_MiB_before": round(before),
        "peak_growth_MiB": round(resident_mib("VmHWM") - before),
        "growth_after_first_tenth_MiB": round(resident_mib("VmHWM") - early),
        "found_equal": int(overlap.equal[of["equal"]].sum()),
        "found_inside": int(overlap.contained[of["inside"]].sum()),
        "inside_taken_for_equal": int(overlap.equal[of["inside"]].sum()),
        "found_near": int(near[of["near"]].sum()),
        "near_taken_for_contained": int(overlap.contained[of["near"]].sum()),
        "least_near_coverage": round(float(overlap.coverage[of["near"]].min()), 3),
        "others": len(others),
        "others_contained": int(overlap.contained[others].sum()),
        "others_near": int(near[others].sum()),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
