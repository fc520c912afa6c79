"""Comparisons that run: whole, interrupted, with a fault, and what they leave."""

import csv
import json
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from test_cli import wandb_records

from pl_privknn.cli import main
from pl_privknn.comparison import markdown_table, read_comparison, read_results
from pl_privknn.comparison.planning import Planner
from pl_privknn.comparison.plot import digest_of, draw, figure_of
from pl_privknn.comparison.results import Result
from pl_privknn.comparison.runner import choose
from pl_privknn.privacy.noisy_steps import PaidSteps
from pl_privknn.privacy.report import audit_ledger

ROOT = Path(__file__).resolve().parents[1]
SMOKE = {"max_epochs": 1, "limit_train_batches": 2, "accelerator": "cpu", "limit_val_batches": 1}
SIGMA = "labeling.labeler.init_args.noise.init_args.sigma"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def knn(name="knn", class_path="PrivateKNN"):
    return {
        "name": name,
        "labeling": {
            "labeler": {
                "class_path": class_path,
                "init_args": {"k": 30, "sampling_rate": 0.5, "noise": {"class_path": "Gaussian"}},
            },
            "queries_per_round": 30,
            "query_batch_size": 10,
        },
        "calibrate": {"parameter": SIGMA, "low": 1.0, "high": 1000.0},
    }


def guided():
    return {
        "name": "guided",
        "title": "Guided PATE",
        "labeling": {
            "labeler": {
                "class_path": "PATE",
                "init_args": {
                    "num_teachers": 20,
                    "teachers": {"class_path": "LinearTeachers", "init_args": {"steps": 5}},
                    "partitioner": {"class_path": "GuidedPartition", "init_args": {"num_clusters": 5, "sample": 200}},
                    "aggregator": {"class_path": "GNMAX"},
                },
            },
            "queries_per_round": 10,
        },
        "calibrate": {"parameter": "labeling.labeler.init_args.aggregator.init_args.sigma", "low": 1, "high": 1000},
    }  # fmt: skip


def sgd():
    return {
        "name": "sgd",
        "model": {
            "class_path": "NoisySGD",
            "init_args": {
                "extractor": {"class_path": "HOG"},
                "batch_size": 200,
                "components": 10,
                "steps_per_charge": 1,
            },
        },
        "trainer": {"max_epochs": 2, "limit_train_batches": 1.0},
        "epsilon_to": "model.init_args.target_epsilon",
    }


def write(methods, **changes):
    whole = {
        "name": "tiny",
        "base": {
            "data": {"class_path": "DigitsDataModule", "init_args": {"batch_size": 32, "num_public": 100}},
            "student": {"class_path": "SupervisedStudent", "init_args": {"network": "small_cnn"}},
            "trainer": SMOKE,
            "labeling": {"features": {"class_path": "pl_privknn.features.hog.HOG"}},
        },
        "delta": 1e-4,
        "noise_seeded": True,
        "seeds": [0],
        "epsilons": [1, 4],
        "methods": methods,
    }
    path = Path("tiny.yaml")
    path.write_text(yaml.safe_dump({**whole, **changes}, allow_unicode=True, sort_keys=False))
    return str(path)


def compare(config, *words):
    return main(["compare", config, "--workers", "0", *words])


def folder(method, epsilon, seed=0):
    return Path(f"runs/compare/tiny/{method}/eps_{epsilon}/seed_{seed}")


def result(method, epsilon, seed=0):
    return json.loads(
        Path(f"runs/compare/tiny/results/{method}__eps_{epsilon}__seed_{seed}.json").read_text()
    )


