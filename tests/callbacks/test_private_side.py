"""An exception that starts where private records are at hand is told by type and place, never by its text."""

import json
import traceback

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from pl_privknn._checks import check_int
from pl_privknn.callbacks import PrivateLabeler
from pl_privknn.datamodules import PrivatePublicDataModule
from pl_privknn.datamodules.datasets import LabeledImages
from pl_privknn.labelers import PrivateKNN, Release
from pl_privknn.labelers.base import Labeler
from pl_privknn.privacy import Budget
from pl_privknn.privacy.budget import BudgetExceeded
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.mechanisms import Charge, Gaussian
from pl_privknn.privacy.records import check_hyperparameters
from pl_privknn.privacy.redaction import SHOW, RedactedError, redacted
from pl_privknn.training import PrivateTraining
from tests.setup.small_fit import quiet_trainer, small_student
from tests.training.noisy_sgd_setup import fit as fit_privately
from tests.training.noisy_sgd_setup import keep_last, make, make_data

CANARY, HERE = "record-4711", r"test_private_side:\d+: its"


def quote(*_):
    """What careless code does with a record: its error, its notes, its cause and its context all quote it."""
    try:
        {}[CANARY]
    except KeyError as error:
        told = RuntimeError(f"bad {CANARY}", {"record": CANARY})
        told.__notes__ = [CANARY]
        raise told from error


class Careless(Labeler):
    """A teacher that answers its first round, and fails in the second at one place."""

    def __init__(self, place):
        super().__init__()
        self.place, self.calls = place, {"fit": 0, "label": 0}
        self.release = Gaussian(1.0)

    def call(self, place):
        self.calls[place] += 1
        if place == self.place and self.calls[place] == 2:
            quote()

    def learn(self, records):
        records.table()
        self.call("fit")

    def plan(self, num_queries, max_answers, num_classes, rounds=1):
        return [Charge(self.release, num_queries)]

    def answer(self, queries, run, max_answers):
        self.call("label")
        run.pay(self.release, len(queries), "answers")
        return Release(torch.arange(len(queries)) % 2)


class Pixels(nn.Module):
    """An extractor that fails on private images alone, one of which is darker than the public ones."""

    def forward(self, images):
        if float(images.mean(dim=(1, 2, 3)).min()) < 0.4:
            quote()
        return images.flatten(1)


def fit_student(folder, place):
    labeling = PrivateLabeler(
        Careless(place), rounds=2, epochs_per_round=2, queries_per_round=10, run_dir=folder,
        features=Pixels() if place == "extractor" else nn.Flatten(),
    )  # fmt: skip
    kept = {"enable_checkpointing": True, "enable_progress_bar": True, "logger": CSVLogger(folder, "", "")}
    trainer = quiet_trainer(folder, 4, callbacks=[labeling, keep_last(folder)], **kept)
    trainer.fit(small_student(2), make_data())


class CarelessNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 2)
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x):
        if float(x.mean()) > self.limit:
            quote()
        return self.layer(x.flatten(1))


def everything_of(error):
    """All that a traceback, a debugger's hook or a pickle finds of an exception."""
    found, seen = [error], []
    while found:
        item = found.pop()
        seen.append(item)
        found += [e for e in (item.__cause__, item.__context__) if e is not None and e not in seen]
    texts = ["".join(traceback.format_exception(e)) + repr(e.args) + repr(e.__dict__) for e in seen]
    frames = [frame for e in seen for frame, _ in traceback.walk_tb(e.__traceback__)]
    return "".join(texts), [frame.f_globals["__name__"] for frame in frames]


