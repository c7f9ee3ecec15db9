"""Private runs: what may go on where it was, and what is left when it ends."""

import dataclasses

import pytest

from tfdpsq.data import io
from tfdpsq.privacy import checkpoint
from tfdpsq.privacy.proof.ledger import FILE_NAME, Ledger
from tfdpsq.run.frame import records, runner, runs, settings
from tfdpsq.run.frame.places import Place, Privacy
from tfdpsq.run.frame.runner import Context, Given
from tfdpsq.validation import DataError, InputError


@dataclasses.dataclass(frozen=True)
class _Settings(settings.Settings):
    steps: int = settings.setting(3)


def _context(place, steps=3, pairs="keyed:a"):
    own, inputs = _Settings(steps), {"pairs": pairs}
    depends = {"settings": settings.identity(own), "inputs": inputs}
    return Context(own, Given(), place, Privacy.CERTIFIED, inputs, depends)


def _pay(directory, steps=1, data="data"):
    with Ledger(directory / FILE_NAME, "plan", data, 3) as ledger:
        for step in range(steps):
            ledger.pay(step)


@pytest.fixture
def place(tmp_path):
    return Place.of(tmp_path / "work" / "release" / "generator")


def _begun(place, paid=0):
    directory = runs.open_run(_context(place))
    rows = directory / checkpoint.STATE / "rows"
    rows.mkdir(parents=True)
    (rows / "queries.npy").write_text("of the first data")
    _pay(directory, paid)
    return rows


def _everything(directory):
    files = (path for path in directory.rglob("*") if path.is_file())
    return {path: path.read_bytes() for path in files}


@pytest.mark.parametrize("changes", [{"steps": 4}, {"pairs": "keyed:b"}])
def test_paid_run_goes_on_with_its_settings_and_data_only(place, changes):
    rows = _begun(place, paid=1)
    with pytest.raises(InputError, match="has paid 1 steps with other settings"):
        runs.open_run(_context(place, **changes))
    assert rows.is_dir()
    runs.open_run(_context(place))
    assert rows.is_dir() and runs.steps_paid(place) == 1


@pytest.mark.parametrize("left", [None, "{"])
def test_paid_run_without_its_settings_is_refused(place, left):
    """Its rows were tokenised with those it began with."""
    rows = _begun(place, paid=1)
    path = place.run / runs.RUN_FILE
    path.unlink() if left is None else path.write_text(left)
    with pytest.raises(DataError, match="Restore it"):
        runs.open_run(_context(place))
    assert rows.is_dir() and path.is_file() == (left is not None)


def test_unpaid_run_of_other_data_tokenises_them_anew(place):
    """It would train on the old rows, and its certificate name the new ones."""
    rows = _begun(place)
    runs.open_run(_context(place, pairs="keyed:b"))
    assert not rows.exists()
    written = io.read_json(place.run / runs.RUN_FILE, "")
    assert written["depends"]["inputs"] == {"pairs": "keyed:b"}


def test_lost_key_is_not_replaced_where_steps_are_paid(tmp_path):
    """With another one the same data would be called others, and the run be lost."""
    private = tmp_path / "private"
    run, key = private / "runs" / "generator", private / records.KEY_FILE
    run.mkdir(parents=True)
    _pay(run, 0)
    records.keyed_fingerprint("f", private)  # nothing is paid for yet
    key.unlink()
    _pay(run, 1)
    with pytest.raises(InputError, match="fingerprint.key"):
        records.keyed_fingerprint("f", private)
    assert not key.exists()


def test_run_belongs_to_the_output_that_paid_for_it(place, tmp_path):
    """X/generator and X/release/generator have one run directory."""
    other = Place.of(tmp_path / "work" / "generator")
    assert other.run == place.run
    runs.open_run(_context(place))
    runs.open_run(_context(other))  # nothing was paid: it may be taken over
    _pay(place.run)
    before = _everything(place.run)
    with pytest.raises(InputError, match="holds the run of .*/work/generator"):
        runs.open_run(_context(place))
    assert _everything(place.run) == before
    (tmp_path / "work").rename(tmp_path / "moved")
    runs.open_run(_context(Place.of(tmp_path / "moved" / "generator")))


class _Trains(runner.Stage):
    """Pays, and keeps what a training keeps."""

    name = "trains"

    @dataclasses.dataclass(frozen=True)
    class Settings(settings.Settings):
        steps: int = settings.setting(3, ge=1)
        microbatch_size: int = settings.setting(4, ge=1, speed=True)

    def run(self, c):
        directory = runs.open_run(c)
        paid = runs.steps_paid(c.place)
        with Ledger(directory / FILE_NAME, "plan", "data", 3) as ledger:
            checkpoint.open_secrets(directory, ledger.run, 0, {})
            for step in range(paid, c.settings.steps):
                ledger.pay(step)
                if step == 1 and not paid:
                    raise KeyboardInterrupt
        return {"run": runs.run_id(c.place)}


def test_killed_run_goes_on_with_another_microbatch_and_leaves_its_ledger(place):
    """A smaller microbatch is what a run needs that was killed for memory."""
    with pytest.raises(KeyboardInterrupt):
        runner.execute(_Trains(), _Trains.Settings(), place)
    assert checkpoint.is_open(place.run) and runs.steps_paid(place) == 2
    with pytest.raises(InputError, match="has paid 2 steps with other settings"):
        runner.execute(_Trains(), _Trains.Settings(steps=2), place)
    record = runner.execute(_Trains(), _Trains.Settings(microbatch_size=2), place)
    assert record["result"] == {"run": runs.run_id(place)}
    left = {path.name for path in place.run.rglob("*")}
    assert left == {FILE_NAME, runs.RUN_FILE} and runs.steps_paid(place) == 3
