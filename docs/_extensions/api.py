"""For the site: generates the API reference, its navigation and a table of subpackages from ``api.yaml``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from mkdocs.structure.files import File, Files

ROOMS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
INDEX = "reference/api/index.md"


def _pages(room: str) -> Iterator[tuple[str, str, str]]:
    """Yield path, title and Markdown of each page of a subpackage; the first page has its name."""
    for number, page in enumerate(ROOMS[room]["pages"]):
        modules = dict(page)
        title, text = modules.pop("title", f"pl_privknn.{room}"), modules.pop("text", "")
        name = re.sub(r"\W+", "_", f"{room} {title}".lower()) if number else room
        parts = [f"# {title}", text]
        for module, names in modules.items():
            parts += [f"::: pl_privknn.{module}"] if not names else []
            parts += [
                f"::: pl_privknn.{module}.{one}\n    options: {{show_root_heading: true}}" for one in names
            ]
        yield INDEX.replace("index", name), title, "\n\n".join(parts)


def on_config(config: Any) -> Any:
    """Add the pages to the navigation after the index of the reference."""
    (reference,) = [part for part in config.nav if "Reference" in part]
    for room in ROOMS:
        pages = [{title: place} if number else place for number, (place, title, _) in enumerate(_pages(room))]
        reference["Reference"][-1]["API"].append({room: pages if len(pages) > 1 else pages[0]})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages."""
    for room in ROOMS:
        for place, _, text in _pages(room):
            files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Add the table of subpackages to the index of the reference."""
    if page.file.src_uri != INDEX:
        return markdown
    rows = [f"| [{room}]({room}.md) | {ROOMS[room]['about']} |" for room in ROOMS]
    return "\n".join([markdown, "", "| subpackage | content |", "|---|---|", *rows])
