"""Comparisons that run: whole, interrupted, killed, with a fault, and what they leave."""

import signal
import sys
from pathlib import Path

import pytest

from pl_privknn.cli import main
from pl_privknn.comparison import markdown_table, read_results
from pl_privknn.comparison.plot import results_digest
from pl_privknn.privacy.mechanisms.base import SEEDED_NOISE
from pl_privknn.privacy.mechanisms.steps import PaidSteps
from pl_privknn.privacy.verify import audit_ledger
from tests.comparison.compare_setup import (
    LABELER,
    TRUE,
    compare,
    folder,
    knn,
    own_folder,  # noqa: F401 - used by itself
    result,
    sgd,
    write,
)
from tests.privacy.ledger.ledger_setup import needs_fork
from tests.setup.forked import in_child


@pytest.mark.long
def test_whole_comparison_with_a_fault_in_one_method(tmp_path, capsys):
    (tmp_path / "broken_teacher.py").write_text(
        "from pl_privknn import PrivateKNN\n"
        "class Broken(PrivateKNN):\n"
        "    def label(self, queries, ledger, max_answers=None):\n"
        "        raise RuntimeError('the teacher broke')\n"
    )
    seeded = knn()
    source = {"class_path": "SeededNoise", "init_args": {"seed": 3}}
    seeded["set"][f"{LABELER}.init_args.noise_source"] = source
    methods = {
        "knn": seeded,
        "broken": knn("broken_teacher.Broken"),
        "sgd": sgd(),
        "true": TRUE,
    }
    config = write(methods, epsilons=[4])
    assert compare(config, "--dry-run", "--only", "knn", "broken") == 0
    assert "missing  knn ε=4 seed 0                           sigma=" in capsys.readouterr().out
    assert not Path("runs").exists()
    assert compare(config) == 1
    printed = capsys.readouterr().out
    assert "failed: broken ε=4 seed 0: privknn fit: RuntimeError at broken_teacher:4: its text" in printed
    assert "4 runs: 0 done before, 3 now, 1 failed" in printed
    for method, guarantee in (("knn", "none"), ("sgd", "unconditional")):
        values = result(method, 4)
        assert (values["delta"], values["guarantee"]) == (1e-4, guarantee)
        assert 0.98 * 4 < values["epsilon"] <= 4
        assert values["epsilon_spent"] <= values["epsilon"]
    assert SEEDED_NOISE in result("knn", 4)["reason"]
    assert (result("knn", 4)["answered"], result("true", "inf")["epsilon"]) == (30, None)
    made = Path("runs/compare/tiny")
    table, results = (made / "table.md").read_text(), read_results(made)
    assert table == f"partial: 3 of 4 runs\n\n{markdown_table(results)}\n"
    assert f"| knn ‡ | {result('knn', 4)['test_accuracy']:.3f} ± " in table
    assert (made / "comparison.png").read_bytes()[:4] == b"\x89PNG"
    assert results_digest(results) in (made / "comparison.svg").read_text()
    assert len((made / "results.csv").read_text().splitlines()) == 1 + 3
    # Again: what is done stays, what failed is tried once more, and its fault is mended by now.
    (tmp_path / "broken_teacher.py").write_text(
        "from pl_privknn import PrivateKNN\nclass Broken(PrivateKNN): ...\n"
    )
    sys.modules.pop("broken_teacher")
    ledgers = [path for path in Path("runs").rglob("run.sqlite") if "broken" not in str(path)]
    before = {path: path.read_bytes() for path in ledgers}
    assert len(before) == 2
    assert compare(config) == 0
    printed = capsys.readouterr().out
    assert "4 runs: 3 done before, 1 now, 0 failed" in printed
    assert "All runs together, on the same private records: ε ≤ " in printed
    assert "at δ = 0.0001, guarantee: none (" in printed
    assert all(path.read_bytes() == content for path, content in before.items())
    # The first start had paid for nothing: all queries were asked now, under the plan stated then.
    assert result("broken", 4)["answered"] == 30
    assert main(["compare", "--render", str(made), "--output", "shown"]) == 0
    for name in ("table.md", "results.csv", "comparison.svg"):
        assert Path("shown", name).read_bytes() == (made / name).read_bytes()


