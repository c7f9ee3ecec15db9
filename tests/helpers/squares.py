"""A pass without models: the squares of 16 numbers."""

import dataclasses
import pathlib

from tfdpsq.run.frame import runner, settings
from tfdpsq.run.frame.settings import setting
from tfdpsq.validation import InputError


class Squares(runner.ShardedStage):
    """Squares numbers."""

    name = "squares"

    @dataclasses.dataclass(frozen=True)
    class Settings(settings.Settings):
        """Settings of `squares`."""

        add: int = setting(0)
        unlucky: int = setting(-1)
        rows: int = setting(4, ge=1, speed=True)

    def parts(self, c):
        rows = c.settings.rows
        return [range(first, first + rows) for first in range(0, 16, rows)]

    def start(self, c):
        def make(index, out):
            if c.settings.unlucky in c.parts[index]:
                raise InputError(f"{c.settings.unlucky} is unlucky. Leave it out.")
            with open(out.path("txt"), "w") as file:
                for number in c.parts[index]:
                    file.write(f"{number**2 + c.settings.add}\n")
                    out.count += 1

        return make

    def merge(self, c, shards):
        texts = [pathlib.Path(path).read_text() for path in shards.paths("txt")]
        pathlib.Path(c.out, "rows.txt").write_text("".join(texts))
        return {"sum": sum(map(int, "".join(texts).split()))}


STAGE = Squares()
