"""What is recommended for one's own data: rules, comparisons on public labels, and configurations that run."""

import csv
import json
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from sklearn.decomposition import PCA

from pl_privknn import Gaussian, PrivateKNN, PrivateLabeler, PublicFeatures, SupervisedStudent, recommend
from pl_privknn._checks import at_most
from pl_privknn.cli import main
from pl_privknn.config import as_section
from pl_privknn.datamodules import DigitsDataModule, EmbeddingsDataModule
from pl_privknn.datamodules.at import data_at
from pl_privknn.features import HOG
from pl_privknn.planning import plan_of
from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.verify import audit_ledger
from pl_privknn.recommendation.rules import Setting, Sizes, usual_delta


def embeddings(counts, classes=4, width=24, seed=0):
    """Parts of a table with classes around centres of their own: name to array."""
    draw = np.random.default_rng(seed)
    centres = draw.normal(size=(classes, width))
    parts = {}
    for part, count in counts.items():
        labels = np.arange(count) % classes
        noise = draw.normal(size=(count, width)) * 0.6
        parts[f"{part}_embeddings"] = (centres[labels] + noise).astype(np.float32)
        parts["public_truth" if part == "public" else f"{part}_labels"] = labels
    return parts


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A folder of .npy files without public classes."""
    monkeypatch.chdir(tmp_path)
    parts = embeddings({"private": 600, "public": 120, "test": 100})
    Path("own").mkdir()
    for name, array in parts.items():
        if name != "public_truth":
            np.save(f"own/{name}.npy", array)
    return parts


def test_a_validation_set_stands_in_for_private_records(tmp_path):
    parts = embeddings({"private": 40, "public": 120, "test": 40, "val": 100}, width=64)
    del parts["public_truth"]
    np.savez(tmp_path / "own.npz", **parts)
    found = recommend(tmp_path / "own.npz", epsilon=1.0, private_records=400)
    assert "Simulation with 100 labelled public examples" in " ".join(found.reasons)
    assert repr(found) == str(found) == "\n".join(found.reasons)
    assert found.expected > 0.8


# The best teacher and width in a scan of widths and clusters: two sizes a data set, on each side of the crossing.
@pytest.mark.parametrize(
    ("records", "epsilon", "classes", "teacher", "width", "examples"),
    [
        (300, 1.0, 10, "ReverseKNN", 30, "images"),
        (1000, 0.5, 10, "ReverseKNN", 100, "images"),
        (1000, 2.0, 10, "ReverseKNN", 100, "images"),
        (3000, 1.0, 10, "PreconditionedGradients", 100, "images"),
        (10_000, 2.0, 10, "PreconditionedGradients", 300, "images"),
        (1900, 1.0, 2, "PreconditionedGradients", 30, "images"),
        (2000, 1.0, 9, "PreconditionedGradients", 100, "images"),
        (3500, 1.0, 62, "PreconditionedGradients", 30, "images"),
        (3500, 2.0, 62, "PreconditionedGradients", 60, "images"),
        (3500, 2.0, 100, "PreconditionedGradients", 30, "images"),
        (1400, 0.5, 5, "ReverseKNN", 16, "vectors"),
        (1000, 0.5, 37, "ReverseKNN", 16, "vectors"),
        (3000, 0.5, 37, "PreconditionedGradients", 30, "vectors"),
        (8000, 1.0, 37, "PreconditionedGradients", 60, "vectors"),
        (8000, 2.0, 34, "PreconditionedGradients", 100, "vectors"),
    ],
)
def test_votes_where_records_are_few_and_gradients_where_they_are_many(
    records, epsilon, classes, teacher, width, examples
):
    assert Sizes(records, epsilon, 1e-5, classes, 1000, examples).rule() == Setting(teacher, width)


# Of attributes gradients at every size; widths as in a scan on Fashion-MNIST, two sizes on each side of a step.
@pytest.mark.parametrize(
    ("records", "epsilon", "width"), [(300, 2.0, 16), (1000, 1.0, 30), (3000, 1.0, 100), (10_000, 2.0, 300)]
)
def test_gradients_for_attributes(records, epsilon, width):
    sizes = Sizes(records, epsilon, 1e-5, 10, 1000, "attributes", task="multilabel")
    assert sizes.rule() == Setting("PreconditionedGradients", width)


def attribute_tables(folder, names, seed=0):
    """Files of embeddings of which every attribute moves a record in its own direction: file name to rows."""
    draw = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    directions = draw.normal(size=(5, 24))
    for part, count in names.items():
        rows = (draw.random((count, 5)) < 0.4).astype(np.int64)
        values = (rows - 0.4) @ directions + draw.normal(size=(count, 24)) * 0.4
        np.save(folder / f"{part}embeddings.npy", values.astype(np.float32))
        if part != "public_":
            np.save(folder / f"{part}labels.npy", rows)
        else:
            np.save(folder / "public_truth.npy", rows)
    return rows


def test_rows_of_attributes_are_trained_on_by_one_command_and_predicted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    truth = attribute_tables(Path("own"), {"private_": 800, "public_": 150, "test_": 200})
    words = ["--data", "own", "--epsilon", "1", "--private-records", "800"]
    assert main(["check", *words]) == 0
    counted = ", ".join(f"{name} {count}" for name, count in enumerate(truth.sum(0)))
    assert f"Test part: 200 examples; with attribute: {counted}." in capsys.readouterr().out
    found = recommend("own", epsilon=1.0, private_records=800)
    stated = plan_of({**found.config, "data": as_section(found.data)[0]}, "own")
    assert 0.9 < account(stated.charges, delta=stated.delta, adjacency="add_remove").epsilon <= 1
    quiet = ["--trainer.max_epochs", "4", "--trainer.enable_progress_bar", "false"]
    assert main(["fit", *words, *quiet]) == 0
    assert "Simulation with 150 labelled public examples" in capsys.readouterr().out
    summary = json.loads(Path("runs/own/0/summary.json").read_text(encoding="utf-8"))
    assert 0.9 < summary["epsilon"] <= 1
    assert summary["guarantee"] == "unconditional"
    assert audit_ledger("runs/own/0/run.sqlite", exact=True)["epsilon_spent"] <= 1
    assert main(["predict", "runs/own/0", "own/test_embeddings.npy"]) == 0
    with Path("predictions.csv").open(encoding="utf-8", newline="") as file:
        rows = np.array([row[-5:] for row in csv.reader(file)][1:], dtype=float)
    accuracy = ((rows > 0.5) == truth).mean()
    assert accuracy >= 0.95
    assert accuracy == pytest.approx(summary["test_accuracy"], abs=2e-3)
    assert found.expected == pytest.approx(accuracy, abs=0.05)


def test_attributes_of_private_records_alone_are_a_condition_and_their_accuracy_is_paid_for(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    attribute_tables(Path("own"), {"": 1500})
    words = ["fit", "--data", "own", "--epsilon", "2", "--private-records", "1500", "--run_dir", "run"]
    assert main([*words, "--trainer.enable_progress_bar", "false"]) == 0
    found = json.loads(Path("run/summary.json").read_text())
    assert 0.9 < found["epsilon"] <= 2
    assert found["holdout_epsilon"] <= 2
    assert "whether any record has several" in found["reason"]
    assert abs(found["holdout_accuracy"] - 0.97) < 4 * found["holdout_deviation"] + 0.05
    assert main(["predict", "run", "own/embeddings.npy"]) == 0


def test_what_is_for_classes_alone_is_refused_for_attributes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    attribute_tables(Path("own"), {"private_": 800, "public_": 150, "test_": 200})
    words = ["--data", "own", "--epsilon", "1", "--private-records", "800"]
    for asked, said in (
        (
            ["init", *words, "--teacher", "ReverseKNN"],
            "--teacher 'ReverseKNN': recommend takes released gradients",
        ),
        (["compare", *words, "--output", "made"], "labels are attributes"),
    ):
        assert main(asked) == 2
        error = capsys.readouterr().err.strip()
        assert said in error
        assert len(error.splitlines()) == 1
    assert sorted(Path().iterdir()) == [Path("own")]


def test_one_hot_rows_are_classes_and_other_rows_attributes(tmp_path):
    rows = np.eye(3, dtype=np.int64)[np.arange(30) % 3]
    several = np.maximum(rows, np.roll(rows, 1, axis=1))
    values = np.random.default_rng(0).normal(size=(30, 8)).astype(np.float32)
    for number, (private, test, task) in enumerate((
        (rows, None, "multiclass"),
        (several, None, "multilabel"),
        (rows, several, "multilabel"),
        (several[:, :1], None, "multiclass"),
        (rows.argmax(1), rows.argmax(1), "multiclass"),
    )):  # fmt: skip
        folder = tmp_path / str(number)
        folder.mkdir()
        np.save(folder / "embeddings.npy", values)
        np.save(folder / "labels.npy", private)
        if test is not None:
            np.save(folder / "test_embeddings.npy", values)
            np.save(folder / "test_labels.npy", test)
        assert data_at(folder).task == task


def test_sizes_follow_the_records_and_the_public_examples():
    for records, epsilon, clusters in ((300, 0.5, 20), (1000, 0.5, 50), (3000, 1.0, 166)):
        # Ten over ε votes each, two a class at least, six public examples each at least.
        assert Sizes(records, epsilon, 1e-5, 10, 1000).clusters == clusters
    assert Sizes(10_000, 2.0, 1e-5, 10, 120).rule().width == 40  # a third of the public examples
    for records, delta in ((8000, 1e-5), (1000, 1e-4), (10_000, 1e-5), (60_000, 1e-6)):
        assert usual_delta(records) == pytest.approx(delta)
        assert usual_delta(records) * records <= 0.1 + 1e-12


def test_gradients_release_a_centre_and_serve_few_records_where_public_examples_are_of_another_kind(table):
    few, many = (
        recommend("own", epsilon=1.0, private_records=records, public_kind="other") for records in (600, 9000)
    )
    for found in (few, many):
        labeling = found.config["labeling"]
        assert labeling["labeler"]["class_path"] == "PreconditionedGradients"
        assert labeling["labeler"]["init_args"]["centre_share"] == 0.2
        assert labeling["released"] == "head"
        assert found.expected is None
        assert "another kind" in " ".join(found.reasons)
        stated = plan_of(found.config, "own")
        assert account(stated.charges, delta=stated.delta, adjacency="add_remove").epsilon <= 1
    assert few.setting.width < many.setting.width
    # At small ε the centre's noise is longer, so that it takes more of μ, and all together still cost ε at most.
    least = recommend("own", epsilon=0.15, private_records=600, public_kind="other")
    assert least.config["labeling"]["labeler"]["init_args"]["centre_share"] == 0.4
    assert account(plan_of(least.config, "own").charges, delta=1e-4, adjacency="add_remove").epsilon <= 0.15
    same = recommend("own", epsilon=1.0, private_records=9000)
    assert same.config["labeling"]["labeler"]["init_args"]["centre_share"] == 0.2
    assert same.config["labeling"]["released"] == "auto"


def test_test_examples_tell_whether_public_ones_are_of_another_kind(table, capsys):
    def found(**given):
        return recommend("own", **{"epsilon": 0.5, "private_records": 600, **given})

    assert found().setting.teacher == "ReverseKNN"
    assert "of the same kind" in " ".join(found().reasons)
    shift = np.linspace(-2, 3, 24, dtype=np.float32)
    np.save("own/test_embeddings.npy", table["test_embeddings"] + shift)
    np.save("own/test_labels.npy", table["test_labels"][::-1])  # no label is read
    np.save("own/private_embeddings.npy", np.full_like(table["private_embeddings"], np.nan))
    other = found()
    assert other.config == found(public_kind="other").config
    assert other.config["labeling"]["released"] == "head"
    assert "public examples are of another kind than private ones." in " ".join(other.reasons)
    assert found(public_kind="same").setting.teacher == "ReverseKNN"
    assert found(teacher="ReverseKNN").setting.teacher == "ReverseKNN"
    # Too little for a centre: as before, and said.
    least = found(epsilon=0.02)
    assert least.setting.teacher == "ReverseKNN"
    assert "the noise of a centre of 600 records has length" in " ".join(least.reasons)


def test_without_test_examples_the_user_is_asked_for_the_kind(tmp_path):
    parts = embeddings({"private": 600, "public": 120})
    data = EmbeddingsDataModule(**parts, test_embeddings=None, test_labels=None, num_classes=4)
    found = recommend(data, epsilon=0.5, private_records=600)
    assert "set public_kind='other'" in " ".join(found.reasons)


def test_public_features_of_embeddings_are_their_principal_components():
    torch.manual_seed(0)
    public, others = torch.randn(50, 12), torch.randn(9, 12)
    unit = torch.nn.functional.normalize(public.flatten(1), dim=1).double().numpy()
    mapped = torch.nn.functional.normalize(others.flatten(1), dim=1).double().numpy()
    analysis = PCA(5, svd_solver="full").fit(unit)
    deviations = np.sqrt(analysis.explained_variance_ * 49 / 50)
    expected = analysis.transform(mapped) / deviations**0.4
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    for width in (5, 3):
        extractor = PublicFeatures(components=width)
        with pytest.raises(RuntimeError, match="must learn from public examples first"):
            extractor(others)
        extractor.fit_public(public)
        found = extractor(others).double().numpy()
        wanted = expected[:, :width] / np.linalg.norm(expected[:, :width], axis=1, keepdims=True)
        np.testing.assert_allclose(np.abs(found), np.abs(wanted), atol=1e-4)
        again = PublicFeatures(components=width)
        again.load_state_dict(extractor.state_dict())
        torch.testing.assert_close(again(others), extractor(others), atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="the public ones were"):
        extractor(torch.rand(2, 6))


def test_one_command_from_data_to_a_private_model(table, monkeypatch, capsys):
    read = []
    load = EmbeddingsDataModule.load_public
    monkeypatch.setattr(EmbeddingsDataModule, "load_public", lambda data: read.append(data) or load(data))
    words = ["fit", "--data", "own", "--epsilon", "2", "--private-records", "600"]
    assert main([*words, "--trainer.max_epochs", "20", "--trainer.enable_progress_bar", "false"]) == 0
    printed = capsys.readouterr().out
    assert "120 public examples, 4 classes, embeddings of dimension 24" in printed
    assert "Expected accuracy: unknown" in printed
    assert "Memory: about " in printed
    folder = Path("runs/own/0")
    assert printed.strip().endswith(str(folder))
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert 1.8 < summary["epsilon"] <= 2
    assert summary["guarantee"] == "unconditional"
    assert summary["ensemble_test_accuracy"] >= 0.9
    assert len(read) == 1  # for the recommendation and for the run
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    assert config["data"]["init_args"]["public_embeddings"] == "own/public_embeddings.npy"
    again = ["--run_dir", "again", "--trainer.enable_progress_bar", "false"]
    assert main(["fit", "--config", str(folder / "config.yaml"), *again]) == 0
    repeated = json.loads(Path("again/summary.json").read_text(encoding="utf-8"))
    assert repeated["epsilon"] == summary["epsilon"]
    assert main([*words, "--config", "x.yaml"]) == 2
    assert "without --config" in capsys.readouterr().err


@pytest.mark.parametrize("epsilon", [0.3, 2.0])  # on both sides of the crossing
def test_init_writes_what_costs_no_more_than_epsilon_and_reads_nothing_private(epsilon, table, capsys):
    words = ["init", "--data", "own", "--epsilon", str(epsilon), "--private-records", "600", "--output"]
    assert main([*words, "one.yaml"]) == 0
    text = Path("one.yaml").read_text(encoding="utf-8")
    config = yaml.safe_load(text)
    assert config["data"]["init_args"]["name"] == "own"
    stated = plan_of(config, "one.yaml")
    assert stated.delta == usual_delta(600) == 1e-4
    exact = account(stated.charges, delta=1e-4, adjacency="add_remove").epsilon
    assert 0.9 * epsilon < exact <= epsilon
    np.save("own/private_embeddings.npy", np.full_like(table["private_embeddings"], np.nan))
    np.save("own/private_labels.npy", table["private_labels"][::-1])
    assert main([*words, "two.yaml"]) == 0
    assert Path("two.yaml").read_text(encoding="utf-8") == text
    assert main([*words, "two.yaml"]) == 2
    assert "already exists" in capsys.readouterr().err


def images(folder, counts, side=24):
    draw = np.random.default_rng(0)
    for part, count in counts.items():
        (folder / part).mkdir(parents=True)
        for number in range(count):
            values = draw.integers(0, 255, (side, side, 3), dtype=np.uint8)
            Image.fromarray(values).save(folder / part / f"{number}.png")


@pytest.fixture
def photos(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    images(Path("own"), {"private/a": 3, "private/b": 3, "public": 8, "test/a": 2, "test/b": 2})
    return Path("own")


def test_the_size_of_a_run_counts_vectors_of_a_mapped_file_as_not_held(tmp_path):
    tables = embeddings({"private": 60, "public": 60, "test": 60}, width=64)
    for name, values in tables.items():
        np.save(tmp_path / f"{name}.npy", values)
    np.savez(tmp_path / "held.npz", **tables)
    mapped, held = (
        recommend(data, epsilon=1.0, private_records=10**6).size_line()
        for data in (tmp_path, tmp_path / "held.npz")
    )
    assert "1,000,120 examples of 64 bytes (64 for features)" in mapped
    assert "1,000,120 examples of 320 bytes (64 for features)" in held


def refused(capsys, *words):
    before = sorted(Path().rglob("*"))
    assert main(["init", "--epsilon", "1", "--private-records", "1000", *words]) == 2
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1
    assert sorted(Path().rglob("*")) == before  # nothing is written
    return error


def test_bad_folders_get_one_line(photos, capsys):
    found = recommend(photos, epsilon=1.0, private_records=1000)
    assert found.config["data"]["init_args"]["image_size"] == 24
    assert "8 public examples, 2 classes, images 3×24×24" in found.reasons[0]
    assert "no such file or folder" in refused(capsys, "--data", "nowhere")
    (photos / "test/b").rename(photos / "b")
    assert "has 1 class folders, expected 2 or more" in refused(capsys, "--data", "own")
    (photos / "b").rename(photos / "test/c")
    images(photos / "public", {"a": 1, "b": 1})
    found = recommend(photos, epsilon=1.0, private_records=1000)
    assert "10 public examples, 3 classes" in found.reasons[0]  # every part may lack some
    (photos / "test/c").rename(photos / "test/B")
    assert "'B' and 'b' differ in case or spaces alone" in refused(capsys, "--data", "own")
    (photos / "test/B").rename(photos / "test/b")
    (photos / "public/a/0.png").write_bytes(b"no image")
    with pytest.warns(UserWarning, match="public: records are left out: 1 with an unreadable file"):
        found = recommend(photos, epsilon=1.0, private_records=1000)
    assert "9 public examples, 2 classes" in found.reasons[0]
    for file in photos.glob("public/**/*.png"):
        file.unlink()
    assert "there are no images in public/" in refused(capsys, "--data", "own")


def test_an_interrupted_fit_says_what_is_spent_and_goes_on_in_its_folder_alone(table, monkeypatch, capsys):
    handler, step = signal.getsignal(signal.SIGINT), SupervisedStudent.training_step

    def stopped(module, *batch):
        if module.trainer.current_epoch == 1:
            raise KeyboardInterrupt
        return step(module, *batch)

    quiet = ["--trainer.enable_progress_bar", "false"]
    words = [
        "fit",
        "--data",
        "own",
        "--epsilon",
        "2",
        "--private-records",
        "600",
        "--trainer.max_epochs",
        "3",
    ]
    with monkeypatch.context() as patch:
        patch.setattr(SupervisedStudent, "training_step", stopped)
        assert main([*words, *quiet]) == 130
    signal.signal(signal.SIGINT, handler)  # Lightning ignores it after the first
    said = capsys.readouterr().err
    spent = audit_ledger("runs/own/0/run.sqlite", exact=True)["epsilon_spent"]
    assert f"ε spent: {at_most(spent)} of the stated" in said
    assert "labels of 120 queries, a checkpoint of the last full epoch" in said
    assert "Continue with: privknn fit --resume runs/own/0" in said
    shutil.move("runs", "moved")
    assert main(["fit", "--resume", "moved/own/0", "--run_dir", "elsewhere"]) == 2
    assert main(["fit", "--resume", "moved/own/0", *quiet]) == 0, capsys.readouterr().err
    assert audit_ledger("moved/own/0/run.sqlite", exact=True)["epsilon_spent"] == spent
    summary = json.loads(Path("moved/own/0/summary.json").read_text(encoding="utf-8"))
    assert summary["epochs"] == 3
    assert Path("moved/own/0/checkpoints/last.ckpt").is_file()
    assert sorted(path.name for path in Path().iterdir()) == ["moved", "own"]


def test_objects_print_as_the_calls_that_make_them():
    teacher = PrivateKNN(90, 0.8, noise=Gaussian(sigma=14.0))
    assert repr(teacher) == "PrivateKNN(k=90, sampling_rate=0.8, noise=Gaussian(sigma=14.0))"
    labeling = PrivateLabeler(teacher, rounds=2, budget={"delta": 1e-6}, features=[PublicFeatures(30), HOG()])
    assert as_section(eval(repr(labeling))) == as_section(labeling)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
    assert (
        repr(SupervisedStudent(network=network, ema_decay=0.9))
        == "SupervisedStudent(ema_decay=0.9, network=…)"
    )


@pytest.mark.parametrize("there", ["nothing", "other runs", "the folder"])
def test_a_private_folder_that_does_not_fit_leaves_nothing_behind(photos, capsys, there):
    images(photos / "private", {"strange": 1})
    words = ["fit", "--data", "own", "--epsilon", "1", "--private-records", "1000"]
    if there == "other runs":
        Path("runs/own/0").mkdir(parents=True)
    elif there == "the folder":
        Path("mine").mkdir()
        words += ["--run_dir", "mine"]
    before = sorted(Path().rglob("*"))
    assert main(words) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("privknn fit: own/private has folders that aren't among the classes a, b")
    assert sorted(Path().rglob("*")) == before


def test_bad_numbers_and_places_get_one_line(table, capsys):
    assert "--private-records" in refused(capsys, "--data", "own", "--private-records", "3")
    assert "fewer than 5 for each of 4" in refused(capsys, "--data", "own", "--private-records", "15")
    assert "--private-records" in refused(capsys, "--data", "own", "--private-records", str(10**12))
    assert "expected a text" in refused(capsys, "--data", "own", "--name", " ")
    assert "the noise of a centre of 600 records has length" in refused(
        capsys, "--data", "own", "--private-records", "600", "--epsilon", "0.02", "--public-kind", "other"
    )
    assert "votes release no centre" in refused(
        capsys, "--data", "own", "--teacher", "ReverseKNN", "--public-kind", "other"
    )
    Path("file").touch()
    assert "not a writable folder" in refused(capsys, "--data", "own", "--output", "file/x.yaml")
    np.save("own/public_truth.npy", np.zeros(120, dtype=np.int64))
    assert "all public examples are of one class" in refused(capsys, "--data", "own")
    Path("own/test_labels.npy").unlink()
    Path("own/public_truth.npy").unlink()
    assert "test_embeddings and test_labels go together" in refused(capsys, "--data", "own")
    Path("own/test_embeddings.npy").unlink()
    np.save("own/private_labels.npy", np.zeros(600, dtype=np.int64))
    assert "--num-classes" in refused(capsys, "--data", "own")


def one_table(place, draw):
    place = place.with_suffix(".csv")
    topics = {
        "sport": "a goal in the last minute of the match",
        "money": "shares of the bank rose on the market",
    }
    lines = [
        f'"{topic}";{text} {number};{number // 2}' for number in range(300) for topic, text in topics.items()
    ]
    odd = ["sport; ;7", ";the weather of tomorrow;7", lines[0]]
    place.write_text("\n".join(["label;text;customer", *lines, *odd]), encoding="utf-8-sig")
    return place, ["--text", "text", "--label", "label", "--person", "customer"]


def one_pair(place, draw):
    place.mkdir()
    labels = np.arange(600) % 3
    np.save(place / "embeddings.npy", np.eye(8)[labels] + 0.1 * draw.normal(size=(600, 8)))
    np.save(place / "labels.npy", np.array(["a", "b", "c"])[labels])
    return place, []


@pytest.mark.parametrize("made", [one_table, one_pair])
def test_one_labelled_part_gives_a_model_and_its_paid_accuracy(made, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    place, words = made(tmp_path / "mine", np.random.default_rng(0))
    asked = f"fit --data {place} --epsilon 2 --private-records 600 --run_dir run".split()
    assert main([*asked, *words, "--trainer.enable_progress_bar", "false"]) == 0
    found = json.loads(Path("run/summary.json").read_text())
    assert found["epsilon"] <= 2
    assert found["holdout_epsilon"] <= 2
    assert found["unit"] == ("person" if "--person" in words else "record")
    assert ("names of the classes" in found["reason"]) == (made is one_pair)
    assert abs(found["holdout_accuracy"] - 1) < 4 * found["holdout_deviation"] + 0.1
    assert "hold-out accuracy" in capsys.readouterr().out


def test_a_folder_without_a_public_part_needs_none(tmp_path):
    for part in ("private", "test"):
        for name in ("cat", "dog"):
            (tmp_path / part / name).mkdir(parents=True)
            Image.new("RGB", (16, 16)).save(tmp_path / part / name / "0.png")
    found = recommend(tmp_path, epsilon=1.0, private_records=100)
    assert found.config["labeling"]["released"] == "head"
    assert any("would allow features that are learned" in line for line in found.reasons)


def test_a_place_of_public_data_is_refused_beside_a_data_module():
    with pytest.raises(ValueError, match=r"public='none'.*state them in the data module"):
        recommend(DigitsDataModule(), epsilon=1.0, private_records=1000, public="none")


def uneven(place):
    """Embeddings of two classes, 97 : 3, as EmbeddingsDataModule takes them."""
    draw, parts = np.random.default_rng(3), {}
    centres, spread = draw.normal(size=(2, 48)), np.linspace(1.5, 0.3, 48)
    centres *= 4 / np.linalg.norm(centres, axis=1, keepdims=True)
    for part, count in {"private": 3000, "public": 500, "test": 2000}.items():
        labels = (np.arange(count) % 33 == 0).astype(np.int64)
        parts[f"{part}_embeddings"] = (centres[labels] + draw.normal(size=(count, 48)) * spread).astype(
            np.float32
        )
        if part != "public":
            parts[f"{part}_labels"] = labels
    np.savez(place, **parts)


def test_nearest_class_means_find_a_rare_class_where_the_user_says_that_classes_are_uneven(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    uneven("own.npz")
    words = ["fit", "--data", "own.npz", "--epsilon", "1", "--private-records", "3000", "--run_dir", "run"]
    words += ["--trainer.enable_progress_bar", "false", "--trainer.max_epochs", "1"]
    assert main([*words, "--metric", "balanced_accuracy"]) == 0
    assert "A class is as likely as another" in capsys.readouterr().out
    summary = json.loads(Path("run/summary.json").read_text())
    labeling = yaml.safe_load(Path("run/config.yaml").read_text())["labeling"]
    assert labeling["labeler"]["init_args"]["fit"] == "nearest_mean"
    assert labeling["released"] == summary["released"] == "head"
    assert 0.9 < summary["epsilon"] <= 1
    # Of noise that is not seeded: 0.97 in most runs, and 0.26 by gradients.
    assert summary["test_recall"]["1"] > 0.8
    assert summary["test_balanced_accuracy"] > 0.85


def test_of_more_than_two_classes_balanced_accuracy_moves_gradients_to_equal_shares(table):
    given = {"epsilon": 1.0, "private_records": 600}
    found = recommend("own", metric="balanced_accuracy", **given).config["labeling"]
    assert found["labeler"]["class_path"] == "PreconditionedGradients"
    assert found["options"] == {"balanced": True}
    assert "options" not in recommend("own", teacher="PreconditionedGradients", **given).config["labeling"]


def test_balanced_accuracy_is_refused_where_no_teacher_serves_it(table, tmp_path, capsys):
    words = ["init", "--data", "own", "--epsilon", "1", "--private-records", "600"]
    words += ["--metric", "balanced_accuracy"]
    for asked in (["--teacher", "ReverseKNN"], ["--public-kind", "other"], ["--public", "none"]):
        if asked[-1] == "none":
            Path("own/public_embeddings.npy").unlink()
        assert main([*words, *asked]) == 2
        assert "--metric 'balanced_accuracy'" in capsys.readouterr().err
    attribute_tables(Path("several"), {"private_": 800, "public_": 150, "test_": 200})
    assert main([*words[:2], "several", *words[3:]]) == 2
    assert "classes instead of attributes" in capsys.readouterr().err


@pytest.mark.parametrize(("records", "known"), [(3000, True), (100, False)])
def test_the_error_of_a_paid_accuracy_is_foretold_from_the_estimate(records, known, tmp_path):
    one_pair(tmp_path / "own", np.random.default_rng(0))
    found = recommend(tmp_path / "own", epsilon=1.0, private_records=records, num_classes=3, public="none")
    (line,) = [line for line in found.reasons if line.startswith("Accuracy: ")]
    assert ("the accuracy is known to ± 0.0" in line) == known
    assert ("too few records to know the accuracy: about " in line) == (not known)
