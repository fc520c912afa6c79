"""Settings tried on public images that stand in for private records."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from pl_privknn.cli.main import main
from pl_privknn.datamodules import ArraysDataModule, DigitsDataModule, PublicStandInDataModule

GUARDED = """
from pl_privknn.datamodules import DigitsDataModule


class Guarded(DigitsDataModule):
    def load_private(self):
        raise AssertionError("private records were read")

    def load_test(self):
        raise AssertionError("the test set was read")
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("guarded.py").write_text(GUARDED)


def config(**labeling):
    labeler = {"class_path": "ClassSums", "init_args": {"noise_multiplier": 2.0, "delta": 1e-4}}
    whole = {
        "data": {"class_path": "guarded.Guarded", "init_args": {"batch_size": 32, "num_public": 120}},
        "model": {"class_path": "SupervisedStudent", "init_args": {"network": "linear_probe"}},
        "trainer": {"max_epochs": 1, "limit_train_batches": 1, "limit_val_batches": 0, "accelerator": "cpu"},
        "labeling": {
            "labeler": labeler,
            "selection": "all",
            "features": ["HOG"],
            "budget": {"delta": 1e-4, "max_epsilon": 9.0},
            "files": {"ledger_path": "real.sqlite"},
            **labeling,
        },
    }
    Path("run.yaml").write_text(yaml.safe_dump(whole))
    return "run.yaml"


def search(*words):
    return main(["search", config(), "--workers", "0", *words])


def test_all_combinations_run_once_and_the_best_comes_first(capsys):
    words = (
        "--set", "labeling.labeler.init_args.ridge=0.1,1000.0", "labeling.released=head,student",
        "--records", "700", "--seeds", "3",
    )  # fmt: skip
    assert search(*words) == 0
    shown = capsys.readouterr().out
    results = [json.loads(path.read_text()) for path in Path("runs/search/run/results").glob("*.json")]
    settings = {
        (each["config"]["labeling"]["labeler"]["init_args"]["ridge"], each["released"]) for each in results
    }
    assert settings == {(ridge, model) for ridge in (0.1, 1000.0) for model in ("head", "student")}
    assert {each["reason"] for each in results} == {"public images stood in for private records"}
    assert all(each["epsilon"] is None for each in results)
    # On so few images two settings may be as good; the noise is the system's.
    found = {each["title"]: each["test_accuracy"] for each in results}
    _, named = shown.split("Best of 4 settings, on public truth, with the noise of the real run: ")
    assert found[named.splitlines()[0]] == max(found.values())
    rows = [line for line in shown.splitlines() if line.startswith("| ridge")]
    accuracies = [float(row.split("|")[2]) for row in rows]
    assert accuracies == sorted(accuracies, reverse=True)
    assert not Path("real.sqlite").exists()
    # What is done is not done again.
    folder = Path("runs/search/run/setting_0/eps_inf/seed_3")
    before = (folder / "state.json").stat().st_mtime_ns
    assert search(*words) == 0
    assert (folder / "state.json").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--records", "700", "--set", "data.init_args.seed=1,2"], "--set data.init_args.seed: want a path"),
        (
            ["--records", "700", "--set", "labeling.files.run_dir=a,b"],
            "--set labeling.files.run_dir: a search",
        ),
        (["--records", "700", "--set", "trainer.max_epochs"], "must be PATH=V1,V2"),
        (["--records", "0"], "--records=0"),
    ],
)
def test_a_search_names_what_is_wrong(words, message, capsys):
    assert search(*words) == 2
    assert message in capsys.readouterr().err


def test_the_number_of_records_is_given_and_never_counted(capsys):
    path = config(labeler={"class_path": "PrivateKNN", "init_args": {"k": 3}})
    assert main(["search", path]) == 2
    assert "--records is missing" in capsys.readouterr().err
    assert main(["search", config(labeler=None), "--records", "9"]) == 2
    assert "labeling.labeler is missing" in capsys.readouterr().err


def test_parts_share_no_image_and_the_stand_in_is_repeated():
    pixels = torch.arange(40, dtype=torch.uint8)[:, None, None].expand(40, 4, 4).contiguous().numpy()
    truth = torch.arange(40) % 4
    truth[7] = -1
    data = ArraysDataModule(
        private_images=pixels[:3] + 200, private_labels=[0, 1, 2], public_images=pixels, public_truth=truth.numpy(),
        test_images=pixels[:2] + 100, test_labels=[0, 1], num_classes=4, batch_size=5,
    )  # fmt: skip
    stand_in = PublicStandInDataModule(data, records=47, private_share=0.5, test_share=0.25, seed=2)
    stand_in.setup("fit")
    assert data._private is None
    numbers = {
        name: (getattr(stand_in, name).images()[:, 0, 0, 0] * 255).round().long()
        for name in ("private", "public", "test")
    }
    distinct = {name: set(found.tolist()) for name, found in numbers.items()}
    assert [len(distinct[name]) for name in ("private", "public", "test")] == [20, 9, 10]
    assert set.union(*distinct.values()) == set(range(40)) - {7}
    assert len(numbers["private"]) == 47
    assert torch.bincount(numbers["private"]).max() == 3
    assert torch.equal(stand_in.private.labels, numbers["private"] % 4)
    assert torch.equal(stand_in.public.truth, numbers["public"] % 4)
    assert torch.equal(stand_in.test.labels, numbers["test"] % 4)
    assert stand_in.batch_size == 5


def test_without_truth_there_is_no_stand_in():
    images = torch.zeros(6, 4, 4, dtype=torch.uint8).numpy()
    data = ArraysDataModule(
        private_images=images[:2], private_labels=[0, 1], public_images=images, test_images=images[:0],
        test_labels=[], num_classes=2,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"public images of ArraysDataModule have no truth"):
        PublicStandInDataModule(data, records=10).setup("fit")
    with pytest.raises(ValueError, match="they leave no public image"):
        PublicStandInDataModule(DigitsDataModule(), records=10, private_share=0.6, test_share=0.4)
