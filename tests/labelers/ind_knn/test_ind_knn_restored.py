"""A record keeps its own budget whatever past comes back: older copies, lost states, crashes, other ledgers."""

import os
import shutil

import numpy as np
import pytest
import torch
from grouped import grouped
from hypothesis import given, settings
from hypothesis import strategies as st
from ind_knn_literal import Literal
from ind_knn_stream import (
    ALL,
    LABELS,
    QUERIES,
    ROWS,
    SETTINGS,
    UNKNOWN,
    C,
    D,
    Stream,
)

from pl_privknn.labelers.ind_knn.labeler import IndKNN
from pl_privknn.labelers.ind_knn.private_table import unit_rows
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.per_record.journal import JournalError


def state_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def put_back(folder, files):
    for path in folder.iterdir():
        path.unlink()
    for name, data in files.items():
        (folder / name).write_bytes(data)


def test_an_older_copy_of_the_state_is_refused(tmp_path, kind):
    stream, state = Stream(tmp_path, kind), tmp_path / "state"
    stream.fit_places(ALL)
    stream.close()
    copies = [state_of(state)]
    for _ in range(3):
        stream.fit_places(ALL)
        stream.ask(QUERIES[:2])
        copies.append(state_of(state))  # while it is open
        stream.close()
        copies.append(state_of(state))
    for older in copies[:-2]:
        put_back(state, older)
        with pytest.raises(JournalError, match=r"an older copy of the budgets|does not hold the budgets"):
            stream.fit_places(ALL), stream.ask()
        stream.close()
    put_back(state, copies[-3])  # of a run that is known, before its last batch
    stream.fit_places(ALL)
    with pytest.raises(JournalError, match="an older copy of the budgets"):
        stream.ask()
    stream.close()
    for older in copies[:-2]:  # the budgets alone, beside a newer state
        put_back(state, copies[-1] | {"budgets": older["budgets"]})
        with pytest.raises(JournalError, match="older copy"):
            stream.fit_places(ALL)
    for name in ("budgets", "state.json"):
        put_back(state, {key: data for key, data in copies[-1].items() if key != name})
        with pytest.raises(JournalError, match=f"'{name}' is missing"):
            stream.fit_places(ALL)
    put_back(state, copies[-1] | {"state.json": b"{"})
    with pytest.raises(JournalError, match="is damaged"):
        stream.fit_places(ALL)
    put_back(state, copies[-1])
    stream.fit_places(ALL)
    stream.ask()
    assert stream.run.num_charges == 1


def test_a_lost_state_is_refused_and_a_new_run_charges_anew(tmp_path, kind):
    stream = Stream(tmp_path, kind)
    stream.fit_places(ALL)
    stream.ask()
    stream.close()
    shutil.rmtree(tmp_path / "state")
    for _ in range(2):
        with pytest.raises(JournalError, match="does not hold the budgets from which run 'run' has answered"):
            stream.fit_places(ALL), stream.ask()
    assert stream.run.num_charges == 1
    stream.run = stream.run.ledger.run("another", [])
    stream.fit_places(ALL)
    stream.ask()
    assert stream.run.num_charges == 1


def test_a_second_copy_is_refused_and_a_moved_folder_goes_on(tmp_path, kind):
    stream, state = Stream(tmp_path, kind), tmp_path / "state"
    stream.fit_places(ALL)
    stream.ask()
    left = stream.left(ALL)
    stream.close()
    shutil.copytree(state, tmp_path / "copy")
    stream.settings["state_dir"] = tmp_path / "copy"
    with pytest.raises(
        JournalError, match=r"copy is a copy of .*state, and each would spend the same budgets"
    ):
        stream.fit_places(ALL)
    shutil.rmtree(tmp_path / "copy")
    (tmp_path / "link").symlink_to(state)
    state.rename(tmp_path / "moved")
    for place in ("moved", "link"):
        if place == "link":
            (tmp_path / "moved").rename(state)
        stream.settings["state_dir"] = tmp_path / place
        stream.fit_places(ALL)
        assert stream.left(ALL) == left
        stream.close()


def test_a_crash_between_the_note_and_the_charge_neither_forgets_nor_repeats_it(tmp_path, monkeypatch):
    stream = Stream(tmp_path)

    class Killed(BaseException):
        pass

    def dies(before):
        charge = type(stream.run).charge

        def dying(self, *args, **kwargs):
            if not before:
                charge(self, *args, **kwargs)
            raise Killed

        monkeypatch.setattr(type(stream.run), "charge", dying)
        stream.fit_places(ALL)
        with pytest.raises(Killed):
            stream.ask()
        stream.labeler._state.budgets.close()  # what a dead process leaves: no parting word in the file
        stream.labeler = None
        monkeypatch.undo()

    dies(before=True)
    assert stream.run.num_charges == 0
    dies(before=False)
    stream.fit_places(ALL)
    stream.ask()
    stream.fit_places(ALL)
    stream.ask()
    assert stream.run.num_charges == 1


