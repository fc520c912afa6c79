"""Comparisons that run: whole, interrupted, with a fault, and what they leave."""

import json
import shutil
import signal
import socket
import sys
from pathlib import Path

import pytest

from pl_privknn.cli.main import main
from pl_privknn.comparison import read_results
from pl_privknn.comparison.plot import digest_of
from pl_privknn.config import get
from pl_privknn.privacy.mechanisms.base import SEEDED_NOISE
from pl_privknn.privacy.noisy_steps import PaidSteps
from pl_privknn.privacy.verification import audit_ledger
from tests.comparison.compare_setup import (
    SIGMA,
    compare,
    folder,
    guided,
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
    methods = [
        knn(),
        {**knn("broken", "broken_teacher.Broken"), "epsilons": [4]},
        {**guided(), "epsilons": [1]},
        {**sgd(), "epsilons": [4]},
        {"name": "true", "true_labels": True},
    ]
    assert compare(write(methods), "--dry-run", "--only", "knn", "broken") == 0
    assert "missing  knn ε=1 seed 0" in capsys.readouterr().out
    assert not Path("runs").exists()
    assert compare(write(methods)) == 1
    printed = capsys.readouterr().out
    assert "failed: broken ε=4 seed 0: privknn fit: RuntimeError at broken_teacher:4: its text" in printed
    assert "6 runs: 0 done before, 5 now, 1 failed" in printed
    error = json.loads((folder("broken", 4) / "error.json").read_text())["error"]
    assert "RuntimeError at broken_teacher:4" in error
    for method, epsilon in (("knn", 1), ("knn", 4), ("guided", 1), ("sgd", 4)):
        values = result(method, epsilon)
        assert values["delta"] == 1e-4
        assert 0.99 * epsilon < values["epsilon"] <= epsilon
        assert values["epsilon_spent"] <= values["epsilon"]
        # The noise of this comparison comes from seeds.
        assert (values["guarantee"], SEEDED_NOISE in values["reason"]) == ("none", True)
        assert ("guided partition" in values["reason"]) == (method == "guided")
        assert {"versions", "seconds", "config", "seed", "adjacency"} <= set(values)
        # The JSON alone lets an auditor recompute its ε.
        path = f"runs/compare/tiny/results/{method}__eps_{epsilon}__seed_0.json"
        assert main(["epsilon", path, "--json"]) == 0
        again = json.loads(capsys.readouterr().out)
        assert again["epsilon"] == pytest.approx(values["epsilon"], rel=1e-6)
        assert (again["guarantee"], again["reason"]) == (values["guarantee"], values["reason"])
    assert result("knn", 1)["answered"] == 30
    noise = [get(result("knn", epsilon)["config"], SIGMA) for epsilon in (1, 4)]
    assert noise == [result("knn", epsilon)["calibrated"][SIGMA] for epsilon in (1, 4)]
    assert noise[0] > noise[1]
    truth = result("true", "inf")
    assert (truth["epsilon"], truth["guarantee"], truth["target_epsilon"]) == (None, "none", "inf")
    text = "".join(path.read_text() for path in Path("runs/compare/tiny/results").glob("*.json"))
    assert str(tmp_path) not in text
    assert socket.gethostname() not in text
    table = Path("runs/compare/tiny/table.md").read_text()
    assert f"| Guided PATE ‡ | {result('guided', 1)['test_accuracy']:.3f} ‡" in table
    assert Path("runs/compare/tiny/comparison.png").read_bytes()[:4] == b"\x89PNG"
    assert (
        digest_of(read_results("runs/compare/tiny")) in Path("runs/compare/tiny/comparison.svg").read_text()
    )
    # Again: what is done stays, what failed is tried once more, and its fault is mended by now.
    (tmp_path / "broken_teacher.py").write_text(
        "from pl_privknn import PrivateKNN\nclass Broken(PrivateKNN): ...\n"
    )
    sys.modules.pop("broken_teacher")
    ledgers = [path for path in Path("runs").rglob("ledger.sqlite") if "broken" not in str(path)]
    before = {path: path.read_bytes() for path in ledgers}
    assert compare(write(methods)) == 0
    assert "6 runs: 5 done before, 1 now, 0 failed" in capsys.readouterr().out
    assert len(before) == 4
    assert all(path.read_bytes() == content for path, content in before.items())
    # The first start had paid for nothing: all queries were asked now, under the plan stated then.
    assert (result("broken", 4)["answered"], result("broken", 4)["starts"]) == (30, 2)
    assert not (folder("broken", 4) / "error.json").exists()
    # Stored JSON alone gives the same table and plot.
    shutil.copytree("runs/compare/tiny/results", "stored")
    assert main(["compare", "--render", "stored", "--output", "shown"]) == 0
    for name in ("table.md", "results.csv", "comparison.svg"):
        assert Path("shown", name).read_bytes() == Path("runs/compare/tiny", name).read_bytes()


def test_folder_of_another_configuration_is_refused(capsys):
    truth = {"name": "true", "true_labels": True}
    assert compare(write([truth])) == 0
    capsys.readouterr()

    def times():
        files = [path for path in Path("runs").rglob("*") if path.is_file() and path.name != "run.lock"]
        return sorted(path.stat().st_mtime_ns for path in files)

    before = times()
    assert compare(write([truth]), "--set", "base.student.init_args.network=mnist_cnn") == 2
    error = capsys.readouterr().err
    assert "document.model.init_args.network: 'small_cnn' then, 'mnist_cnn' now" in error
    assert "--output" in error
    assert times() == before
    # Also where only the result was kept.
    for path in folder("true", "inf").glob("*.json"):
        path.unlink()
    assert compare(write([truth]), "--set", "delta=1e-3", "base.trainer.max_epochs=2") == 2
    assert "another configuration" in capsys.readouterr().err
    for words in (["--set", "seeds"], ["--only", "nobody"]):
        assert compare(write([truth]), *words) == 2
        assert words[-1] in capsys.readouterr().err


def test_an_interrupted_run_stops_the_comparison_and_continues_its_plan(monkeypatch, capsys):
    config, handler = write([sgd()], epsilons=[4, 8]), signal.getsignal(signal.SIGINT)
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
        assert "interrupted; the same command continues where it stopped" in capsys.readouterr().err
        assert folder("sgd", 4).is_dir()
        assert not folder("sgd", 8).exists()
        assert compare(config, "--epsilons", "4") == 1
        assert "power cut" in capsys.readouterr().out
    assert compare(config, "--epsilons", "4") == 0
    values = result("sgd", 4)
    (run,) = audit_ledger(folder("sgd", 4) / "ledger.sqlite")["runs"].values()
    charged = sum(record["count"] for record in run["charged"])
    assert charged <= sum(record["count"] for record in run["guaranteed"]) == values["steps_planned"] == 10
    assert values["starts"] == 3
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
    config = write([knn(), knn("dying", "dying_teacher.Dying")], epsilons=[4])
    assert in_child(lambda: compare(config)) == -signal.SIGKILL
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


@pytest.mark.long
def test_workers_of_their_own_and_a_killed_one(tmp_path, capsys):
    # Processes of their own find what lies in the folder where they start anyway.
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / "killed_teacher.py").write_text(
        "import os, signal\n"
        "from pl_privknn import PrivateKNN\n"
        "class Killed(PrivateKNN):\n"
        "    def label(self, queries, ledger, max_answers=None):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    config = write([knn(), knn("killed", "killed_teacher.Killed")], epsilons=[4], noise_seeded=False)
    moved = Path(config).rename(beside / "tiny.yaml")
    assert main(["compare", str(moved), "--workers", "2"]) == 1
    assert str(beside) not in sys.path
    printed = capsys.readouterr().out
    assert "done: knn ε=4 seed 0: test accuracy" in printed
    assert f"failed: killed ε=4 seed 0: killed by SIGKILL; see {folder('killed', 4) / 'run.log'}" in printed
    values = result("knn", 4)
    # Noise of the operating system's generator: nothing weakens the guarantee.
    assert (values["answered"], values["guarantee"], values["reason"]) == (30, "unconditional", "")
    assert "(guarantee: unconditional)" in printed
