"""For the site: shows the gallery scripts as pages, with outputs and figures after ``make notebooks``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from mkdocs.structure.files import File, Files

FOLDER = "guides/gallery/"
EXECUTED = Path("build/notebooks")


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each script."""
    for file in [one for one in files if one.src_uri.startswith(FOLDER) and one.src_uri.endswith(".py")]:
        script = Path(file.abs_src_path)
        executed = EXECUTED / f"{script.stem}.ipynb"
        notebook = nbformat.read(executed, 4) if executed.is_file() else jupytext.read(script)
        text = "\n\n".join(_cell(cell) for cell in notebook.cells)
        files.append(File.generated(config, file.src_uri.replace(".py", ".md"), content=text))
    return files


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Replace links to gallery scripts by links to their pages."""
    return re.sub(r"(\]\([\w/.]*gallery/\w+)\.py\)", r"\1.md)", markdown)


def _cell(cell: Any) -> str:
    if cell.cell_type != "code":
        return str(cell.source)
    shown = [
        output for output in cell.get("outputs", []) if output.get("name") != "stderr"
    ]  # no tips of libraries
    return "\n\n".join([f"```python\n{cell.source}\n```", *map(_output, shown)])


def _output(output: Any) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        return f'<img alt="a plot" src="data:image/png;base64,{data["image/png"].strip()}">'
    text = output.text if output.output_type == "stream" else data.get("text/plain", "")
    return f"```text\n{text.rstrip()}\n```"