def test_an_interrupted_run_stops_the_comparison_and_continues_its_plan(monkeypatch, capsys):
    config, handler = write({"sgd": sgd()}, epsilons=[4, 8]), signal.getsignal(signal.SIGINT)
    release, calls = PaidSteps.release, []

    def stopped(self, gradients, noise):
        calls.append(1)
        if len(calls) == 6:  # in the second of two epochs of five steps
            raise KeyboardInterrupt
        if len(calls) == 7:
            raise RuntimeError("power cut")
        return release(self, gradients, noise)

    with monkeypatch.context() as patch:
        patch.setattr(PaidSteps, "release", stopped)
        assert compare(config) != 0
        signal.signal(signal.SIGINT, handler)  # Lightning ignores it after the first
        said = capsys.readouterr().err
        assert "interrupted; the same command continues where it stopped. All runs together" in said
        assert "ε ≤ " in said
        assert folder("sgd", 4).is_dir()
        assert not folder("sgd", 8).exists()
        assert compare(config, "--epsilon", "4") == 1
        assert "power cut" in capsys.readouterr().out
    assert compare(config, "--epsilon", "4") == 0
    assert Path("runs/compare/tiny/table.md").read_text().startswith("partial: 1 of 2 runs")
    values = result("sgd", 4)
    (run,) = audit_ledger(folder("sgd", 4) / "run.sqlite")["runs"].values()
    charged = sum(record["count"] for record in run["charged"])
    assert charged <= sum(record["count"] for record in run["guaranteed"]) == values["steps_planned"] == 10
    assert values["epsilon_spent"] <= values["epsilon"] <= 4


@needs_fork
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
    config = write({"knn": knn(), "dying": knn("dying_teacher.Dying")}, epsilons=[4])
    assert in_child(lambda: compare(config)) == -signal.SIGKILL
    ledgers = {name: folder(name, 4) / "run.sqlite" for name in ("knn", "dying")}
    done = ledgers["knn"].read_bytes()
    first = audit_ledger(ledgers["dying"])
    paid = sum(record["count"] for run in first["runs"].values() for record in run["charged"])
    assert paid == 20
    # What was begun is not continued under other settings.
    assert compare(config, "--set", "labeling.queries_per_round=40") == 2
    assert "labeling.queries_per_round: 30 then, 40 now" in capsys.readouterr().err
    assert compare(config) == 0
    assert "2 runs: 1 done before, 1 now, 0 failed" in capsys.readouterr().out
    assert ledgers["knn"].read_bytes() == done
    second = audit_ledger(ledgers["dying"])
    (run,) = second["runs"].values()
    # The lost batch is not asked again: 10 stored, 10 lost, 10 asked now, and the plan is kept.
    assert sum(record["count"] for record in run["charged"]) == 30
    assert second["epsilon"] == first["epsilon"] == pytest.approx(result("dying", 4)["epsilon"])
    assert [result("dying", 4)[name] for name in ("answered", "lost")] == [20, 10]
    assert result("knn", 4)["answered"] == 30
    # A third start runs nothing.
    after = ledgers["dying"].read_bytes()
    assert compare(config) == 0
    assert "2 done before, 0 now" in capsys.readouterr().out
    assert ledgers["dying"].read_bytes() == after


@pytest.mark.long
def test_workers_of_their_own_and_a_killed_one(tmp_path, capsys):
    # Processes of their own find what lies in the comparison's folder.
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / "killed_teacher.py").write_text(
        "import os, signal\n"
        "from pl_privknn import PrivateKNN\n"
        "class Killed(PrivateKNN):\n"
        "    def label(self, queries, ledger, max_answers=None):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    config = write({"knn": knn(), "killed": knn("killed_teacher.Killed")}, epsilons=[4])
    moved = Path(config).rename(beside / "tiny.yaml")
    assert main(["compare", str(moved), "--workers", "2"]) == 1
    assert str(beside) not in sys.path
    printed = capsys.readouterr().out
    assert "done: knn ε=4 seed 0: test accuracy" in printed
    assert "failed: killed ε=4 seed 0: " in printed
    assert f"(exit status -9; see {folder('killed', 4) / 'run.log'})" in printed
    assert (result("knn", 4)["answered"], result("knn", 4)["guarantee"]) == (30, "unconditional")
    assert "guarantee: unconditional" in printed
