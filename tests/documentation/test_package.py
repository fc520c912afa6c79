"""The wheel, the links, the rooms and the cost of an import."""

import ast
import importlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINKED = ("datamodules", "callbacks", "configs")


def test_links_are_relative_and_lead_to_the_top_level():
    for name in LINKED:
        link = ROOT / "pl_privknn" / name
        assert link.is_symlink()
        assert link.readlink() == Path("..") / name


def test_wheel_holds_one_package_with_real_files(tmp_path):
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(tmp_path),
        str(ROOT),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        top = next(name for name in names if name.endswith("top_level.txt"))
        assert archive.read(top).decode().split() == ["pl_privknn"]
        for path in (ROOT / "configs").rglob("*.yaml"):
            assert archive.read(f"pl_privknn/{path.relative_to(ROOT)}") == path.read_bytes()
    for name in (
        "datamodules/base.py",
        "callbacks/private_labeler.py",
        "py.typed",
        "cli/main.py",
        "datamodules/formats/idx.py",
    ):
        assert f"pl_privknn/{name}" in names


def _python_files():
    for folder in ("pl_privknn", "datamodules", "callbacks", "tests", "benchmarks", "docs"):
        for path in (ROOT / folder).rglob("*.py"):
            if not any(parent.is_symlink() for parent in path.parents):
                yield path


def test_nothing_imports_the_bare_top_level_names():
    for path in _python_files():
        for node in ast.walk(ast.parse(path.read_text())):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules = [node.module or ""]
            assert not {module.split(".")[0] for module in modules} & set(LINKED), path


def test_rooms_import_only_what_the_layout_allows():
    done = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "heavy", ["wandb", "timm", "faiss", "opacus", "matplotlib", "skimage", "pytorch_lightning"]
)
def test_import_leaves_heavy_packages_alone(heavy):
    code = f"import sys, pl_privknn; sys.exit({heavy!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_public_names_exist():
    import pl_privknn

    for name in pl_privknn.__all__:
        assert getattr(pl_privknn, name) is not None
    with pytest.raises(AttributeError):
        _ = pl_privknn.nothing


def test_no_file_names_a_place_of_one_machine():
    for path in _python_files():
        text = path.read_text()
        assert str(ROOT) not in text, path
        assert str(Path.home()) + "/" not in text, path


def test_modules_are_found_under_their_earlier_names():
    # Saved configurations hold such names, for instance of a class that no room exports.
    from pl_privknn._moved import MOVED

    for old, new in MOVED.items():
        earlier, now = (importlib.import_module(f"pl_privknn.{name}") for name in (old, new))
        assert earlier is now, old
    from pl_privknn.labelers.ind_knn_core import PublicDensity

    assert PublicDensity.__module__ == "pl_privknn.labelers.ind_knn.algorithm"
