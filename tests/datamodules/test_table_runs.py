"""Runs on tables without public rows: cost, drawn rows, resume, neighbouring tables, prediction and export."""

import csv
import re

import numpy as np
import pytest
import pytorch_lightning as pl
import torch

from pl_privknn import (
    Budget,
    NoisySGD,
    PreconditionedGradients,
    PrivateLabeler,
    ReverseKNN,
    SupervisedStudent,
    recommend,
)
from pl_privknn.cli import main
from pl_privknn.datamodules import TableDataModule
from pl_privknn.export.prediction import predict
from pl_privknn.features import Pixels
from pl_privknn.privacy import BudgetExceeded, Gaussian
from pl_privknn.privacy.mechanisms.base import observing
from pl_privknn.privacy.partitions import PaidNames
from pl_privknn.privacy.public_rows import PublicRows, PublicRowsLost
from pl_privknn.privacy.redaction import RedactedError
from pl_privknn.report.facts import facts_of

COLUMNS = ("age", "income", "region", "since", "member")
BOUNDS = """age: [0, 120]
income: [0, 200000]
since: [2000-01-01, 2030-01-01]
region: [north, south, west]
member: [0, 1]
"""


def table(path, count=1500, seed=0, extra=()):
    generator = np.random.default_rng(seed)
    age = generator.normal(45, 12, count)
    region = generator.choice(["north", "south", "west"], count)
    member = generator.random(count) < 0.5
    income = np.exp(generator.normal(10, 0.5, count))
    score = (age - 45) / 12 + 1.5 * (region == "north") + member - 1 + generator.normal(0, 0.5, count)
    rows = [
        [
            f"{age[i]:.1f}",
            "" if i % 20 == 0 else f"{income[i]:.0f}",
            region[i],
            f"20{i % 20 + 10}-05-01",
            member[i],
        ]
        for i in range(count)
    ]
    labels = ["high" if value > 0 else "low" for value in score]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(
            [[*COLUMNS, "label"], *([*row, label] for row, label in zip(rows, labels, strict=True)), *extra]
        )
    return path


def recommended(path, tmp_path, bounds=BOUNDS, **arguments):
    columns = {}
    if bounds:
        (tmp_path / "bounds.yaml").write_text(bounds)
        columns["bounds"] = str(tmp_path / "bounds.yaml")
    return recommend(path, epsilon=2.0, private_records=1500, columns=columns, **arguments)


def fit(found, run_dir):
    student, labeling = found.build()
    labeling.run_dir = run_dir
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    pl.Trainer(max_epochs=found.max_epochs, accelerator="cpu", callbacks=[labeling], **options).fit(
        student, found.data
    )
    return labeling


@pytest.mark.parametrize("bounds", [BOUNDS, ""])
def test_one_table_is_enough(tmp_path, bounds):
    private, test = table(tmp_path / "private.csv"), table(tmp_path / "test.csv", 500, seed=1)
    found = recommended(private, tmp_path, bounds, test=str(test))
    labeling = fit(found, tmp_path / "run")
    assert 1.9 < labeling.epsilon <= 2.0
    assert labeling.epsilon_spent == labeling.epsilon
    kinds = [] if bounds else ["the kinds of the columns"]
    assert [reason.split(" (")[0] for reason in found.data.conditions] == kinds
    assert labeling.guarantee == ("conditional" if kinds else "unconditional")
    with (tmp_path / "run" / "public_rows.csv").open() as file:
        header, *rows = csv.reader(file)
    assert header == list(COLUMNS)
    assert len(rows) == 4000
    ages = [float(row[0]) for row in rows if row[0]]
    assert np.mean(ages) == pytest.approx(45, abs=15)
    if bounds:
        assert {row[2] for row in rows} <= {"north", "south", "west", ""}
        assert all("2000" <= row[3][:4] <= "2030" for row in rows if row[3])
    head = labeling.load_head(tmp_path / "run")
    right = head(found.data.test.images()).argmax(1) == found.data.test.labels
    assert float(right.float().mean()) > (0.7 if bounds else 0.6)


def test_a_resumed_run_draws_nothing_again_and_a_lost_release_is_refused(tmp_path, monkeypatch):
    private = table(tmp_path / "private.csv", 300)
    fit(recommended(private, tmp_path), tmp_path / "run")
    before = (tmp_path / "run" / "public_rows.csv").read_text()
    draws = []

    def observer(mechanism, values, noise, draw):
        draws.append(mechanism)
        return draw()

    with observing(observer):
        again = fit(recommended(private, tmp_path), tmp_path / "run")
    assert draws == []
    assert (tmp_path / "run" / "public_rows.csv").read_text() == before
    assert again.epsilon_spent <= 2.0

    monkeypatch.setattr(
        "pl_privknn.privacy.public_rows.write_durably", lambda *_: (_ for _ in ()).throw(OSError)
    )
    with pytest.raises(RedactedError, match="OSError"):
        fit(recommended(private, tmp_path), tmp_path / "other")
    monkeypatch.undo()
    with pytest.raises(PublicRowsLost, match="paid for its histograms"):
        fit(recommended(private, tmp_path), tmp_path / "other")


def test_one_data_module_serves_a_resumed_run_and_a_further_one(tmp_path):
    found = recommended(table(tmp_path / "private.csv", 300), tmp_path, bounds="")
    first = fit(found, tmp_path / "run")
    again = fit(found, tmp_path / "run")
    assert again.epsilon_spent == first.epsilon_spent
    other = fit(found, tmp_path / "other")  # pays for its own rows and bounds
    assert other.ledger.report().charged == first.ledger.report().charged