def test_a_state_of_an_earlier_version_goes_on_by_number(tmp_path):
    stream = Stream(tmp_path, "numbers")
    stream.fit_places(ALL)
    stream.ask()
    left = stream.left(ALL)
    stream.close()
    (tmp_path / "state" / "state.json").write_text('{"records": "…", "paid_runs": ["run"], "openings": 1}')
    (tmp_path / "state" / "digests.npz").unlink(missing_ok=True)
    stream.fit_places(ALL[::-1])
    assert stream.left(ALL[::-1]) == left
    stream.ask()
    assert stream.run.num_charges == 1


def test_each_ledger_is_paid_though_its_runs_have_one_name(tmp_path):
    ledgers = [Ledger(tmp_path / f"{name}.sqlite", delta=delta) for name, delta in (("a", 1e-5), ("b", 1e-6))]
    first, second = (ledger.run("run", []) for ledger in ledgers)
    for order in ([second], [first, second, first, second]):
        labeler = IndKNN(**grouped(IndKNN, **SETTINGS))
        labeler.fit(ROWS, LABELS, C)
        for run in order:
            labeler.label(QUERIES, run)
    assert (first.num_charges, second.num_charges) == (1, 2)


# ---------------------------------------------------------------- any sequence of events


events = st.lists(
    st.one_of(
        st.tuples(st.just("table"), st.permutations([0, 1, 2, 3, 5, 6, 8, 9, 10, 11]), st.integers(1, 10)),
        st.tuples(st.just("ask"), st.lists(st.integers(0, 8), min_size=1, max_size=6)),
        st.tuples(st.sampled_from(["restart", "keep a copy", "put the copy back", "exchange"])),
    ),
    min_size=4,
    max_size=14,
)


@pytest.mark.parametrize("kind", ["digests of the data module", "numbers"])
@settings(max_examples=12, deadline=None, derandomize=True)
@given(events, st.sampled_from([0.05, 0.4, 2.0]))
def test_over_any_reorders_and_restarts_no_record_pays_more_than_its_budget(
    tmp_path_factory, kind, steps, budget
):
    """What is let out is what the paper's algorithm, told who is who, lets out of budgets that it keeps itself."""
    folder = tmp_path_factory.mktemp("stream")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, lambda descriptor: None)
        stream = Stream(folder, kind, release_counts=True, budget=budget)
        literal = Literal(IndKNN(**grouped(IndKNN, **{**SETTINGS, "budget": budget})).parameters, C)
        places, copy = ALL, None

        def table(chosen):
            literal.remove(list(literal.x))
            literal.add(chosen, unit_rows(ROWS[chosen]), LABELS[chosen])
            stream.fit_places(chosen)

        def ask(which):
            scores = stream.ask(QUERIES[which]).scores.numpy()
            for query, found in zip(which, scores, strict=True):
                _, noisy, around = literal.predict(QUERIES[query], np.zeros(1 + C))
                np.testing.assert_allclose(found, noisy / np.sqrt(around), atol=1e-5)

        table(ALL)
        ask([0])
        for what, *how in steps:
            if what == "ask":
                ask(*how)
            elif what == "table":
                order, count = how
                places = [7, *order[:count], 4] if count % 2 else order[:count]
                table(places)
            elif what == "restart":
                stream.fit_places(places)
            elif what == "keep a copy":
                copy = stream.run.noted(stream.labeler._state._topic), state_of(folder / "state")
            elif what == "put the copy back" and copy is not None:
                latest = stream.run.noted(stream.labeler._state._topic)
                stream.close()
                newest = state_of(folder / "state")
                put_back(folder / "state", copy[1])
                if copy[0] != latest:
                    with pytest.raises(JournalError, match="an older copy"):
                        stream.fit_places(places), stream.ask()
                    stream.close()
                    put_back(folder / "state", newest)
                stream.fit_places(places)
            elif what == "exchange" and kind != "numbers":
                with pytest.raises(ValueError, match=UNKNOWN):
                    stream.refit(torch.cat([ROWS[:2], torch.ones(1, D)]), LABELS[:3], None)
        stream.close()
        assert max(literal.cost.values()) <= budget * (1 + 1e-9)
        assert stream.run.num_charges == 1
