"""A predictor's folder that was copied, put back or mixed up never spends a budget twice."""

import json
import shutil

import numpy as np
import pytest
from ind_knn_setup import PARAMETERS, QUERIES, C, filled, rows

from pl_privknn.labelers.ind_knn.prediction import IndKNNSwitches
from pl_privknn.labelers.ind_knn.predictor import IndKNNPredictor
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.mechanisms import Charge
from pl_privknn.privacy.per_record.journal import JournalError


def saved(folder, **settings):
    """A predictor with a folder, closed after some answers."""
    with filled(**settings) as predictor:
        predictor.predict(QUERIES[:3])
        predictor.save(folder)
        predictor.predict(QUERIES[3:5])
        return dict(zip(*predictor.remaining(), strict=True))


@pytest.fixture
def run(tmp_path):
    return Ledger(tmp_path / "ledger.sqlite").run("users", [])


def test_a_second_copy_is_refused_while_the_first_is_there(tmp_path):
    left = saved(tmp_path / "p")
    shutil.copytree(tmp_path / "p", tmp_path / "copy")
    with pytest.raises(JournalError, match=r"copy is a copy of .*p, and each would spend the same budgets"):
        IndKNNPredictor.open(tmp_path / "copy")
    with IndKNNPredictor.open(tmp_path / "p") as predictor:
        predictor.predict(QUERIES)
        with pytest.raises(JournalError, match="is a copy of"):
            IndKNNPredictor.open(tmp_path / "copy")
    shutil.rmtree(tmp_path / "p")
    (tmp_path / "copy").rename(tmp_path / "elsewhere")  # the only one that is left, by another name
    with IndKNNPredictor.open(tmp_path / "elsewhere") as predictor:
        assert dict(zip(*predictor.remaining(), strict=True)) == left


def test_an_older_copy_is_found_out_by_the_ledger(tmp_path, run):
    saved(tmp_path / "p", ledger=run)
    shutil.copytree(tmp_path / "p", tmp_path / "older")
    with IndKNNPredictor.open(tmp_path / "p", ledger=run) as predictor:
        predictor.predict(QUERIES[:1])
        left = predictor.remaining()[1]
    (tmp_path / "p").rename(tmp_path / "latest")
    (tmp_path / "older").rename(tmp_path / "p")
    with pytest.raises(JournalError, match="an older copy of the budgets"):
        IndKNNPredictor.open(tmp_path / "p", ledger=run)
    shutil.rmtree(tmp_path / "p")
    (tmp_path / "latest").rename(tmp_path / "p")
    for _ in range(2):
        with IndKNNPredictor.open(tmp_path / "p", ledger=run) as predictor:
            np.testing.assert_array_equal(predictor.remaining()[1], left)
    assert run.num_charges == 1
    # Books of their own must show the stream, too; and answers that another folder gave are not this one's.
    other = Ledger(tmp_path / "other.sqlite").run("users", [])
    IndKNNPredictor.open(tmp_path / "p", ledger=other).close()
    assert other.ledger.report().charged == (Charge(PARAMETERS.total, 1),)
    saved(tmp_path / "q")
    with pytest.raises(JournalError, match="does not hold the budgets from which run 'users' has answered"):
        IndKNNPredictor.open(tmp_path / "q", ledger=run)


def test_budgets_of_another_time_or_predictor_are_refused(tmp_path):
    saved(tmp_path / "p")
    saved(tmp_path / "q")
    older = (tmp_path / "p" / "budgets").read_bytes()
    with IndKNNPredictor.open(tmp_path / "p") as predictor:
        predictor.predict(QUERIES[:1])
    latest = (tmp_path / "p" / "budgets").read_bytes()
    for wrong in (older, (tmp_path / "q" / "budgets").read_bytes()):
        (tmp_path / "p" / "budgets").write_bytes(wrong)
        with pytest.raises(JournalError, match="the budgets are an older copy, or those of another stream"):
            IndKNNPredictor.open(tmp_path / "p")
    (tmp_path / "p" / "budgets").write_bytes(latest)
    (tmp_path / "p" / "state.json").rename(tmp_path / "kept")
    with pytest.raises(JournalError, match=r"'state.json' is missing"):
        IndKNNPredictor.open(tmp_path / "p")
    (tmp_path / "kept").rename(tmp_path / "p" / "state.json")
    IndKNNPredictor.open(tmp_path / "p").close()


def test_reordered_records_come_with_their_numbers(tmp_path):
    with filled(12) as predictor:
        predictor.predict(QUERIES)
        left = dict(zip(*predictor.remaining(), strict=True))
        predictor.remove(range(12))
        order = np.random.default_rng(0).permutation(12)
        predictor.add(order, *(part[order] for part in rows(12)))
        assert dict(zip(*predictor.remaining(), strict=True)) == left
        table = predictor._engine.table
        by_number = dict(zip(table.ids.tolist(), table.labels.tolist(), strict=True))
        assert by_number == {number: number % C for number in range(12)}


def test_a_folder_of_an_earlier_version_goes_on(tmp_path):
    left = saved(tmp_path / "p", switches=IndKNNSwitches(reuse=True))
    state = tmp_path / "p" / "state.json"
    openings = json.loads(state.read_text())["openings"]
    (tmp_path / "p" / "openings").write_text(str(openings))
    state.unlink()
    with IndKNNPredictor.open(tmp_path / "p") as predictor:
        assert predictor._state.content["openings"] == openings + 1
        assert dict(zip(*predictor.remaining(), strict=True)) == left
    assert not (tmp_path / "p" / "openings").exists()