def test_laplace_noise_that_does_not_fit_beside_paid_rows_is_refused_with_a_remedy_that_works(tmp_path):
    numeric = dict.fromkeys(COLUMNS)
    private = table(tmp_path / "private.csv", 300)
    data = TableDataModule(private=str(private), public="none", numeric=numeric, classes=["no", "yes"])

    def opened(labeler):
        labeling = PrivateLabeler(labeler, queries_per_round=20, budget=Budget(epsilon=2.0))
        labeling.open_run(data, tmp_path / type(labeler).__name__).close()

    with pytest.raises(
        BudgetExceeded, match=r"ReverseKNN with laplace noise.*Use labeler=PreconditionedGradients"
    ):
        opened(ReverseKNN(k=1))
    opened(PreconditionedGradients())
    opened(ReverseKNN(k=1, noise=Gaussian(5.0)))


def test_the_hold_out_is_not_in_the_released_rows(tmp_path):
    found = recommended(table(tmp_path / "private.csv", 400), tmp_path)
    rows = []

    def released(self, table, *others):
        rows.append(len(table))
        return original(self, table, *others)

    original = PublicRows.released
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PublicRows, "released", released)
        labeling = fit(found, tmp_path / "run")
    assert 300 < rows[0] < 400
    assert labeling.accuracy["holdout_epsilon"] <= 2.0


@pytest.mark.parametrize("paid", [False, True])
def test_neighbouring_tables_differ_in_released_figures_alone(paid, tmp_path, capsys, recwarn):
    odd = [["1e300", "-5", "Mallory", "never", "maybe", "low"], ["", "", "", "1999-01-01", "", "high"]]
    said = []
    if paid:
        odd[0][-1] = "Trent"  # a class of one record
    for number, extra in enumerate([(), odd[:1], odd] if paid else [(), odd[:1], odd[1:], odd]):
        folder = tmp_path / str(number)
        folder.mkdir()
        private = table(folder / "private.csv", 900 if paid else 300, extra=extra)
        if paid:
            data = TableDataModule(private, names=PaidNames())
            found = recommend(data, epsilon=20.0, private_records=900).with_names(folder / "run")
            assert found.data.conditions == ()
        else:
            found = recommended(private, folder, bounds="")
        fit(found, folder / "run")
        output = capsys.readouterr()
        text = "\n".join(
            [*found.reasons, output.out, output.err, *(str(warning.message) for warning in recwarn.list)]
        )
        recwarn.clear()
        # These rows of the table follow from the accuracy that the hold-out released.
        text = re.sub("│ hold-out accuracy.*?└", "└", text, flags=re.DOTALL)
        columns = [
            {**column, "bounds": None, "values": sorted(column["values"] or ())}
            for column in found.data.columns()
        ]
        said.append(
            (re.sub(r"[\d.\s━─]+", "#", text.replace(str(folder), "")), columns, found.data.num_classes)
        )
        assert not {"Mallory", "Trent"} & {*re.split(r"\W", text)}
    for one in said:
        assert one == said[0]


def test_the_whole_journey_by_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    private, new = table(tmp_path / "claims.csv", 800), table(tmp_path / "new.csv", 200, seed=2)
    (tmp_path / "bounds.yaml").write_text(BOUNDS)
    with new.open() as file:
        rows = [list(reversed(row)) for row in csv.reader(file)]
    with new.open("w", newline="") as file:
        csv.writer(file).writerows([[*row, "extra"] for row in rows])
    arguments = [
        "--data",
        str(private),
        "--bounds",
        "bounds.yaml",
        "--epsilon",
        "2",
        "--private-records",
        "800",
    ]
    assert main(["fit", *arguments, "--trainer.accelerator", "cpu"]) == 0
    run = tmp_path / "runs" / "claims" / "0"
    assert main(["export", str(run)]) == 0
    assert main(["report", str(run)]) == 0
    columns = {one["name"]: one for one in facts_of(run, exact=False)["columns"]}
    assert list(columns) == list(COLUMNS)
    assert columns["region"]["names"] == ["north", "south", "west", "missing or another"]
    assert sum(columns["region"]["shares"][:3]) > 0.7
    assert (columns["age"]["low"], columns["age"]["high"]) == ("0", "120")
    page = (run / "report.html").read_text()
    assert "histogram of age" in page
    assert "no query was asked" in page
    assert "data:image" not in page
    of_run, of_file = predict(run, new), predict(run / "export" / "model.pt2", new)
    torch.testing.assert_close(of_run.probabilities, of_file.probabilities, atol=1e-4, rtol=0)
    labels = [row[0] for row in rows[1:]]
    assert np.mean([found == label for found, label in zip(of_run.classes, labels, strict=True)]) > 0.65
    rows[3][rows[0].index("age")] = ""
    rows[4][rows[0].index("region")] = "east"
    with new.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    assert len(predict(run, new).classes) == 200
    with new.open("w", newline="") as file:
        csv.writer(file).writerows([row[2:] for row in rows])
    with pytest.raises(ValueError, match="has no column 'member'"):
        predict(run, new)


def test_rows_that_nobody_pays_for_teach_nothing(tmp_path):
    data = TableDataModule(table(tmp_path / "t.csv", 200), numeric={"age": (0, 120)})
    options = {"logger": False, "enable_checkpointing": False, "max_epochs": 1, "accelerator": "cpu"}
    shape = {"num_classes": 2, "in_channels": 5, "image_size": 1, "extractor": Pixels()}
    noisy = NoisySGD(private_records=2000, budget=Budget(epsilon=1.0), **shape)
    with pytest.raises(ValueError, match="has no public rows, and NoisySGD pays for none"):
        pl.Trainer(**options).fit(noisy, data)
    student = SupervisedStudent("linear_probe", **shape)
    with pytest.raises(ValueError, match="no public rows that extractor could learn from"):
        pl.Trainer(**options).fit(student, data)
