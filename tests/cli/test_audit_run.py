"""The audit of a run's folder: what leaves a run is what its ledger noted, and export and report refuse the rest."""

import contextlib
import json
import re
import shutil
import sqlite3
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from pl_privknn.cli.main import main
from pl_privknn.privacy import Ledger
from pl_privknn.privacy.store import canonical, seal

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


def ledger_and_summary(run, other):
    for name in ("ledger.sqlite", "summary.json"):
        shutil.copyfile(other / name, run / name)


def everything_but_labels(run, other):
    ledger_and_summary(run, other)
    shutil.copyfile(other / "config.yaml", run / "config.yaml")


def of_summary(**changes):
    return lambda run, other: change_json(run / "summary.json", **changes)


def of_labels(*statements):
    return lambda run, other: execute(run / "labels.sqlite", *statements)


def of_ledger(*statements):
    return lambda run, other: execute(run / "ledger.sqlite", *statements)


def of_config(*keys, value):
    return lambda run, other: change_yaml(run / "config.yaml", *keys, value=value)


def of_rows(change):
    return lambda run, other: rewritten(run / "ledger.sqlite", change)


def without_notes(rows):
    return [row for row in rows if row["kind"] != "note"]


def fewer_releases(rows):
    for row in rows:
        if row["kind"] == "charge":
            row["charge"]["scale"] = 40.0


def weights_changed(run, other):
    path = run / "checkpoints" / "last.ckpt"
    state = torch.load(path, weights_only=True)
    first = next(iter(state["state_dict"].values()))
    first += 1
    torch.save(state, path)


def without(name):
    return lambda run, other: (run / name).unlink()


def with_file(name, content=b"x"):
    def add(run, other):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_bytes(content)

    return add


def log_beside(name):
    return lambda run, other: shutil.copyfile(run / name, run / f"{name}-wal")


def nothing_private_left(run, other):
    (run / "ledger.sqlite").unlink()
    (run / "labels.sqlite").unlink(missing_ok=True)
    change_json(run / "summary.json", epsilon=None, run=None)


def after(command, change):
    def do(run, other):
        assert main([*command, str(run)]) == 0
        change(run, other)

    return do


#: What is changed in a run's folder. Of the table of an auditor's readings, and further ones.
TAMPERINGS = {
    "ledger and summary of another run": ledger_and_summary,
    "ledger, summary and configuration of another run": everything_but_labels,
    "ledger of another run": another("ledger.sqlite"),
    "labels of another run": another("labels.sqlite"),
    "checkpoint of another run": another("checkpoints/last.ckpt"),
    "labels shifted": of_labels("UPDATE queries SET label = (label + 1) % 10 WHERE label >= 0"),
    "refusals turned into answers": of_labels("UPDATE queries SET label = 1, released = 1"),
    "one answer more": of_labels(
        "INSERT INTO queries SELECT round, 999, example, asked_at, 1, 1, soft, score FROM queries LIMIT 1"
    ),
    "an answer taken out": of_labels("DELETE FROM queries WHERE position = 0"),
    "a fact of the labels": of_labels("UPDATE facts SET value = json_set(value, '$.terms', 0) WHERE name = 'begun'"),
    "another run's name in the labels": of_labels(
        "UPDATE facts SET value = json_set(value, '$.run_id', 'x') WHERE name = 'begun'"
    ),
    "scale in the configuration": of_config("labeling", "labeler", "init_args", "budget", "epsilon", value=99.0),
    "seed in the configuration": of_config("seed_everything", value=17),
    "accuracy in the summary": of_summary(test_accuracy=0.99),
    "ε in the summary": of_summary(epsilon=1.2),
    "δ in the summary": of_summary(delta=1e-9),
    "guarantee in the summary": of_summary(guarantee="unconditional, proven"),
    "run in the summary": of_summary(run="another"),
    "answers in the summary": of_summary(answered=3),
    "edited row": of_ledger("UPDATE rows SET body = replace(body, '\"count\":1', '\"count\":2')"),
    "row taken out": of_ledger("DELETE FROM rows WHERE position = 3"),
    "notes taken out of the ledger": of_rows(without_notes),
    "noise in the ledger": of_rows(fewer_releases),
    "no ledger": lambda run, other: (run / "ledger.sqlite").unlink(),
    "an empty ledger": lambda run, other: ((run / "ledger.sqlite").unlink(), Ledger(run / "ledger.sqlite").close()),
    "weights in the checkpoint": weights_changed,
    "one more checkpoint": lambda run, other: shutil.copy(other / "checkpoints/last.ckpt", run / "best.ckpt"),
    "pictures of another run": another("pictures.npz"),
    "no configuration": without("config.yaml"),
    "no summary": without("summary.json"),
    "no labels": without("labels.sqlite"),
    "no checkpoint": without("checkpoints/last.ckpt"),
    "no pictures": without("pictures.npz"),
    "no curves": without("metrics.csv"),
    "curves of another run": with_file("metrics.csv", b"epoch,val/accuracy\n0,0.9\n1,0.99\n"),
    "nothing private left": nothing_private_left,
    "a log beside the ledger": log_beside("ledger.sqlite"),
    "a log beside the labels": log_beside("labels.sqlite"),
    "a ledger that is written ahead": of_ledger("PRAGMA journal_mode=WAL"),
    "a table more in the labels": of_labels("CREATE TABLE more (a)"),
    "a file more in the export": with_file("export/weights.bin"),
    "no card in the export": after(["export"], without("export/privacy_card.md")),
}  # fmt: skip
#: Of what a report writes, and writes anew.
CARDS = {
    "figures of the card": lambda run, other: change_json(run / "privacy_card.json", epsilon=0.1),
    "no card": without("privacy_card.md"),
    "a card that nobody wrote": with_file("privacy_card.md", b"| epsilon | 0.1 |"),
}
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
    bound = {check["name"] for check in told["checks"] if check["agrees"]}
    assert {"config.yaml", "summary.json", "labels.sqlite", "checkpoints/last.ckpt", "epsilon"} <= bound


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


