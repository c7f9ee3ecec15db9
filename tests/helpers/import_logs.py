"""A small log of private queries, and configs of `import` that read it."""

import importlib

command = importlib.import_module("tfdpsq.run.import")

# The third row repeats the first; the fourth is another user's, with the same text.
ROWS = [
    ("how to knit a sock", "Socks are knitted in the round.", "ann", "2026-01-05"),
    ("boil an egg", "Eggs take six minutes.\nSeven, if cold.", "bob", "2026-02-01"),
    ("how to knit a sock", "Socks are knitted in the round.", "ann", "2026-03-01"),
    ("how to knit a sock", 'Wool "of sheep", spun.', "bob", "2026-04-01"),
    ("  ", "Eggs take six minutes.", "cat", "2026-01-01"),
    ("grüne Erbsen", "Peas are green.", "cat", "2026-05-01"),
]
NAMES = ("asked", "clicked", "who", "when")


def dicts(rows=ROWS):
    """Returns the log's rows by column."""
    return [dict(zip(NAMES, row)) for row in rows]


def config_of(log, **changes):
    """Returns a config that imports a log, with `__` for dots in `changes`."""
    config = command.default_config()
    config.logs.train = str(log)
    config.log_documents_are_public = True
    config.columns.query, config.columns.document = "asked", "clicked"
    with config.unlocked():
        config.update_from_flattened_dict(
            {key.replace("__", "."): value for key, value in changes.items()}
        )
    return config
