"""Lists, plans, configurations and ledgers as files of ``privknn epsilon`` and ``privknn audit``."""

import json
from pathlib import Path

import pytest
from ledger_setup import PROTECTED

from pl_privknn.cli.main import main
from pl_privknn.config import read_document
from pl_privknn.labelers import PrivateKNN
from pl_privknn.labelers.private_knn import Screening
from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.mechanisms import Charge, Gaussian, Laplace
from pl_privknn.privacy.verification import epsilon_of_file, epsilon_of_files, export_ledger, read_releases

G = Gaussian(20.0)
CONFIGS = Path(__file__).parents[3] / "configs"


def write(folder, text, name="plan.yaml"):
    (folder / name).write_text(text)
    return folder / name


def printed(words, capsys, status=0):
    assert main([*map(str, words), "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_a_yaml_list_equals_the_json_list(tmp_path):
    path = write(
        tmp_path, "- {mechanism: gaussian, sigma: 2e1, count: 25}\n- mechanism: gaussian\n  sigma: 20\n"
    )
    expected = account([Charge(G, 26)], delta=1e-5)
    assert epsilon_of_file(path, 1e-5) == expected.to_dict()


def test_a_training_configuration_states_its_plan_without_data(capsys):
    report = printed(["epsilon", CONFIGS / "fashion_mnist_private_knn.yaml", "--fast"], capsys)
    labeling = read_document(CONFIGS / "fashion_mnist_private_knn.yaml")["labeling"]
    arguments = labeling["labeler"]["init_args"]
    labeler = PrivateKNN(
        arguments["k"],
        arguments["sampling_rate"],
        Screening(**arguments["screening"]),
        Gaussian(**arguments["noise"]["init_args"]),
    )
    plan = labeler.plan(2 * labeling["queries_per_round"], labeling["max_answers"], 10)
    assert report["epsilon"] == account(plan, delta=labeling["budget"]["delta"], exact=False).epsilon


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("a: [1", "not readable as YAML"),
        ("just words", "neither JSON"),
        ("data: {}\ntrainer: {}", "holds data, trainer; want"),
        ("releases: [{mechanism: gaussian, sigma: -1}]", "record 0.*sigma"),
        ("releases: []\ndelta: 2", "delta=2"),
        ("releases: []\nadjacency: near", "adjacency='near'"),
    ],
)
def test_bad_plans_are_named(tmp_path, text, match):
    with pytest.raises(ValueError, match=match):
        read_releases(write(tmp_path, text))


@pytest.fixture
def ledger_path(tmp_path):
    path = tmp_path / "ledger.sqlite"
    Ledger(path, max_epsilon=3.0).run("a", plan=[Charge(G, 40)]).charge(G, 30, **PROTECTED)
    return path


def test_files_over_the_same_data_compose(tmp_path, ledger_path, capsys):
    path = write(tmp_path, "releases: [{mechanism: gaussian, sigma: 20, count: 10}]\ndelta: 1e-5\n")
    report = printed(["epsilon", ledger_path, path], capsys)
    # What the run may still release counts, not what it has released so far.
    assert report["epsilon"] == account([Charge(G, 50)], delta=1e-5).epsilon
    assert epsilon_of_files([ledger_path], exact=False)["runs"].keys() == {"a"}


def test_mixed_adjacencies_and_deltas_are_refused(tmp_path, ledger_path):
    replaced = write(tmp_path, "releases: []\nadjacency: replace_one\ndelta: 1e-5", "a.yaml")
    tighter = write(tmp_path, "releases: []\ndelta: 1e-6", "b.yaml")
    with pytest.raises(ValueError, match=r"add_remove.*replace_one.*never composed"):
        epsilon_of_files([ledger_path, replaced])
    with pytest.raises(ValueError, match="never composed"):
        epsilon_of_file(replaced, adjacency="add_remove")
    with pytest.raises(ValueError, match="no common δ"):
        epsilon_of_files([ledger_path, tighter])
    assert epsilon_of_files([ledger_path, tighter], 1e-6)["delta"] == 1e-6


def test_audit_fails_on_another_delta_or_adjacency(ledger_path, capsys):
    assert (
        printed(["audit", ledger_path, "--delta", "1e-5", "--adjacency", "add_remove"], capsys)["rows"] == 3
    )
    assert main(["audit", str(ledger_path), "--delta", "1e-3"]) == 2
    assert "delta=0.001" in capsys.readouterr().err
    assert main(["audit", str(ledger_path), "--adjacency", "replace_one"]) == 2
    assert "adjacency='replace_one'" in capsys.readouterr().err


def test_an_exported_ledger_costs_the_same(tmp_path, ledger_path, capsys):
    target = tmp_path / "export.json"
    audit = printed(["audit", ledger_path, "--export", target], capsys)
    assert epsilon_of_file(target)["epsilon"] == audit["epsilon"]
    exported = json.loads(target.read_text())
    assert exported == export_ledger(ledger_path)
    assert exported["head"] == audit["head"]
    assert exported["runs"]["a"]["charged"] == [Charge(G, 30).to_record()]


def test_the_empirical_audit_reads_yaml_too(tmp_path, capsys):
    path = write(tmp_path, f"releases: [{json.dumps(Charge(Laplace(2.0)).to_record())}]\ndelta: 1e-5")
    words = ["audit", path, "--empirical", "--trials", 2000, "--seed", 0]
    assert printed(words, capsys)["audits"][0]["subject"] == "laplace"
