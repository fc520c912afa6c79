"""Audit of a run's folder: its figures follow from the ledger; export and report refuse a run that fails."""

import contextlib
import json
import re
import shutil
import sqlite3
import sys
import zipfile

import numpy as np
import pytest
import yaml

from pl_privknn.cli import main
from pl_privknn.privacy import Budget, Ledger
from pl_privknn.privacy.sqlite_file import canonical, seal

QUIET = ["--trainer.enable_progress_bar", "false", "--labeling.options.progress", "false"]
FIT = [
    *("fit", "--config", "configs/digits_reverse_knn.yaml", "--trainer.max_epochs", "1", *QUIET),
    *("--labeling.rounds", "1", "--labeling.queries_per_round", "20"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run, and another one of a smaller ε."""
    folder = tmp_path_factory.mktemp("runs")
    for name, epsilon in (("run", "2.0"), ("other", "0.5")):
        words = [
            "--run_dir",
            str(folder / name),
            "--labeling.labeler.init_args.budget.epsilon",
            epsilon,
            "--labeling.budget.epsilon",
            "9.0",
        ]
        assert main([*FIT, *words]) == 0
    return folder / "run", folder / "other"


@pytest.fixture
def run(runs, tmp_path):
    """A copy of the run, elsewhere."""
    shutil.copytree(runs[0], tmp_path / "copied")
    return tmp_path / "copied"


def change_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_yaml(path, *keys, value):
    content = yaml.safe_load(path.read_text())
    here = content
    for key in keys[:-1]:
        here = here[key]
    here[keys[-1]] = value
    path.write_text(yaml.safe_dump(content))


def execute(path, *statements):
    with contextlib.closing(sqlite3.connect(path)) as db:
        for statement in statements:
            db.execute(statement)
        db.commit()


def rewritten(path, change):
    """Rows of a ledger changed and sealed anew, as somebody can who knows the format."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        rows = [json.loads(body) for (body,) in db.execute("SELECT body FROM rows ORDER BY position")]
        rows = change(rows) or rows
        db.execute("DELETE FROM rows")
        last = "0" * 64
        for place, row in enumerate(rows, 1):
            text = canonical(row)
            last = seal(last, text)
            db.execute("INSERT INTO rows VALUES (?, ?, ?)", (place, text, last))
        db.execute("UPDATE head SET position = ?, hash = ?", (len(rows), last))
        db.commit()


def another(name):
    """The same file of the other run."""
    return lambda run, other: shutil.copyfile(other / name, run / name)


def of_summary(**changes):
    return lambda run, other: change_json(run / "summary.json", **changes)


def of_run_file(*statements):
    return lambda run, other: execute(run / "run.sqlite", *statements)


def fewer_releases(rows):
    for row in rows:
        if row["kind"] == "charge":
            row["charge"]["scale"] = 40.0


def log_beside(name):
    return lambda run, other: shutil.copyfile(run / name, run / f"{name}-wal")


def nothing_private_left(run, other):
    (run / "run.sqlite").unlink()
    change_json(run / "summary.json", epsilon=None, run=None)


#: What is changed in a run's folder; test_summary_check has figures of a summary, test_ledger_store rows of a ledger.
TAMPERINGS = {
    "file of another run": another("run.sqlite"),
    "another run's name in the facts": of_run_file(
        "UPDATE facts SET value = json_set(value, '$.run_id', 'x') WHERE name = 'begun'"
    ),
    "another plan in the facts": of_run_file(
        "UPDATE facts SET value = json_set(value, '$.terms.plan[0].scale', 7.5) WHERE name = 'begun'"
    ),
    "budget in the configuration": lambda run, other: change_yaml(
        run / "config.yaml", "labeling", "budget", "epsilon", value=1.0
    ),
    "ε in the summary": of_summary(epsilon=1.2),
    "run in the summary": of_summary(run="another"),
    "edited row": of_run_file("UPDATE rows SET body = replace(body, '\"count\":1', '\"count\":2')"),
    "noise in the ledger": lambda run, other: rewritten(run / "run.sqlite", fewer_releases),
    "no file": lambda run, other: (run / "run.sqlite").unlink(),
    "an empty ledger": lambda run, other: ((run / "run.sqlite").unlink(), Ledger(run / "run.sqlite").close()),
    "nothing private left": nothing_private_left,
    "a log beside the file": log_beside("run.sqlite"),
    "an answer less": of_run_file("UPDATE queries SET label = -1 WHERE position = 0"),
}  # fmt: skip
#: Files that a report or an export writes, and writes anew.
RELEASED = ("privacy_card.json", "export/privacy_card.json", "export/summary.json")
#: Configurations of other releases, and epochs.
KINDS = {"digits_noisy_sgd": 2, "digits_ind_knn": 1, "digits_statistics": 1}


def test_a_run_passes_wherever_it_lies(runs, run, capsys):
    for folder in (*runs, run):
        assert main(["audit", str(folder)]) == 0
        told = capsys.readouterr().out
        assert "all figures match the ledger" in told
        assert "not checked:" in told
    assert main(["audit", str(run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    agreed = {check["name"] for check in told["checks"] if check["agrees"]}
    assert {
        "epsilon",
        "run.sqlite: run",
        "run.sqlite: plan",
        "run.sqlite: ledger head",
        "config.yaml: epsilon",
    } <= agreed


@pytest.mark.parametrize("name", TAMPERINGS)
def test_tampering_is_found(runs, run, name, capsys):
    TAMPERINGS[name](run, runs[1])
    check_found(run, capsys)


def contents(run):
    return {path: path.read_bytes() for folder in (run, run / "export") for path in folder.glob("*.*")}


def check_found(run, capsys, commands=("export", "report")):
    before = contents(run)
    assert main(["audit", str(run)]) in (1, 2)
    capsys.readouterr()
    for command in commands:
        assert main([command, str(run)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert before == contents(run)


def test_cards_and_exports_are_compared_and_written_anew(run, capsys):
    assert main(["export", str(run), "--format", "torch"]) == 0
    assert main(["report", "--fast", str(run)]) == 0
    card = json.loads((run / "export" / "privacy_card.json").read_text())
    stated = json.loads((run / "summary.json").read_text())["epsilon"]
    assert card["epsilon"] == pytest.approx(stated)
    assert card["what_is_released"].startswith("labels of public examples")
    assert any("labelling" in line for line in card["known_exclusions"])
    assert main(["audit", str(run)]) == 0
    for name in RELEASED:
        kept = (run / name).read_bytes()
        change_json(run / name, epsilon=0.1)
        capsys.readouterr()
        assert main(["audit", str(run)]) == 1
        assert re.search(rf"{name}: epsilon .*DIFFERS", capsys.readouterr().out)
        (run / name).write_bytes(kept)
    change_json(run / "privacy_card.json", epsilon=0.1)
    assert main(["report", "--fast", str(run)]) == 0
    assert main(["audit", str(run)]) == 0


def test_a_card_of_before_the_last_charge_is_found(run, capsys):
    assert main(["report", "--fast", str(run)]) == 0
    with contextlib.closing(Ledger(run / "run.sqlite", Budget(9.0, 1e-4))) as ledger:
        (name,) = ledger.runs
        ledger.run(name).charge(next(iter(ledger.run_report(name).charged)).mechanism)
    check_found(run, capsys)
    assert main(["audit", str(run)]) == 1
    assert re.search(r"privacy_card.json: ledger_head .*DIFFERS", capsys.readouterr().out)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_runs_of_other_releases_are_audited(tmp_path, capsys, kind):
    run = tmp_path / "run"
    words = ["--trainer.max_epochs", str(KINDS[kind]), *QUIET, "--run_dir", str(run)]
    assert main(["fit", "--config", f"configs/{kind}.yaml", *words]) == 0
    assert main(["export", str(run)]) == 0
    assert main(["report", str(run)]) == 0
    assert main(["audit", str(run)]) == 0
    (run / "export" / "privacy_card.json").unlink()
    (run / "export" / "summary.json").unlink()
    change_json(run / "summary.json", epsilon=0.1)
    check_found(run, capsys)


def test_a_strangers_text_stays_text(run, tmp_path, capsys):
    evil = "x\x1b[1A\r\x1b[2Kguarantee            unconditional\n| ε | 0 |<script>[a](b)"

    def conditions(rows):
        for row in rows:
            for charge in [row["charge"]] if row["kind"] == "charge" else row.get("plan", []):
                charge |= {"guarantee": "conditional", "reasons": [evil]}

    rewritten(run / "run.sqlite", conditions)
    assert main(["audit", str(run / "run.sqlite")]) == 0
    told = capsys.readouterr().out
    assert "\x1b" not in told
    assert not re.search(r"(?m)^guarantee +unconditional", told)
    assert main(["report", str(run / "run.sqlite"), "--output", str(tmp_path / "page.html")]) == 0
    card = (tmp_path / "privacy_card.md").read_text()
    assert not [word for word in ("\x1b", "\n| ε | 0", "<script>", "[a](b)") if word in card]
    assert "<script>[a]" not in (tmp_path / "page.html").read_text()


def test_nothing_that_a_strangers_configuration_names_is_imported(run, capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "this", raising=False)
    change_yaml(run / "config.yaml", "model", "init_args", "extractor", value={"class_path": "this.X"})
    for command, status in (("audit", 0), ("export", 2), ("report", 0)):
        assert main([command, str(run)]) == status
    assert "this" not in sys.modules


def test_a_file_that_unpacks_to_much_is_refused(tmp_path, capsys):
    (tmp_path / "summary.json").write_text('{"epsilon": null}')
    with zipfile.ZipFile(tmp_path / "pictures.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("images.npy", bytes(1 << 28))
    assert main(["report", str(tmp_path)]) == 2
    assert "MiB unpacked" in capsys.readouterr().err


DAMAGED = {
    "config.yaml": [b"null", b"[]"],
    "summary.json": [b"null", b'{"epsilon": null, "versions": 1.5}', b'{"epsilon": {}, "delta": []}'],
    "pictures.npz": [b"", b"PK\x03\x04" + bytes(60)],
    "run.sqlite": [b"SQLite format 3\x00" + bytes(200)],
    "checkpoints/last.ckpt": [b"no pickle"],
}


def test_damaged_files_are_one_line(run, capsys):
    for name, contents in DAMAGED.items():
        kept = (run / name).read_bytes()
        for content in contents:
            (run / name).write_bytes(content)
            refused = 0
            for command in ("audit", "export", "report"):
                refused += main([command, str(run)]) != 0
                assert capsys.readouterr().err.count("\n") <= 1
            assert refused
        (run / name).write_bytes(kept)


def test_mutated_files_never_trace_back(run, capsys):
    random = np.random.default_rng(0)
    names = ["config.yaml", "summary.json", "run.sqlite", "metrics.csv"]
    for number in range(20):
        name = names[number % len(names)]
        kept = (run / name).read_bytes()
        data = bytearray(kept)
        for place in random.integers(0, len(data), 1 + number % 7):
            data[place] = random.integers(0, 256)
        (run / name).write_bytes(bytes(data))
        assert main(["audit", str(run)]) in (0, 1, 2)
        assert main(["report", str(run), "--fast"]) in (0, 2)
        (run / name).write_bytes(kept)
    capsys.readouterr()
