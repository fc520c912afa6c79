"""Every YAML of configs/papers: understood by the command line, accounted as it says, and run on small data."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from pl_privknn.cli import main
from tests.cli.parsed_config import understood
from tests.datamodules.paper_data import (
    published,
    write_celeba,
    write_cifar10,
    write_cifar100,
    write_embeddings,
    write_market,
    write_mnist,
    write_svhn,
)

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs" / "papers").glob("*.yaml"))
BY_NAME = {path.stem: path for path in CONFIGS}
PRINTED = yaml.safe_load((ROOT / "benchmarks" / "papers.yaml").read_text(encoding="utf-8"))
PRETRAINING = "private_knn_table1_cifar10_pretraining"


SMALL = {
    "trainer.max_epochs": 1, "trainer.limit_train_batches": 1, "trainer.accelerator": "cpu",
    "trainer.enable_progress_bar": "false", "trainer.enable_model_summary": "false",
    "data.init_args.batch_size": 8,
}  # fmt: skip
ASK = {"labeling.rounds": 1, "labeling.queries_per_round": 8, "labeling.options.progress": "false"}
LABELER = "labeling.labeler.init_args."
ANSWERS = {**ASK, f"{LABELER}screening.threshold": 0, f"{LABELER}screening.noise.sigma": 0.1}
TEACHERS = {
    **ASK, f"{LABELER}num_teachers": 4, f"{LABELER}progress": "false", f"{LABELER}teachers.init_args.steps": 3,
}  # fmt: skip
FEW_RECORDS = {"model.init_args.expected_batch_size": 20, "model.init_args.private_records": 60}
CIFAR = {
    "data.init_args.private_records": 30,
    "data.init_args.public_examples": 29,
    "data.init_args.test_examples": 10,
}
HELD_OUT = {"data.init_args.public_examples": 60, "data.init_args.test_examples": 10}
FEW_HELD_OUT = {"data.init_args.public_examples": 30, "data.init_args.test_examples": 10}
FACES = {"data.init_args.public_examples": 20, "data.init_args.image_size": 32}
PEOPLE = {"data.init_args.num_public_people": 4, "data.init_args.image_size": 32}
FEW_TEACHERS = {**ASK, f"{LABELER}num_teachers": 4, f"{LABELER}progress": "false"}
SMALL_CNN = {"model.init_args.network": "small_cnn"}


RUNS = [
    ("private_knn_table1_svhn", {**ANSWERS, **FEW_HELD_OUT, **SMALL_CNN}),
    ("private_knn_table1_cifar10", {**ANSWERS, **CIFAR}),
    ("private_knn_table1_cifar10_noisy_sgd", {
        **FEW_RECORDS, "data.init_args.public_examples": 10, "data.init_args.test_examples": 10,
    }),
    ("private_knn_table3_celeba_gnmax300", {**FEW_TEACHERS, **FACES, **SMALL_CNN}),
    ("private_knn_table3_market1501_gamma0.10", {**ASK, **PEOPLE, **SMALL_CNN}),
    ("reverse_knn_table1_mnist_eps0.1", {**ASK, **SMALL_CNN}),
    ("ind_knn_table3_ag_news", ASK),
    ("guided_pate_table1_mnist_guided", {
        **TEACHERS, **SMALL_CNN, f"{LABELER}partitioner.init_args.num_clusters": 4,
        f"{LABELER}partitioner.init_args.steps": 3,
    }),
    ("guided_pate_table1_cifar100_class_balanced", {**TEACHERS, **HELD_OUT}),
]  # fmt: skip


#: One configuration for each combination of classes: the others are parsed alike, and that takes time.
FRESH = {
    tuple(sorted(re.findall(r"class_path: (\S+)", path.read_text(encoding="utf-8")))): path
    for path in CONFIGS
}.values()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working folder with small data of every kind under ``data``."""
    root = tmp_path_factory.mktemp("papers")
    data = root / "data"
    write_mnist(data)
    write_svhn(data / "SVHN")
    write_cifar10(data)
    write_cifar100(data)
    write_celeba(data)
    write_market(data)
    for name, classes in (
        ("cifar10_vit", 10), ("fashion_mnist_resnet50", 10), ("ag_news_roberta", 4), ("dbpedia_roberta", 14)
    ):  # fmt: skip
        write_embeddings(data / name, classes)
    with published(data):
        yield root


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_config_is_understood_and_accounted_as_it_says(config, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert config not in FRESH or understood(config).model.class_path
    text = config.read_text(encoding="utf-8")
    if "labeling:" not in text:
        assert "NoisySGD" in text or config.stem == PRETRAINING
        return
    stated = float(re.search(r"# Accounted: ε ([\d.]+) \(privknn epsilon --fast\)", text)[1])
    assert main(["epsilon", str(config), "--fast", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["epsilon"] == pytest.approx(stated, rel=0.006), f"{config.name}: ε {report['epsilon']:.4g}"
    assert (report["guarantee"] == "conditional") == ("conditional" in text)
    assert report["unit"] == _unit(text)


def _unit(text):
    """People have many images in these sets alone."""
    return "person" if "CelebADataModule" in text or "Market1501DataModule" in text else "record"


def _key(record):
    defaults = {"l2_sensitivity": 1.0, "sampling_rate": 1.0, "count": 1}
    return {name: round(v, 6) if isinstance(v, float) else v for name, v in {**defaults, **record}.items()}


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ("private_knn_table1_mnist", "Private-kNN: 735 answers"),
        ("private_knn_table1_mnist_lnmax", "LNMax: 1,000 answers, Laplace noise of scale 20"),
        ("private_knn_table1_svhn", "Private-kNN: 2,939 answers"),
        ("private_knn_table1_svhn_lnmax", "LNMax: 1,000 answers, Laplace noise of scale 20, δ 1e-6"),
        ("private_knn_table1_svhn_gnmax", "GNMax: 3,098 answers alone"),
        ("private_knn_table1_cifar10", "Private-kNN: 3,877 answers"),
        ("private_knn_table3_celeba_gamma0.05", "Private-kNN: 800 queries, τ 10, σ 50"),
        ("private_knn_table3_celeba_gamma0.10", "Private-kNN: 800 queries, τ 10, σ 100"),
        ("private_knn_table3_celeba_gnmax300", "GNMax, 300 teachers: 600 queries"),
        ("private_knn_table3_celeba_gnmax800", "GNMax, 800 teachers"),
        ("private_knn_table3_market1501_gamma0.05", "Private-kNN: 1,200 queries, τ 10, σ 100, γ 0.05"),
        ("private_knn_table3_market1501_gamma0.10", "Private-kNN: 1,200 queries, τ 10, σ 100, γ 0.10"),
        ("private_knn_table3_market1501_gnmax_sigma100", "GNMax, 300 teachers: 800 queries"),
        ("private_knn_table3_market1501_gnmax_sigma250", "GNMax, 300 teachers: 80 queries"),
        ("reverse_knn_table1_mnist_eps0.1", "40 clusters, k 1, one round, Laplace noise of scale 2/ε"),
        ("guided_pate_table1_mnist_random", "100 teachers, 100 queries, Laplace noise of scale 10"),
    ],
)
def test_configs_release_what_the_table_of_printed_figures_says(config, what):
    from pl_privknn.planning import plan_of

    row = next(row for row in PRINTED if row["what"].startswith(what))
    document = yaml.safe_load(BY_NAME[config].read_text(encoding="utf-8"))
    plan = plan_of(document, config)
    assert [_key(charge.to_record()) for charge in plan.charges] == [_key(r) for r in row["releases"]]
    assert plan.delta == row.get("delta", 1e-5)
    assert plan.adjacency == row.get("adjacency", "add_remove")


@pytest.mark.long(
    *("private_knn_table1_svhn", "private_knn_table1_cifar10", "private_knn_table1_cifar10_noisy_sgd"),
    *("private_knn_table3_celeba_gnmax300", "reverse_knn_table1_mnist_eps0.1"),
    "guided_pate_table1_cifar100_class_balanced",
)
@pytest.mark.parametrize(("config", "overrides"), RUNS, ids=[config for config, _ in RUNS])
def test_config_runs_on_small_data(config, overrides, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    text = BY_NAME[config].read_text(encoding="utf-8")
    if "CheckpointFeatures" in text:
        _first_stage(folder)
    chosen = {**SMALL, **_verify(text), **overrides}
    words = [word for name, value in chosen.items() for word in (f"--{name}", str(value))]
    assert main(["fit", "--config", str(BY_NAME[config]), *words, "--run_dir", str(tmp_path / "run")]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["epsilon"] > 0
    assert summary["unit"] == _unit(text)
    if "NoisySGD" not in text:
        assert summary["queried"] == 8
        assert summary["answered"] > 0


def _verify(text):
    return {"data.init_args.verify": "false"} if "Market1501DataModule" in text else {}


def _first_stage(folder):
    """Run the public first stage where the second one looks for it."""
    run = folder / "runs" / PRETRAINING / "0"
    if (run / "checkpoints" / "last.ckpt").is_file():
        return
    shutil.rmtree(run, ignore_errors=True)
    words = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]
    assert main(["fit", "--config", str(BY_NAME[PRETRAINING]), *words]) == 0
    assert (run / "checkpoints" / "last.ckpt").is_file()