def test_whole_comparison_with_a_fault_in_one_method(tmp_path, capsys):
    (tmp_path / "broken_teacher.py").write_text(
        "from pl_privknn import PrivateKNN\n"
        "class Broken(PrivateKNN):\n"
        "    def label(self, queries, ledger, max_answers=None):\n"
        "        raise RuntimeError('the teacher broke')\n"
    )
    methods = [
        knn(),
        {**knn("broken", "broken_teacher.Broken"), "epsilons": [4]},
        guided(),
        sgd(),
        {"name": "true", "true_labels": True},
    ]
    # Made once, only to learn that nothing is run or written by it.
    assert compare(write(methods), "--dry-run") == 0
    assert "missing  knn ε=1 seed 0" in capsys.readouterr().out
    assert not Path("runs").exists()
    assert compare(write(methods)) == 1
    printed = capsys.readouterr().out
    assert "failed: broken ε=4 seed 0: RuntimeError: the teacher broke" in printed
    assert "8 runs: 0 done before, 7 now, 1 failed" in printed
    assert "the teacher broke" in json.loads((folder("broken", 4) / "error.json").read_text())["error"]
    for method in ("knn", "guided", "sgd"):
        for epsilon in (1, 4):
            values = result(method, epsilon)
            assert values["delta"] == 1e-4
            assert 0.99 * epsilon < values["epsilon"] <= epsilon
            assert values["epsilon_spent"] <= values["epsilon"]
            assert values["guarantee"] == ("conditional" if method == "guided" else "unconditional")
            assert bool(values["reason"]) == (method == "guided")
            assert 0 <= values["test_accuracy"] <= 1
            assert {"versions", "seconds", "config", "seed", "adjacency"} <= set(values)
            # The JSON alone lets an auditor recompute its ε.
            path = f"runs/compare/tiny/results/{method}__eps_{epsilon}__seed_0.json"
            assert main(["epsilon", path, "--json"]) == 0
            assert json.loads(capsys.readouterr().out)["epsilon"] == pytest.approx(
                values["epsilon"], rel=1e-6
            )
    assert result("knn", 1)["answered"] == 30
    noise = result("knn", 1)["config"]["labeling"]["labeler"]["init_args"]["noise"]["init_args"]
    assert noise["sigma"] == result("knn", 1)["calibrated"][SIGMA] > result("knn", 4)["calibrated"][SIGMA]
    truth = result("true", "inf")
    assert (truth["epsilon"], truth["guarantee"], truth["target_epsilon"]) == (None, "none", "inf")
    text = "".join(path.read_text() for path in Path("runs/compare/tiny/results").glob("*.json"))
    assert str(tmp_path) not in text
    assert socket.gethostname() not in text
    results = read_results("runs/compare/tiny")
    with Path("runs/compare/tiny/results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["method"], float(row["target_epsilon"])) for row in rows] == [
        (each.method, each.target) for each in results
    ]
    assert [float(row["test_accuracy"]) for row in rows] == [each.accuracy for each in results]
    table = Path("runs/compare/tiny/table.md").read_text()
    assert f"| Guided PATE † | {result('guided', 1)['test_accuracy']:.3f} †" in table
    assert Path("runs/compare/tiny/comparison.png").read_bytes()[:4] == b"\x89PNG"
    assert digest_of(results) in Path("runs/compare/tiny/comparison.svg").read_text()
    # Again: what is done stays, what failed is tried once more, and its fault is mended by now.
    (tmp_path / "broken_teacher.py").write_text(
        "from pl_privknn import PrivateKNN\nclass Broken(PrivateKNN): ...\n"
    )
    sys.modules.pop("broken_teacher")
    before = {
        path: path.read_bytes() for path in Path("runs").rglob("ledger.sqlite") if "broken" not in str(path)
    }
    assert compare(write(methods)) == 0
    assert "8 runs: 7 done before, 1 now, 0 failed" in capsys.readouterr().out
    assert len(before) == 6
    assert all(path.read_bytes() == content for path, content in before.items())
    # The first start had paid for nothing: all queries were asked now, under the plan stated then.
    assert (result("broken", 4)["answered"], result("broken", 4)["starts"]) == (30, 2)
    assert not (folder("broken", 4) / "error.json").exists()
    # Stored JSON alone gives the same table and plot.
    stored = Path("stored")
    stored.mkdir()
    for path in Path("runs/compare/tiny/results").glob("*.json"):
        (stored / path.name).write_bytes(path.read_bytes())
    assert main(["compare", "--render", "stored", "--output", "shown"]) == 0
    for name in ("table.md", "results.csv", "comparison.svg"):
        assert Path("shown", name).read_bytes() == Path("runs/compare/tiny", name).read_bytes()


