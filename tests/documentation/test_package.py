"""The wheel, the links, the rooms and the cost of an import."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

import pl_privknn

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
    endings = (".py", ".yaml", ".j2", ".css", ".js", ".txt")
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
    assert set(found.values()) == {"0.1.0"}, found


def test_import_leaves_heavy_packages_alone():
    heavy = {"wandb", "timm", "faiss", "opacus", "matplotlib", "skimage", "pytorch_lightning"}
    # What ``privknn epsilon`` needs is not among what imports torch either.
    code = (
        f"import sys, pl_privknn.privacy.verification; "
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
