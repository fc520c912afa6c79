"""Lists, plans, configurations and ledgers: what ``privknn epsilon`` and ``privknn audit`` say of their files."""

import json
import math
from pathlib import Path

import pytest

from pl_privknn.cli import main
from pl_privknn.config import read_document
from pl_privknn.labelers import PrivateKNN
from pl_privknn.labelers.voting import Screening
from pl_privknn.privacy import Budget
from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.ledger import Ledger, LedgerCorrupt
from pl_privknn.privacy.mechanisms import Charge, Gaussian, NoisyScreening
from pl_privknn.privacy.verify import audit_ledger, epsilon_of_file, epsilon_of_files, export_ledger
from tests.privacy.ledger.ledger_setup import PROTECTED, G

S = NoisyScreening(k=30, threshold=18, sigma=8.0, num_classes=10, sampling_rate=0.2)
CONFIGS = Path(__file__).parents[3] / "configs"
FIELDS = {
    *("epsilon", "epsilon_rdp", "epsilon_rdp_classic", "epsilon_pld", "epsilon_exact", "delta"),
    *("adjacency", "guarantee", "reason"),
}


def gaussian_delta(eps, mu):
    """δ of a μ-Gaussian-DP mechanism (Balle and Wang 2018)."""
    phi = [0.5 * math.erfc(-x / math.sqrt(2)) for x in (-eps / mu + mu / 2, -eps / mu - mu / 2)]
    return phi[0] - math.exp(eps) * phi[1]


def printed(words, capsys, status=0):
    assert main([*map(str, words), "--json"]) == status
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def write(tmp_path):
    """Writes a text into a file of that name, and says where."""

    def write(text, name="plan.yaml"):
        (tmp_path / name).write_bytes(text.encode("latin-1"))
        return tmp_path / name

    return write


@pytest.fixture
def ledger(path):
    """The path of a ledger with two runs."""
    ledger = Ledger(path, Budget(epsilon=4.0))
    a = ledger.run("a", plan=[Charge(G, 50)])
    ledger.run("b", plan=[Charge(S, 20)]).charge(S, 5, **PROTECTED)
    a.charge(G, 45, **PROTECTED)
    ledger.close()
    return path


def test_lists_of_records_as_json_and_yaml(write):
    listed = write(json.dumps([Charge(G, 25).to_record(), {"mechanism": "gaussian", "sigma": 20}]))
    report = epsilon_of_file(listed, 1e-5)
    assert set(report) >= FIELDS
    assert gaussian_delta(report["epsilon"], math.sqrt(26) / 20) == pytest.approx(1e-5, rel=1e-3)
    assert (report["adjacency"], report["guarantee"], report["reason"]) == ("add_remove", "unconditional", "")
    json.dumps(report, allow_nan=False)
    assert epsilon_of_file(listed, 1e-5, adjacency="replace_one")["adjacency"] == "replace_one"
    text = "- {mechanism: gaussian, sigma: 2e1, count: 25}\n- mechanism: gaussian\n  sigma: 20\n"
    assert epsilon_of_file(write(text), 1e-5) == report
    # The exact figure is computed unless it is declined.
    sampled = write(json.dumps([Charge(S, 20).to_record()]))
    report, fast = epsilon_of_file(sampled, 1e-5), epsilon_of_file(sampled, 1e-5, exact=False)
    assert report["epsilon"] == report["epsilon_exact"] < fast["epsilon"]
    assert fast["epsilon_exact"] is None


def test_a_training_configuration_states_its_plan_without_data(capsys):
    report = printed(["epsilon", CONFIGS / "fashion_mnist_private_knn.yaml", "--fast"], capsys)
    labeling = read_document(CONFIGS / "fashion_mnist_private_knn.yaml")["labeling"]
    given = labeling["labeler"]["init_args"]
    noise = Gaussian(**given["noise"]["init_args"])
    labeler = PrivateKNN(
        given["k"],
        given["sampling_rate"],
        Screening(given["screening"]["threshold"], Gaussian(**given["screening"]["noise"])),
        noise,
    )
    plan = labeler.plan(2 * labeling["queries_per_round"], labeling["max_answers"], 10)
    assert report["epsilon"] == account(plan, delta=labeling["budget"]["delta"], exact=False).epsilon


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("a: [1", "not readable as YAML"),
        ("just words", "neither JSON"),
        ("\xff\xfe", "can't decode byte 0xff"),
        ("data: {}\ntrainer: {}", "holds data, trainer; expected"),
        ("releases: [{mechanism: gaussian, sigma: -1}]", "record 0.*sigma"),
        ("releases: []\ndelta: 2", "delta=2"),
        ("releases: []\nadjacency: near", "adjacency='near'"),
        ('{"mechanism": "gaussian", "sigma": 20}', "JSON list"),
        ('[{"mechanism": "gaussian", "sigma": 20}, {"mechanism": "no such"}]', "record 1.*no such"),
        ('[{"mechanism": "gaussian", "sigma": NaN}]', "sigma=nan"),
    ],
)
def test_bad_files_are_named(write, text, match):
    with pytest.raises(ValueError, match=match):
        epsilon_of_file(write(text), 1e-5)