@pytest.mark.parametrize("name", CARDS)
def test_a_card_is_found_and_written_anew(runs, run, name, capsys):
    after(["report", "--fast"], CARDS[name])(run, runs[1])
    check_found(run, capsys, ["export"])
    assert main(["report", "--fast", str(run)]) == 0
    assert main(["audit", str(run)]) == 0


def test_a_card_of_before_the_last_charge_is_found(run, capsys):
    assert main(["report", "--fast", str(run)]) == 0
    with contextlib.closing(Ledger.reopen(run / "ledger.sqlite")) as ledger:
        (name,) = ledger.runs
        ledger.run(name).charge(next(iter(ledger.run_report(name).charged)).mechanism)
    check_found(run, capsys)
    assert main(["audit", str(run)]) == 1
    assert re.search(r"privacy_card.md .*older than.*DIFFERS", capsys.readouterr().out)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_tampering_of_other_releases_is_found(tmp_path, capsys, kind):
    words = ["--trainer.max_epochs", str(KINDS[kind])]
    for name in ("first", "other"):
        place = ["--run_dir", str(tmp_path / name), "--seed_everything", str(len(name))]
        assert main(["fit", "--config", f"configs/{kind}.yaml", *words, *QUIET, *place]) == 0
    for command in ("export", "report", "audit"):
        shutil.copytree(tmp_path / "first", run := tmp_path / command)
        assert main([command, str(run)]) == 0
        assert main(["audit", str(run)]) == 0
    tried = 0
    for number, (name, change) in enumerate(TAMPERINGS.items()):
        shutil.copytree(tmp_path / "first", run := tmp_path / str(number))
        try:
            change(run, tmp_path / "other")
        except (FileNotFoundError, sqlite3.OperationalError, TypeError):  # it has no labels, or no teacher
            continue
        if name != "noise in the ledger":  # another parameter here
            check_found(run, capsys)
            tried += 1
    assert tried > 30


def test_an_export_has_a_card_of_its_own_and_is_bound(runs, run, capsys):
    words = ["export", str(run), "--format", "torch"]
    assert main(words) == 0
    made = Path(capsys.readouterr().out.strip())
    card = json.loads((made.parent / "privacy_card.json").read_text())
    stated = json.loads((run / "summary.json").read_text())["epsilon"]
    assert card["epsilon"] == pytest.approx(stated)
    assert card["what_is_released"].startswith("labels of public examples")
    assert any("labelling" in line for line in card["known_exclusions"])
    assert main(["audit", str(run)]) == 0
    told = capsys.readouterr().out
    assert "export/model.pt2" in told
    assert "export/privacy_card.md" in told
    # One elsewhere takes no note from the first one.
    assert main([*words, "--output", str(run.parent / "elsewhere")]) == 0
    assert main(["audit", str(run)]) == 0
    for file, content in ((made.parent / "privacy_card.md", b"| epsilon | 0.1 |"), (made, b"another model")):
        kept = file.read_bytes()
        file.write_bytes(content)
        assert main(["audit", str(run)]) == 1
        file.write_bytes(kept)
    assert main(["audit", str(run)]) == 0


def test_a_strangers_text_stays_text(run, tmp_path, capsys):
    evil = "x\x1b[1A\r\x1b[2Kguarantee            unconditional\n| ε | 0 |<script>[a](b)"

    def conditions(rows):
        for row in rows:
            for charge in [row["charge"]] if row["kind"] == "charge" else row.get("plan", []):
                charge |= {"guarantee": "conditional", "reasons": [evil]}

    rewritten(run / "ledger.sqlite", conditions)
    assert main(["audit", str(run / "ledger.sqlite")]) == 0
    told = capsys.readouterr().out
    assert "\x1b" not in told
    assert not re.search(r"(?m)^guarantee +unconditional", told)
    assert main(["report", str(run / "ledger.sqlite"), "--output", str(tmp_path / "page.html")]) == 0
    card = (tmp_path / "privacy_card.md").read_text()
    assert not [word for word in ("\x1b", "\n| ε | 0", "<script>", "[a](b)") if word in card]
    assert "<script>[a]" not in (tmp_path / "page.html").read_text()


def test_nothing_that_a_strangers_configuration_names_is_imported(run, capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "this", raising=False)
    change_yaml(run / "config.yaml", "model", "init_args", "extractor", value={"class_path": "this.X"})
    for command in ("audit", "export", "report"):
        assert main([command, str(run)]) in (1, 2)
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
    "labels.sqlite": [b"SQLite format 3\x00" + bytes(200)],
    "ledger.sqlite": [b"SQLite format 3\x00" + bytes(200)],
    "checkpoints/last.ckpt": [b"no pickle"],
}


def test_damaged_files_are_one_line(run, capsys):
    for name, contents in DAMAGED.items():
        kept = (run / name).read_bytes()
        for content in contents:
            (run / name).write_bytes(content)
            for command in ("audit", "export", "report"):
                assert main([command, str(run)]) in (1, 2)
                assert capsys.readouterr().err.count("\n") <= 1
        (run / name).write_bytes(kept)


def test_mutated_files_never_trace_back(run, capsys):
    random = np.random.default_rng(0)
    names = ["config.yaml", "summary.json", "labels.sqlite", "ledger.sqlite", "metrics.csv"]
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
