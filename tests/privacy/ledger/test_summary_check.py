"""An auditor with two files: a summary that was forged does not follow from its ledger."""

import json
import shutil

import pytest

from pl_privknn.cli import main
from pl_privknn.privacy import Budget, Charge, Gaussian, Ledger
from pl_privknn.privacy.noise import SystemNoise
from pl_privknn.privacy.sqlite_file import read_rows
from pl_privknn.privacy.verify import check_summary
from tests.report.report_setup import QUERIES, small_run

FORGERIES = {
    "epsilon": {"epsilon": 0.5},
    "a slightly smaller epsilon": {"epsilon": 0.999},
    "delta": {"delta": 1e-4},
    "adjacency": {"adjacency": "replace_one"},
    "guarantee": {"guarantee": "unconditional", "reason": ""},
    "reason": {"reason": "the moon was full"},
    "epsilon_spent": {"epsilon_spent": 0.1},
    "bound": {"epsilon_rdp": 0.1},
    "attack": {"tpr_at_fpr_0.01": 0.01},
    "queried": {"queried": 2 * QUERIES - 1},
    "answered": {"answered": 3},
    "refused": {"refused": 1},
    "labeler": {"labeler": "ReverseKNN"},
    "budget": {"max_epsilon": 1.0},
    "head": {"ledger_head": "0" * 64},
    "run": {"run": "another"},
}


@pytest.fixture(scope="module")
def audited(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audit")
    small_run(folder)
    return folder / "summary.json", folder / "run.sqlite"


def test_an_honest_summary_follows_and_the_releases_are_listed(audited, capsys):
    assert main(["audit", *map(str, audited)]) == 0
    shown = capsys.readouterr().out
    assert "all figures match the ledger" in shown
    assert "DIFFERS" not in shown
    assert "not in the ledger" not in shown
    listed = [line.split() for line in shown.splitlines() if " gaussian " in line]
    assert sum(int(words[1]) for words in listed) == 2 * QUERIES
    assert all("sigma = 4" in " ".join(words) for words in listed)
    assert all(words[2] == "seeded" for words in listed)
    # In any order, and as JSON.
    assert main(["audit", *map(str, reversed(audited)), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["violated"] is False
    checked = {check["name"] for check in found["summary"] if check["agrees"]}
    assert {"epsilon", "delta", "adjacency", "guarantee", "queried", "answered", "refused", "lost"} <= checked


def differing(summary, ledger, **given):
    return {check["name"] for check in check_summary(summary, ledger, **given) if check["agrees"] is False}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_summary_is_found(audited, name):
    summary, forged = json.loads(audited[0].read_text()), FORGERIES[name]
    if name == "a slightly smaller epsilon":
        forged = {"epsilon": summary["epsilon"] * forged["epsilon"]}
    changed = {key for key, value in forged.items() if summary[key] != value}
    assert changed & differing({**summary, **forged}, audited[1])


def test_the_command_fails_for_a_forged_summary(audited, tmp_path, capsys):
    (tmp_path / "summary.json").write_text(json.dumps({**json.loads(audited[0].read_text()), "epsilon": 0.5}))
    assert main(["audit", str(tmp_path / "summary.json"), str(audited[1])]) == 1
    shown = capsys.readouterr().out
    assert "figures that do not match the ledger" in shown
    assert "epsilon" in {line.split()[0] for line in shown.splitlines() if line.endswith("DIFFERS")}


def test_a_summary_from_before_the_last_charge_is_found(audited):
    summary = json.loads(audited[0].read_text())
    planned = next(row for row in read_rows(audited[1]) if row["kind"] == "plan")
    for run in (summary["run"], None):
        early = {**summary, "ledger_head": planned["hash"], "epsilon_spent": 0.0, "run": run}
        assert "ledger_head" in differing(early, audited[1], exact=False)


def test_later_runs_in_a_shared_ledger_leave_a_summary_right(audited, tmp_path):
    shutil.copy(audited[1], tmp_path / "run.sqlite")
    ledger = Ledger(tmp_path / "run.sqlite", Budget(delta=1e-5))
    run = ledger.run("later", plan=[Charge(Gaussian(sigma=9.0))])
    run.charge(Gaussian(sigma=9.0), noise=SystemNoise(), adjacencies=("add_remove",))
    ledger.close()
    summary = json.loads(audited[0].read_text())
    assert all(check["agrees"] for check in check_summary(summary, tmp_path / "run.sqlite"))


def test_steps_and_noise_of_a_private_training_are_checked(tmp_path):
    release = Gaussian(sigma=2.0, l2_sensitivity=0.5, sampling_rate=0.1)
    ledger = Ledger(tmp_path / "run.sqlite", Budget(delta=1e-5))
    run = ledger.run("training", plan=[Charge(release, 20)])
    for _ in range(3):
        run.charge(release, 5, noise=SystemNoise(), adjacencies=("add_remove",))
    report = ledger.report(exact=False)
    summary = {
        **report.guarantee.to_dict(), "epsilon_spent": report.spent.epsilon, "max_epsilon": None, "steps": 15,
        "steps_planned": 20, "sampling_rate": 0.1, "noise_multiplier": 4.0, "max_grad_norm": 0.5,
        "ledger_head": report.head, "run": "training",
    }  # fmt: skip
    ledger.close()
    assert all(c["agrees"] for c in check_summary(summary, tmp_path / "run.sqlite", exact=False))
    for forged in ({"steps": 10}, {"steps_planned": 15}, {"noise_multiplier": 8.0}, {"sampling_rate": 0.01}):
        assert differing({**summary, **forged}, tmp_path / "run.sqlite", exact=False) == set(forged)
    del summary["guarantee"]
    assert differing(summary, tmp_path / "run.sqlite", exact=False) == {"guarantee"}


def test_what_is_no_summary_is_one_line(audited, tmp_path, capsys):
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "public.json").write_text(json.dumps({"epsilon": None}))
    for name, word in (
        ("list.json", "holds list, where a run leaves a mapping"),
        ("public.json", "no private record"),
        ("none.json", "none.json"),
    ):
        assert main(["audit", str(tmp_path / name), str(audited[1])]) == 2
        lines = capsys.readouterr().err.strip().splitlines()
        assert len(lines) == 1
        assert word in lines[0]
