"""What the documentation shows runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pl_privknn.privacy.ledger.ledger import Ledger
from pl_privknn.testing import FreeLedger, LabelerCheckError

ROOT = Path(__file__).resolve().parents[2]


def _blocks(path, language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / path).read_text(encoding="utf-8"), flags=re.DOTALL)


def test_own_labeler_of_the_documentation_labels_and_pays(tmp_path):
    scope: dict = {}
    exec(_blocks("docs/own_labeler.md", "python")[0], scope)
    teacher = scope["NearestCentroid"](sigma=0.01)
    teacher.fit(torch.tensor([[0.0], [0.1], [1.0]]), torch.tensor([0, 0, 1]), 2)
    run = Ledger(tmp_path / "l.sqlite").run("a", plan=teacher.plan(2, 2, 2))
    assert teacher.label(torch.tensor([[0.0], [1.0]]), run).labels.tolist() == [0, 1]
    assert run.num_charges == 1
    assert teacher.label(torch.tensor([[0.0], [1.0]]), FreeLedger(), max_answers=1).labels.tolist() == [0, -1]


def test_own_labeler_of_the_documentation_is_checked_as_it_shows(capsys):
    first, second = _blocks("docs/own_labeler.md", "python")
    report, error = _blocks("docs/own_labeler.md", "text")
    scope: dict = {}
    exec(first, scope)
    exec(second, scope)
    assert capsys.readouterr().out.strip() == report.strip()
    exec(first.replace("l2_sensitivity=1.0", "l2_sensitivity=0.5"), scope)
    with pytest.raises(LabelerCheckError) as caught:
        exec(second, scope)
    assert str(caught.value) == error.strip()


def test_readme_use_inside_trainer_fit(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = [block for block in _blocks("README.md", "python") if "PrivateLabeler" in block]
    # The same code, shortened: fewer epochs and no progress bars.
    code = code.replace("epochs_per_round=12", "epochs_per_round=1").replace("max_epochs=24", "max_epochs=2")
    exec(code, {})
    assert float(capsys.readouterr().out.split()[-1]) == pytest.approx(2.38, abs=0.2)


def test_counts_of_several_clients_are_released_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = _blocks("docs/reverse_knn.md", "python")
    exec(code, {})
    assert float(capsys.readouterr().out.split()[-1]) == pytest.approx(1.0, abs=1e-3)


def test_links_of_the_documentation_lead_somewhere():
    for page in [ROOT / "README.md", *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_readme_names_every_config_of_its_commands():
    for name in re.findall(r"configs/[\w/]+\.yaml", (ROOT / "README.md").read_text(encoding="utf-8")):
        assert (ROOT / name).is_file()


@pytest.mark.parametrize("script", ["render.py", "render_docs.py"])
def test_tables_are_the_rendered_ones(script):
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
