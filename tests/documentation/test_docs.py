"""What the documentation shows runs."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from benchmarks import render
from pl_privknn.datamodules import ArraysDataModule
from pl_privknn.datamodules.at import data_at
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.mechanisms import Mechanism
from pl_privknn.testing import LabelerCheckError, distance

ROOT = Path(__file__).resolve().parents[2]


def _blocks(path, language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / path).read_text(encoding="utf-8"), flags=re.DOTALL)


def test_own_labeler_of_the_documentation_is_checked_as_it_shows(capsys):
    first, _, check, registered = _blocks("docs/guides/own_labeler.md", "python")
    report, error = _blocks("docs/guides/own_labeler.md", "text")
    scope: dict = {}
    exec(first, scope)
    exec(check, scope)
    assert capsys.readouterr().out.strip() == report.strip()
    exec(first.replace("l2_sensitivity=1.0", "l2_sensitivity=0.5"), scope)
    with pytest.raises(LabelerCheckError) as caught:
        exec(check, scope)
    assert str(caught.value) == error.strip()
    exec(registered, scope)
    assert distance.dispatch(scope["Staircase"]) is not distance.dispatch(Mechanism)


def test_own_labeler_runs_from_a_file_beside_the_script_and_by_the_command(tmp_path):
    teacher, use, _, _ = _blocks("docs/guides/own_labeler.md", "python")
    (report, _) = _blocks("docs/guides/own_labeler.md", "text")
    (tmp_path / "nearest_centroid.py").write_text(teacher, encoding="utf-8")
    (tmp_path / "use.py").write_text(f"import torch\nfrom nearest_centroid import NearestCentroid\n{use}")
    for command, told in (
        (["use.py"], "tensor(["),
        (["-m", "pl_privknn.cli", "check", "nearest_centroid.NearestCentroid"], report.strip()),
    ):
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(told)
    ledger = Ledger.open_readonly(tmp_path / "ledger.sqlite")
    assert ledger.report().spent.guarantee == "unconditional"
    ledger.close()


def test_readme_use_inside_trainer_fit(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = [block for block in _blocks("README.md", "python") if "PrivateLabeler" in block]
    # The same code, shortened: fewer epochs and no progress bars.
    code = code.replace("epochs_per_round=12", "epochs_per_round=1").replace("max_epochs=24", "max_epochs=2")
    exec(code, {})
    # The exact worst case, as in the summary; privacy loss distributions alone give 2.463.
    assert float(capsys.readouterr().out.split()[-1]) == pytest.approx(2.3764, abs=1e-3)


@pytest.mark.parametrize("page", ["README.md", "docs/first_run.md"])
def test_the_pages_make_the_folder_that_their_commands_name(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = [block for block in _blocks(page, "python") if "np.save" in block]
    exec(code, {})
    assert "--data digits" in (ROOT / page).read_text(encoding="utf-8")
    data = data_at("digits")
    assert type(data) is ArraysDataModule
    assert data.num_classes == 10


def test_counts_of_several_clients_are_released_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = _blocks("docs/methods/reverse_knn.md", "python")
    exec(code, {})
    assert float(capsys.readouterr().out.split()[-1]) == pytest.approx(1.0, abs=1e-3)


PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]


def _anchors(page):
    """Names of a page's headings: lower case, without punctuation, with hyphens for blanks."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_of_the_documentation_lead_somewhere():
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                place = page.parent / target if target else page
                assert place.exists(), f"{page.name}: {target}"
                assert not anchor or anchor in _anchors(place), f"{page.name}: {target}#{anchor}"


def test_files_that_the_documentation_and_the_package_name_exist():
    folders = "docs|tests|benchmarks|pl_privknn|callbacks|datamodules|configs"
    sources = [
        path for top in ("pl_privknn", "callbacks", "datamodules") for path in (ROOT / top).rglob("*.py")
    ]
    figure = (ROOT / "docs/guides/release_flow.svg").read_text(encoding="utf-8")
    named = [(page, name) for page in PAGES for name in _paths(page, rf"`((?:{folders})/[\w/.]+\.\w+)`")]
    named += [(source, name) for source in sources for name in _paths(source, r"\b(docs/[\w/]+\.md)")]
    named += [("the figure", f"pl_privknn/{name}") for name in re.findall(r"\w+/[\w/]+\.py", figure)]
    assert named
    for page, name in named:
        assert (ROOT / name).exists(), f"{page}: {name}"


def _paths(page, pattern):
    return re.findall(pattern, page.read_text(encoding="utf-8"))


def test_the_api_reference_has_pages_of_every_public_room():
    rooms = yaml.safe_load((ROOT / "docs/_extensions/api.yaml").read_text(encoding="utf-8"))
    packages = {path.parent.name for path in (ROOT / "pl_privknn").glob("*/__init__.py")}
    assert packages - {"cli"} <= set(rooms)  # a command, which is no API


def test_the_names_of_the_api_reference_exist():
    rooms = yaml.safe_load((ROOT / "docs/_extensions/api.yaml").read_text(encoding="utf-8"))
    pages = [page for room in rooms.values() for page in room["pages"]]
    shown = [
        (module, names) for page in pages for module, names in page.items() if module not in ("title", "text")
    ]
    for module, names in shown:
        if not module.startswith("federated"):  # needs an environment of its own
            found = importlib.import_module(f"pl_privknn.{module}")
            assert all(hasattr(found, name) for name in names), module


PAPERS = ["docs/reference/papers.md"]
MEASURED = sorted({page for page, _, _ in render.TABLES} - set(PAPERS))


@pytest.mark.parametrize("pages", [MEASURED, pytest.param(PAPERS, marks=pytest.mark.long)])
def test_tables_are_the_rendered_ones(pages):
    assert render.update(render.fresh(pages), write=False) == []
