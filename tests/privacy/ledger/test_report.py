import json
import math

import pytest
from ledger_setup import PROTECTED

from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.ledger import Ledger, LedgerCorrupt
from pl_privknn.privacy.mechanisms import Charge, Gaussian, NoisyScreening
from pl_privknn.privacy.verification import audit_ledger, epsilon_of_file

G = Gaussian(20.0)
S = NoisyScreening(k=30, threshold=18, sigma=8.0, num_classes=10, sampling_rate=0.2)
FIELDS = {
    "epsilon",
    "epsilon_rdp",
    "epsilon_rdp_classic",
    "epsilon_pld",
    "epsilon_exact",
    "delta",
    "adjacency",
    "guarantee",
    "reason",
}


def gaussian_delta(eps, mu):
    """δ of a μ-Gaussian-DP mechanism (Balle and Wang 2018)."""
    phi = [0.5 * math.erfc(-x / math.sqrt(2)) for x in (-eps / mu + mu / 2, -eps / mu - mu / 2)]
    return phi[0] - math.exp(eps) * phi[1]


@pytest.fixture
def ledger_path(tmp_path):
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path, max_epsilon=4.0)
    a = ledger.run("a", plan=[Charge(G, 50)])
    ledger.run("b", plan=[Charge(S, 20)]).charge(S, 5, **PROTECTED)
    a.charge(G, 45, **PROTECTED)
    ledger.close()
    return path


def test_json_list_of_records(tmp_path):
    path = tmp_path / "records.json"
    path.write_text(json.dumps([Charge(G, 25).to_record(), {"mechanism": "gaussian", "sigma": 20}]))
    report = epsilon_of_file(path, 1e-5)
    assert set(report) >= FIELDS
    assert gaussian_delta(report["epsilon"], math.sqrt(26) / 20) == pytest.approx(1e-5, rel=1e-3)
    assert (report["adjacency"], report["guarantee"], report["reason"]) == ("add_remove", "unconditional", "")
    json.dumps(report, allow_nan=False)
    assert epsilon_of_file(path, 1e-5, adjacency="replace_one")["adjacency"] == "replace_one"


def test_exact_is_computed_unless_declined(tmp_path):
    path = tmp_path / "records.json"
    path.write_text(json.dumps([Charge(S, 20).to_record()]))
    report, fast = epsilon_of_file(path, 1e-5), epsilon_of_file(path, 1e-5, exact=False)
    assert report["epsilon"] == report["epsilon_exact"] < fast["epsilon"]
    assert fast["epsilon_exact"] is None


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("not JSON", "neither JSON"),
        ("\xff\xfe", "can't decode byte 0xff"),
        ('{"mechanism": "gaussian", "sigma": 20}', "JSON list"),
        ('[{"mechanism": "gaussian"}]', "record 0.*sigma"),
        ('[{"mechanism": "gaussian", "sigma": 20}, {"mechanism": "no such"}]', "record 1.*no such"),
        ('[{"mechanism": "gaussian", "sigma": NaN}]', "sigma=nan"),
    ],
)
def test_bad_files_are_named(tmp_path, text, match):
    path = tmp_path / "records.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=match):
        epsilon_of_file(path, 1e-5)


def test_bad_arguments(tmp_path, ledger_path):
    path = tmp_path / "records.json"
    path.write_text("[]")
    assert epsilon_of_file(path, 1e-5)["epsilon"] == 0
    with pytest.raises(ValueError, match="delta=None"):
        epsilon_of_file(path)
    with pytest.raises(ValueError, match="delta=0"):
        epsilon_of_file(path, 0.0)
    with pytest.raises(ValueError, match="adjacency='neighbour'"):
        epsilon_of_file(path, 1e-5, adjacency="neighbour")
    with pytest.raises(ValueError, match="replace_one"):
        epsilon_of_file(ledger_path, 1e-5, adjacency="replace_one")
    for reader in (epsilon_of_file, audit_ledger):
        with pytest.raises(FileNotFoundError):
            reader(tmp_path / "none.sqlite", 1e-5)
    assert not (tmp_path / "none.sqlite").exists()
    with pytest.raises(LedgerCorrupt):
        audit_ledger(path)


def test_ledger_is_reported_by_its_guarantee_and_by_run(ledger_path):
    report = epsilon_of_file(ledger_path, 1e-5)
    assert set(report) >= FIELDS | {"epsilon_spent", "runs", "filter", "head", "rows", "max_epsilon"}
    expected = account([Charge(G, 50), Charge(S, 20)], delta=1e-5)
    assert report["epsilon"] == expected.epsilon
    assert report["epsilon_exact"] == expected.epsilon_exact
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
    records = a["guaranteed"] + b["guaranteed"]
    path = ledger_path.with_name("records.json")
    path.write_text(json.dumps(records))
    assert epsilon_of_file(path, 1e-5)["epsilon"] == report["epsilon"]
    assert epsilon_of_file(ledger_path, 1e-3)["epsilon"] < report["epsilon"]


def test_audit_recomputes_and_judges_the_budget(ledger_path):
    audit = audit_ledger(ledger_path)
    assert audit["delta"] == 1e-5  # the ledger's own
    assert audit["epsilon"] == epsilon_of_file(ledger_path)["epsilon"]
    assert (audit["rows"], audit["max_epsilon"], audit["within_budget"]) == (5, 4.0, True)
    json.dumps(audit, allow_nan=False)
    with pytest.raises(LedgerCorrupt):
        audit_ledger(_with_one_count_changed(ledger_path))


def test_audit_without_and_beyond_a_budget(tmp_path):
    free = tmp_path / "free.sqlite"
    Ledger(free).run("a").charge(G)
    assert audit_ledger(free)["within_budget"] is None
    # A writer who skips the check, hashes and all, is found by the figures.
    tight = tmp_path / "tight.sqlite"
    ledger = Ledger(tight, max_epsilon=0.5)
    with ledger._store.writing():
        ledger._append("charge", {"run": "a", "charge": Charge(G, 1000).to_record()})
    assert audit_ledger(tight)["within_budget"] is False


def test_a_head_noted_earlier_finds_rewritten_and_older_files(ledger_path, tmp_path):
    old = tmp_path / "old.sqlite"
    old.write_bytes(ledger_path.read_bytes())
    head = audit_ledger(ledger_path, exact=False)["head"]
    Ledger(ledger_path, max_epsilon=4.0).run("a").charge(G, 5)
    later = audit_ledger(ledger_path, head=head.upper() + "\n", exact=False)
    assert later["rows"] == 6
    with pytest.raises(LedgerCorrupt, match="older copy"):
        audit_ledger(old, head=later["head"], exact=False)


def _with_one_count_changed(path):
    text = path.read_bytes()
    assert text.count(b'"count":45') == 1
    path.write_bytes(text.replace(b'"count":45', b'"count":44'))
    return path
