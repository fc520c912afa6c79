"""Every Python block of README and the guides runs as written, page by page, each in a fresh folder."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Pages whose blocks run in an environment of their own: Flower pins older versions (tests/federated).
ELSEWHERE = {"docs/guides/federated.md"}
#: Pages whose blocks train for more than some seconds.
LONG = {"README.md", "docs/guides/after_the_fit.md", "docs/guides/private_training.md", "docs/guides/text.md"}
GUIDES = ("README.md", "docs/*.md", "docs/guides/*.md", "docs/methods/*.md")


def blocks_of(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)


PAGES = sorted(
    page
    for pattern in GUIDES
    for path in ROOT.glob(pattern)
    if blocks_of(page := path.relative_to(ROOT).as_posix()) and page not in ELSEWHERE
)


@pytest.mark.parametrize("page", [page for page in PAGES if page not in LONG])
def test_python_blocks_run_as_written(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    scope = {"__name__": "__main__"}
    for number, block in enumerate(blocks_of(page)):
        exec(compile(block, f"{page}, block {number}", "exec"), scope)
    check_prints(page, capsys.readouterr().out)


@pytest.mark.long
@pytest.mark.parametrize("page", sorted(LONG))
def test_python_blocks_that_train_run_as_written(page, tmp_path):
    if page == "docs/guides/text.md":
        pytest.importorskip("wordllama")
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks_of(page)), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, input="please pay\n", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    check_prints(page, done.stdout)


def check_prints(page, printed):
    """What a comment says that a line prints is printed."""
    code = "\n".join(blocks_of(page))
    for stated in re.findall(r"^ *print\(.*# ([\d.]+(?: [\d.]+)*)$", code, flags=re.MULTILINE):
        assert stated in printed.splitlines()
