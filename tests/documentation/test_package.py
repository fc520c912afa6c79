"""The wheel, the links, the rooms and the cost of an import."""

import ast
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import tomllib
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

import pl_privknn
from pl_privknn.cli import main
from pl_privknn.datamodules import CIFAR10DataModule
from pl_privknn.features import HOG, TimmFeatures
from pl_privknn.networks import build_network

ROOT = Path(__file__).resolve().parents[2]
LINKED = ("datamodules", "callbacks", "configs")


def test_links_are_relative_and_lead_to_the_top_level():
    for name in LINKED:
        link = ROOT / "pl_privknn" / name
        assert link.is_symlink()
        assert link.readlink() == Path("..") / name


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built as for a release: from the source archive, so that nothing left in build/ gets in."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.long
def test_wheel_holds_the_package_and_nothing_else(wheel):
    package = ROOT / "pl_privknn"
    folders = [package, *(package / name for name in LINKED)]
    endings = (".py", ".pyi", ".yaml", ".j2", ".css", ".js", ".txt")
    sources = {path for folder in folders for path in folder.rglob("*") if path.suffix in endings}
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert held == {str(path.relative_to(ROOT)) for path in sources} | {"pl_privknn/py.typed"}
        for path in (ROOT / "configs").rglob("*.yaml"):
            assert archive.read(f"pl_privknn/{path.relative_to(ROOT)}") == path.read_bytes()


def test_every_place_states_the_same_version():
    def read(name):
        return (ROOT / name).read_text(encoding="utf-8")

    found = {
        "pyproject.toml": re.search(r'^version = "(.*)"', read("pyproject.toml"), re.MULTILINE)[1],
        "pl_privknn": pl_privknn.__version__,
        "CITATION.cff": yaml.safe_load(read("CITATION.cff"))["version"],
        "CHANGELOG.md": re.search(r"^## \[(\d.*)\]", read("CHANGELOG.md"), re.MULTILINE)[1],
    }
    assert set(found.values()) == {"0.2.0"}, found


def _tested(name):
    lines = (ROOT / "constraints" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return {found[0]: Version(found[1]) for line in lines if len(found := line.split("==")) == 2}


def test_lower_bounds_are_the_versions_that_make_test_oldest_takes_and_newest_ones_are_allowed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    untested = ("dev", "docs", "federated", "mutants")
    groups = [project["dependencies"], *(extras[name] for name in extras if name not in untested)]
    wanted = [Requirement(line) for group in groups for line in group if not line.startswith("pl-privknn[")]
    lowest = {
        one.name: Version(next(part.version for part in one.specifier if part.operator == ">="))
        for one in wanted
    }
    oldest, newest = _tested("oldest"), _tested("newest")
    assert lowest == {name: oldest[name] for name in lowest}
    assert [one.name for one in wanted if newest[one.name] not in one.specifier] == []


def test_the_table_of_supported_versions_is_that_of_the_constraints():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)`(?:, `([\w-]+)`)? \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    oldest, newest = _tested("oldest"), _tested("newest")
    stated = {name: found[2:] for found in rows for name in found[:2] if name}
    assert "torch" in stated
    assert stated == {name: (str(oldest[name]), str(newest[name])) for name in stated}


@pytest.mark.parametrize(
    ("package", "extra", "call"),
    [
        ("timm", "imagenet", TimmFeatures),
        ("timm", "imagenet", lambda: build_network("timm:resnet18", 10, 3, 32)),
        ("skimage", "papers", lambda: HOG(transform_sqrt=True)),
        ("torchvision", "papers", lambda: CIFAR10DataModule().setup()),
    ],
    ids=["features", "network", "HOG", "data"],
)
def test_what_needs_an_extra_names_it(package, extra, call, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"needs {package}; pip install 'pl-privknn\[{extra}\]'$"):
        call()


@pytest.mark.parametrize(
    ("logger", "extra"), [("WandbLogger", "wandb"), ("TensorBoardLogger", "tensorboard")]
)
def test_a_fit_with_a_logger_that_is_not_installed_ends_before_it_starts(
    logger, extra, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, extra, None)
    assert main(["fit", "--config", "configs/digits_private_knn.yaml", "--trainer.logger", logger]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith(f"trainer.logger {logger} needs {extra}; pip install 'pl-privknn[{extra}]'")
    assert list(tmp_path.rglob("*ledger*")) == []


def test_import_leaves_heavy_packages_alone():
    heavy = {"wandb", "timm", "faiss", "opacus", "matplotlib", "pyarrow", "skimage", "pytorch_lightning"}
    # What ``privknn epsilon`` needs is not among what imports torch either.
    code = (
        f"import sys, pl_privknn.privacy.verify; "
        f"print({heavy | {'torch'}} & set(sys.modules)); "
        f"from pl_privknn import PrivateKNN; print({heavy} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["set()", "set()"]


def test_public_names_exist():
    for name in pl_privknn.__all__:
        assert getattr(pl_privknn, name) is not None
    with pytest.raises(AttributeError):
        _ = pl_privknn.nothing


def test_guides_take_public_names_from_the_top():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs" / "guides").rglob("*.py")]
    imports = [line.strip() for page in pages for line in page.read_text(encoding="utf-8").splitlines()]
    found = [re.fullmatch(r"from pl_privknn\.([\w.]+) import ([\w, ]+)", line) for line in imports]
    longer = {name for match in found if match for name in match[2].split(", ")} & {*pl_privknn.__all__}
    assert not longer
    assert {"ClusterSelection", "TrainingOptions", "check_labeler"} < {*pl_privknn.__all__}


def test_a_name_means_one_thing_in_the_whole_package():
    """No class has the name of another one, and no public function that of another in the files of the package."""
    places = {}
    for folder in (ROOT / "pl_privknn", ROOT / "callbacks", ROOT / "datamodules"):
        for path in folder.rglob("*.py"):
            if not any(part.is_symlink() for part in (path, *path.parents)):
                for node in ast.parse(path.read_text(encoding="utf-8")).body:
                    public = isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
                    if public or isinstance(node, ast.ClassDef):
                        places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert len(places) > 500  # the folders were read
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}
