"""Time and memory of `tfdpsq import` on generated Parquet logs of two sizes.

    python tests/benchmarks/importing.py --rows=100000,1000000

Prints one JSON line: seconds, rows a second, and the peak resident memory of each size
above that of a log of 1,000 rows (libraries, buffers).
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import resource
import subprocess
import sys
import tempfile
import time

_WORDS = 30_000
_DOCUMENTS = 0.2  # a row


def _write(path: pathlib.Path, rows: int) -> None:
    """Writes queries of 5 words by rows / 10 users; documents of 600 characters."""
    import pyarrow
    import pyarrow.parquet

    draw = random.Random(rows)
    words = [f"w{number:x}" for number in range(_WORDS)]
    text = " ".join(draw.choices(words, k=200_000))
    names = ("query", "document", "user")
    schema = pyarrow.schema([(name, pyarrow.string()) for name in names])
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        for start in range(0, rows, 10_000):
            columns: dict[str, list[str]] = {name: [] for name in names}
            for _ in range(min(10_000, rows - start)):
                # A document is a window of one long text, at a place of its own.
                number = draw.randrange(max(1, int(rows * _DOCUMENTS)))
                at = number * 7919 % (len(text) - 600)
                columns["query"].append(" ".join(draw.choices(words, k=5)))
                columns["document"].append(f"{number} {text[at : at + 600]}")
                columns["user"].append(f"u{draw.randrange(max(1, rows // 10))}")
            writer.write_table(pyarrow.table(columns, schema))


def _import(log: str, out: str) -> None:
    """Imports in this process and prints seconds, pairs and peak KiB."""
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
    from helpers import import_logs

    columns = {"columns__query": "query", "columns__document": "document"}
    started = time.monotonic()
    result = import_logs.run(out, log, columns__user="user", **columns)
    seconds = time.monotonic() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps([seconds, sum(result["pairs"].values()), peak]))


def _run(*options: str) -> tuple[float, int, float]:
    """Runs a part in a process of its own; returns seconds, pairs and peak MiB."""
    said = subprocess.run(
        [sys.executable, __file__, *options], capture_output=True, text=True, check=True
    ).stdout
    seconds, pairs, peak = json.loads(said.splitlines()[-1])
    return seconds, pairs, round(peak / 2**10)


def _measured(rows: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder, "log.parquet")
        _write(log, rows)
        seconds, pairs, peak = _run(f"--log={log}", f"--out={folder}/private/out")
        return {
            "rows": rows,
            "pairs": pairs,
            "log_mib": round(log.stat().st_size / 2**20, 1),
            "seconds": round(seconds, 1),
            "rows_per_second": round(rows / seconds),
            "peak_mib": peak,
        }


def main() -> None:
    """Measures all sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="100000,1000000")
    parser.add_argument("--log", default="")
    parser.add_argument("--out", default="")
    given = parser.parse_args()
    if given.log:
        _import(given.log, given.out)
        return
    base = _measured(1000)
    sizes = [_measured(int(rows)) for rows in given.rows.split(",")]
    for size in sizes:
        size["peak_above_small_mib"] = size.pop("peak_mib") - base["peak_mib"]
    print(json.dumps({"benchmark": "importing", "sizes": sizes}))


if __name__ == "__main__":
    main()