def left_in(folder):
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("place", ["fit", "label", "extractor"])
def test_a_teachers_error_comes_out_as_type_and_place(tmp_path, capfd, caplog, monkeypatch, place):
    with pytest.raises(RedactedError) as caught:
        fit_student(tmp_path / "a", place)
    text, frames = everything_of(caught.value)
    out, err = capfd.readouterr()
    assert CANARY not in text + out + err + caplog.text
    assert CANARY.encode() not in left_in(tmp_path)
    assert "RuntimeError at test_private_side:" in text
    assert SHOW in text
    assert quote.__name__ not in [frame.f_code.co_name for frame, _ in traceback.walk_tb(caught.tb)]
    assert frames[-1] == "pl_privknn.privacy.redaction"
    if place != "extractor":
        assert (tmp_path / "a" / "ckpt" / "last.ckpt").is_file()  # the first round went well
    monkeypatch.setenv(SHOW, "1")
    with pytest.raises(RuntimeError, match=CANARY) as caught:
        fit_student(tmp_path / "b", place)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_networks_error_on_private_records_is_not_heard_of(tmp_path, capfd, caplog):
    network = CarelessNetwork()
    network.limit = 10.0
    module = make(False, network=network)

    class Provoke(pl.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            network.limit = -10.0 if trainer.current_epoch else 10.0

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 2:  # validation is on public images
                network.limit = 10.0

    fit_privately(module, tmp_path, callbacks=[Provoke(), keep_last(tmp_path)])
    out, err = capfd.readouterr()
    assert CANARY not in out + err + caplog.text
    assert CANARY.encode() not in left_in(tmp_path)


def inside_the_package(body):
    """A function whose code stands in a module of the package."""
    space = {"__name__": "pl_privknn.somewhere"}
    exec(f"def function(record):\n    {body}", space)
    return space["function"]


@pytest.mark.parametrize(
    ("body", "argument", "told"),
    [
        ("int(record)", CANARY, r"ValueError at pl_privknn\.somewhere:2: its"),
        ("{}[record]", CANARY, r"KeyError at pl_privknn\.somewhere:2: its"),
        ("record()", quote, rf"RuntimeError at {HERE}"),
        (
            "record()",
            lambda: json.loads(CANARY),
            rf"JSONDecodeError at json\.decoder:\d+, called from {HERE}",
        ),
        ("try: record()\n    except RuntimeError as e: raise e", quote, rf"RuntimeError at {HERE}"),
        ("import sys; sys.exit(record)", CANARY, r"SystemExit at pl_privknn\.somewhere:2: its"),
    ],
)
def test_what_begins_in_a_call_is_not_quoted(body, argument, told):
    with pytest.raises(RedactedError, match=told) as caught:
        redacted(inside_the_package(body), argument)
    assert CANARY not in everything_of(caught.value)[0]


def test_errors_of_own_classes_pass_without_their_past(tmp_path):
    body = "from pl_privknn._checks import InputError; raise InputError('k=3 is too large') from KeyError(record)"
    with pytest.raises(ValueError, match="k=3 is too large") as caught:
        redacted(inside_the_package(body), CANARY)
    assert CANARY not in everything_of(caught.value)[0]
    ledger = Ledger(tmp_path / "run.sqlite", Budget(epsilon=0.1, delta=1e-5))
    with pytest.raises(BudgetExceeded, match="of the budget"):  # the books know nothing private
        redacted(lambda charge: charge(), lambda: ledger.run("run", [Charge(Gaussian(1.0), 1)]))


def test_other_errors_of_the_package_are_not_quoted():
    told = r"ValueError at pl_privknn\._checks:\d+, called from test_private_side"
    with pytest.raises(RedactedError, match=told):
        redacted(lambda check: check(), lambda: check_int("label", CANARY))


def test_an_interrupt_stays_one_and_leaves_its_past_behind():
    def interrupted():
        try:
            quote()
        except RuntimeError as error:
            raise KeyboardInterrupt(CANARY) from error

    with pytest.raises(KeyboardInterrupt) as caught:
        redacted(interrupted)
    assert CANARY not in everything_of(caught.value)[0]


@pytest.mark.parametrize("name", ["validate", "test"])
def test_a_student_is_not_evaluated_on_private_records_after_the_fit(tmp_path, name):
    data, labeling = make_data(), PrivateLabeler(PrivateKNN(k=5, sampling_rate=1.0), run_dir=tmp_path / "run")
    student, trainer = small_student(2), quiet_trainer(tmp_path, 1, callbacks=[labeling])
    trainer.fit(student, data)
    for records in (data.private, Subset(data.private, range(5))):
        with pytest.raises(ValueError, match=r"exact accuracy is not covered by ε.*PaidEvaluation"):
            getattr(trainer, name)(student, DataLoader(records, 8))


class Images(PrivatePublicDataModule):
    """Keeps its arguments as hyper-parameters, as is usual in Lightning."""

    def __init__(self, images, labels):
        super().__init__(image_shape=(1, 8, 8), num_classes=2, batch_size=8)
        self.save_hyperparameters()
        self.parts = images, labels

    def load_private(self):
        return TensorDataset(*self.parts)

    def load_public(self):
        return TensorDataset(1 - self.parts[0], self.parts[1])

    def load_test(self):
        return LabeledImages.none((1, 8, 8), 2)


class Kept(pl.LightningModule):
    def __init__(self, images, weights):
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(64, 2)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.layer(batch[0].flatten(1)), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_private_records_are_no_hyper_parameters(tmp_path):
    images, labels = torch.rand(30, 1, 8, 8), torch.arange(30) % 2
    labeling = PrivateLabeler(
        PrivateKNN(k=5, sampling_rate=1.0), queries_per_round=10, run_dir=tmp_path / "a"
    )
    with pytest.raises(
        ValueError, match=r"save_hyperparameters: images, a Tensor of Images.*ignore=\['images'\]"
    ):
        quiet_trainer(tmp_path, 1, callbacks=[labeling]).fit(small_student(2), Images(images, labels))
    table = TensorDataset(images, labels)
    weights = torch.tensor([1.0, 2.0])  # public ones of the module's own stay
    training = PrivateTraining(
        Budget(epsilon=4.0), expected_batch_size=8, private_records=30, run_dir=tmp_path / "b"
    )
    with pytest.raises(ValueError, match=r"save_hyperparameters: images, a Tensor of Kept"):
        quiet_trainer(tmp_path, 1, callbacks=[training]).fit(Kept(images[3:9], weights), DataLoader(table, 8))
    check_hyperparameters(Kept(None, weights), None, table)
    assert not list(tmp_path.rglob("run.sqlite"))
