"""Private pairs, and their neighbours: the same without one unit."""

import json

from helpers import tiny


def write(base, unit):
    """Writes what `tiny.write_start` does; queries 0 to 8 are of one user.

    Under unit "pair", query 5 has two documents.
    """
    tiny.write_start(base)
    path = base / "pairs" / "queries.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        number = int(row["_id"][1:])
        row["user_id"] = "busy" if number < 9 else f"u{number}"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if unit == "pair":
        tiny.add_answers(base)


def remove(base, unit):
    """Removes a unit: the user of nine queries, query 5, or one of its two pairs."""
    qrels = base / "pairs" / "qrels" / "train.tsv"
    lines = qrels.read_text().splitlines(keepends=True)
    gone = tuple(f"q{n}\t" for n in (range(9) if unit == "user" else [5]))
    kept = [line for line in lines if not line.startswith(gone)]
    if unit == "pair":
        kept = [line for line in lines if line != "q5\td6\t1\n"]
    assert len(kept) < len(lines)
    qrels.write_text("".join(kept))