def test_what_does_not_fit_together_is_refused(write, ledger, tmp_path, capsys):
    path = write("[]", "empty.json")
    replaced = write("releases: []\nadjacency: replace_one\ndelta: 1e-5", "a.yaml")
    tighter = write("releases: []\ndelta: 1e-6", "b.yaml")
    assert epsilon_of_file(path, 1e-5)["epsilon"] == 0
    for call, named in (
        (lambda: epsilon_of_file(path), "delta=None"),
        (lambda: epsilon_of_file(path, 0.0), "delta=0"),
        (lambda: epsilon_of_file(path, 1e-5, adjacency="neighbour"), "adjacency='neighbour'"),
        (lambda: epsilon_of_file(ledger, 1e-5, adjacency="replace_one"), "replace_one"),
        (lambda: epsilon_of_files([ledger, replaced]), r"add_remove.*replace_one.*never composed"),
        (lambda: epsilon_of_file(replaced, adjacency="add_remove"), "never composed"),
        (lambda: epsilon_of_files([ledger, tighter]), "no common δ"),
    ):
        with pytest.raises(ValueError, match=named):
            call()
    assert epsilon_of_files([ledger, tighter], 1e-6)["delta"] == 1e-6
    for reader in (epsilon_of_file, audit_ledger):
        with pytest.raises(FileNotFoundError):
            reader(tmp_path / "none.sqlite", 1e-5)
    assert not (tmp_path / "none.sqlite").exists()
    with pytest.raises(LedgerCorrupt):
        audit_ledger(path)
    assert printed(["audit", ledger, "--delta", "1e-5", "--adjacency", "add_remove"], capsys)["rows"] == 5
    for words, named in (
        ("--delta 1e-3", "delta=0.001"),
        ("--adjacency replace_one", "adjacency='replace_one'"),
    ):
        assert main(["audit", str(ledger), *words.split()]) == 2
        assert named in capsys.readouterr().err


def test_ledger_is_reported_by_its_guarantee_and_by_run(ledger, write, capsys):
    report = epsilon_of_file(ledger, 1e-5)
    assert set(report) >= FIELDS | {"epsilon_spent", "runs", "filter", "ledger_head", "rows", "max_epsilon"}
    expected = account([Charge(G, 50), Charge(S, 20)], delta=1e-5)
    assert (report["epsilon"], report["epsilon_exact"]) == (expected.epsilon, expected.epsilon_exact)
    assert report["epsilon_spent"] == account([Charge(S, 5), Charge(G, 45)], delta=1e-5).epsilon
    assert report["filter"]["rule"] == "composition"
    assert list(report["runs"]) == ["a", "b"]
    a, b = report["runs"].values()
    assert gaussian_delta(a["epsilon"], math.sqrt(50) / 20) == pytest.approx(1e-5, rel=1e-3)
    assert gaussian_delta(a["epsilon_spent"], math.sqrt(45) / 20) == pytest.approx(1e-5, rel=1e-3)
    assert b["guaranteed"] == [Charge(S, 20).to_record()]
    assert b["charged"] == [Charge(S, 5).to_record()]
    json.dumps(report, allow_nan=False)
    # Its records, put into a list, cost the same.
    assert (
        epsilon_of_file(write(json.dumps(a["guaranteed"] + b["guaranteed"])), 1e-5)["epsilon"]
        == report["epsilon"]
    )
    assert epsilon_of_file(ledger, 1e-3)["epsilon"] < report["epsilon"]
    # Beside a file over the same data, what the runs may still release counts, not what they released so far.
    more = write("releases: [{mechanism: gaussian, sigma: 20, count: 10}]\ndelta: 1e-5\n")
    together = account([Charge(G, 60), Charge(S, 20)], delta=1e-5, exact=False).epsilon
    assert printed(["epsilon", ledger, more, "--fast"], capsys)["epsilon"] == together


def test_audit_recomputes_and_judges_the_budget(ledger, tmp_path, capsys):
    target = tmp_path / "export.json"
    audit = printed(["audit", ledger, "--export", target], capsys)
    assert (audit["delta"], audit["epsilon"]) == (1e-5, epsilon_of_file(ledger)["epsilon"])
    assert (audit["rows"], audit["max_epsilon"], audit["within_budget"]) == (5, 4.0, True)
    exported = json.loads(target.read_text())
    assert exported == export_ledger(ledger)
    assert exported["ledger_head"] == audit["ledger_head"]
    assert exported["runs"]["a"]["charged"] == [Charge(G, 45).to_record()]
    assert epsilon_of_file(target)["epsilon"] == audit["epsilon"]
    free = tmp_path / "free.sqlite"
    Ledger(free).run("a").charge(G)
    assert audit_ledger(free)["within_budget"] is None
    # A writer who skips the check, hashes and all, is found by the figures.
    tight = tmp_path / "tight.sqlite"
    beyond = Ledger(tight, Budget(epsilon=0.5))
    with beyond._store.writing():
        beyond._append("charge", {"run": "a", "charge": Charge(G, 1000).to_record()})
    assert audit_ledger(tight)["within_budget"] is False


def test_a_head_noted_earlier_finds_rewritten_and_older_files(ledger, tmp_path):
    old = tmp_path / "old.sqlite"
    old.write_bytes(ledger.read_bytes())
    head = audit_ledger(ledger, exact=False)["ledger_head"]
    Ledger(ledger, Budget(epsilon=4.0)).run("a").charge(G, 5)
    later = audit_ledger(ledger, head=head.upper() + "\n", exact=False)
    assert later["head_found"] == f"row {later['rows'] - 1} of {later['rows']}"
    assert later["rows"] == 6
    with pytest.raises(LedgerCorrupt, match="older copy"):
        audit_ledger(old, head=later["ledger_head"], exact=False)