def test_killed_comparison_goes_on_and_pays_for_nothing_twice(tmp_path, capsys):
    # Dies after the noise of its second batch was paid for and drawn, before the answers are stored.
    (tmp_path / "dying_teacher.py").write_text(
        "import os, pathlib, signal\n"
        "from pl_privknn import PrivateKNN\n"
        "class Dying(PrivateKNN):\n"
        "    calls = 0\n"
        "    def label(self, queries, ledger, max_answers=None):\n"
        "        release = super().label(queries, ledger, max_answers)\n"
        "        Dying.calls += 1\n"
        "        mark = pathlib.Path('died')\n"
        "        if Dying.calls == 2 and not mark.exists():\n"
        "            mark.touch()\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        return release\n"
    )
    config = write([knn(), knn("dying", "dying_teacher.Dying")], epsilons=[4])
    command = [sys.executable, "-m", "pl_privknn.cli", "compare", config, "--workers", "0"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    died = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert died.returncode == -signal.SIGKILL, died.stderr[-2000:]
    ledgers = {name: folder(name, 4) / "ledger.sqlite" for name in ("knn", "dying")}
    done = ledgers["knn"].read_bytes()
    first = audit_ledger(ledgers["dying"])
    paid = sum(record["count"] for run in first["runs"].values() for record in run["charged"])
    assert paid == 20
    assert compare(config) == 0
    assert "2 runs: 1 done before, 1 now, 0 failed" in capsys.readouterr().out
    assert ledgers["knn"].read_bytes() == done
    second = audit_ledger(ledgers["dying"])
    (run,) = second["runs"].values()
    # The lost batch is not asked again: 10 stored, 10 lost, 10 asked now, and the plan is kept.
    assert sum(record["count"] for record in run["charged"]) == 30
    assert second["epsilon"] == first["epsilon"] == pytest.approx(result("dying", 4)["epsilon"])
    values = result("dying", 4)
    assert (values["answered"], values["lost"], values["starts"]) == (20, 10, 2)
    assert (result("knn", 4)["answered"], result("knn", 4)["starts"]) == (30, 1)
    # A third start runs nothing.
    after = ledgers["dying"].read_bytes()
    assert compare(config) == 0
    assert "2 done before, 0 now" in capsys.readouterr().out
    assert ledgers["dying"].read_bytes() == after


def test_interrupted_noisy_sgd_continues_its_plan(monkeypatch, capsys):
    config = write([sgd()], epsilons=[4])
    release, calls = PaidSteps.release, []

    def dying(self, gradients, noise):
        calls.append(1)
        if len(calls) == 6:  # in the second of two epochs of five steps
            raise RuntimeError("power cut")
        return release(self, gradients, noise)

    with monkeypatch.context() as patch:
        patch.setattr(PaidSteps, "release", dying)
        assert compare(config) == 1
    assert "power cut" in capsys.readouterr().out
    assert compare(config) == 0
    values = result("sgd", 4)
    (run,) = audit_ledger(folder("sgd", 4) / "ledger.sqlite")["runs"].values()
    charged = sum(record["count"] for record in run["charged"])
    assert charged <= sum(record["count"] for record in run["guaranteed"]) == values["steps_planned"] == 10
    assert values["starts"] == 2
    assert values["epsilon_spent"] <= values["epsilon"] <= 4


def test_workers_of_their_own_and_a_killed_one(tmp_path, capsys):
    (tmp_path / "killed_teacher.py").write_text(
        "import os, signal\n"
        "from pl_privknn import PrivateKNN\n"
        "class Killed(PrivateKNN):\n"
        "    def label(self, queries, ledger, max_answers=None):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    config = write([knn(), knn("killed", "killed_teacher.Killed")], epsilons=[4])
    os.environ["PYTHONPATH"] = str(tmp_path)
    try:
        assert main(["compare", config, "--workers", "2"]) == 1
    finally:
        del os.environ["PYTHONPATH"]
    printed = capsys.readouterr().out
    assert "done knn ε=4 seed 0: test accuracy" in printed
    assert f"failed: killed ε=4 seed 0: killed by SIGKILL; see {folder('killed', 4) / 'run.log'}" in printed
    assert result("knn", 4)["answered"] == 30


def test_folder_of_another_configuration_is_refused(capsys):
    truth = {"name": "true", "true_labels": True}
    assert compare(write([truth])) == 0
    capsys.readouterr()
    before = sorted(path.stat().st_mtime_ns for path in Path("runs").rglob("*") if path.is_file())
    assert compare(write([truth]), "--set", "base.student.init_args.network=mnist_cnn") == 1
    error = capsys.readouterr().err
    assert "document.model.init_args.network: 'small_cnn' then, 'mnist_cnn' now" in error
    assert "--output" in error
    # Also where only the result was kept.
    for path in folder("true", "inf").glob("*.json"):
        path.rename(path.with_suffix(".kept"))
    assert compare(write([truth]), "--set", "delta=1e-3", "base.trainer.max_epochs=2") == 1
    assert "another configuration" in capsys.readouterr().err
    for path in folder("true", "inf").glob("*.kept"):
        path.rename(path.with_suffix(".json"))
    after = sorted(path.stat().st_mtime_ns for path in Path("runs").rglob("*") if path.is_file())
    assert after == before
    for words in (["--set", "seeds"], ["--only", "nobody"]):
        assert compare(write([truth]), *words) == 1
        assert words[-1] in capsys.readouterr().err


def test_wandb_has_a_run_each_in_one_group_with_its_ledger(tmp_path):
    wandb = {"project": "comparisons", "mode": "offline", "attach_ledger": True}
    assert compare(write([knn()], wandb=wandb, epsilons=[1, 4])) == 0
    ids = set()
    for epsilon in (1, 4):
        (path,) = folder("knn", epsilon).rglob("*.wandb")
        for _ in range(200):  # W&B's own process writes the file; it may end a moment later
            records = list(wandb_records(path))
            if records and records[-1].WhichOneof("record_type") == "exit":
                break
            time.sleep(0.1)
        kinds = {kind: [getattr(record, kind) for record in records if record.WhichOneof("record_type") == kind]
                 for kind in ("run", "summary", "artifact", "request")}  # fmt: skip
        started = kinds["run"][0]
        assert (started.run_group, started.project, started.job_type) == ("tiny", "comparisons", "knn")
        ids.add(started.run_id)
        summary = {item.key: json.loads(item.value_json) for each in kinds["summary"] for item in each.update}
        values = result("knn", epsilon)
        for name in ("epsilon", "delta", "test_accuracy", "guarantee"):
            assert summary[name] == pytest.approx(values[name]) if name != "guarantee" else summary[name]
        files = [file.path for artifact in kinds["artifact"] for file in artifact.manifest.contents]
        assert files == ["ledger.sqlite"]
    assert len(ids) == 2


def made(method, target, accuracy, seed=0, guarantee="unconditional", place=0, epsilon=None):
    values = {
        "comparison": "made", "method": method, "title": method.upper(), "place": place, "kind": "labeler",
        "target_epsilon": "inf" if target == math.inf else target, "seed": seed, "delta": 1e-5,
        "epsilon": None if target == math.inf else (epsilon or 0.98 * target), "adjacency": "add_remove",
        "guarantee": "none" if target == math.inf else guarantee, "test_accuracy": accuracy, "records": [],
    }  # fmt: skip
    return Result(method, method.upper(), place, target, seed, accuracy, values)


ACCURACIES = {
    "a": {0.5: [0.6, 0.7, 0.65], 2: [0.8, 0.82, 0.81]},
    "b": {0.5: [0.5, 0.6, 0.7], 2: [0.83, 0.83, 0.86]},
}
CONDITIONAL = {0.5: [0.9, 0.92, 0.94], 2: [0.7, 0.72, 0.71]}


def made_results():
    results = [
        made(method, target, accuracy, seed, place=place)
        for place, (method, cells) in enumerate(ACCURACIES.items())
        for target, accuracies in cells.items()
        for seed, accuracy in enumerate(accuracies)
    ]
    results += [
        made("c", target, accuracy, seed, "conditional", 2)
        for target, accuracies in CONDITIONAL.items()
        for seed, accuracy in enumerate(accuracies)
    ]
    return [*results, made("b", math.inf, 0.9, place=1), made("top", math.inf, 0.95, place=3)]


def test_table_names_the_best_and_keeps_conditions_apart():
    lines = markdown_table(made_results()).splitlines()
    assert lines[0] == "| method | ε ≤ 0.5 | ε ≤ 2 | without privacy |"
    assert lines[2] == "| A | **0.650 ± 0.050** | 0.810 ± 0.010 | – |"
    assert lines[3] == "| B | 0.600 ± 0.100 | **0.840 ± 0.017** | 0.900 (1 of 3 seeds) |"
    assert lines[4] == "| C † | 0.920 ± 0.020 † | 0.710 ± 0.010 † | – |"
    assert lines[5] == "| TOP | – | – | 0.950 (1 of 3 seeds) |"
    assert lines[6] == "| *best* | A (C † is ahead) | B |  |"
    assert "at least 0.98 of it" in lines[8]


def test_plot_draws_conditions_hollow_and_bounds_as_lines(tmp_path):
    results = made_results()
    (axes,) = figure_of(results).axes
    assert axes.get_xscale() == "log"
    series = {container.get_label(): container for container in axes.containers}
    assert set(series) == {"A", "B", "C (conditional)"}
    for name, container in series.items():
        line, _, (bars,) = container
        cells = CONDITIONAL if "conditional" in name else ACCURACIES[name.lower()]
        assert line.get_xdata() == pytest.approx([0.49, 1.96])
        assert line.get_ydata() == pytest.approx([statistics.mean(each) for each in cells.values()])
        halves = [np.diff(segment[:, 1])[0] / 2 for segment in bars.get_segments()]
        assert halves == pytest.approx([statistics.stdev(each) for each in cells.values()])
        hollow = "conditional" in name
        assert (line.get_markerfacecolor() == "none") == hollow
        assert line.get_linestyle() == ("--" if hollow else "-")
    levels = {float(line.get_ydata()[0]) for line in axes.get_lines() if list(line.get_xdata()) == [0, 1]}
    assert levels == {0.9, 0.95}
    draw(results, tmp_path / "one")
    draw(results, tmp_path / "two")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert digest_of(results) != digest_of(results[1:])


def test_readme_shows_stored_comparisons_and_tells_old_ones(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import render

    folder = tmp_path / "results" / "compare_made"
    folder.mkdir(parents=True)
    for each in made_results():
        (folder / f"{each.method}{each.target}{each.seed}.json").write_text(json.dumps(each.values))
    monkeypatch.setattr(render, "comparisons", lambda: [folder])
    monkeypatch.setattr(render, "runs", dict)
    monkeypatch.setattr(render, "DOCS", tmp_path)
    marks = (render.START, render.END, render.COMPARE_START, render.COMPARE_END)
    text = render.rendered("before\n" + "\n".join(marks) + "\nafter")
    assert "docs/compare_made.png" in text
    assert "| *best* | A (C † is ahead) | B |  |" in text
    assert render.rendered(text) == text
    with pytest.raises(SystemExit, match="comparisons"):
        render.rendered("\n".join(marks[:2]))
    assert render.old_plots() == ["compare_made.svg"]
    draw(read_results(folder), tmp_path / "compare_made")
    assert render.old_plots() == []
    first = next(folder.glob("a0.5*.json"))
    first.write_text(json.dumps({**json.loads(first.read_text()), "test_accuracy": 0.1}))
    assert render.old_plots() == ["compare_made.svg"]
    assert render.rendered(text) != text


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/compare_*.yaml")), ids=lambda path: path.stem)
def test_shipped_comparison_is_understood(path, capsys):
    # Plans of those that ask about all public images need the data, which may not be there.
    methods = [
        method for method in read_comparison(path).methods if "all" not in (method.labeling or {}).values()
    ]
    names = [method.name for method in methods]
    assert main(["compare", str(path), "--dry-run", "--seeds", "0", "--epsilons", "1", "--only", *names]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("missing") for line in lines)
    planned = [float(line.rsplit("plan ε=", 1)[1]) for line in lines if "plan ε=" in line]
    assert len(planned) == sum(method.kind == "labeler" for method in methods)
    assert all(0.9 < epsilon <= 1 for epsilon in planned)
    planner = Planner(read_comparison(path).base["data"])
    for run in choose(read_comparison(path), seeds=[0]):
        planner.check(run)
