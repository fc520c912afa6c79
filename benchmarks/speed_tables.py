"""Tables of speed and memory: extractors, what is measured beside what could not be quicker, a labelling round."""

from __future__ import annotations

from typing import Any

from benchmarks.record import entries
from benchmarks.render import markdown


def extractors() -> str:
    """Accuracy and speed of features."""
    lines = [
        [
            name,
            one["width"],
            f"{one['linear']:.3f}",
            f"{one['neighbors']:.3f}",
            f"{one['seconds_to_learn']:.0f}",
            f"{one['images_per_second']:,}",
            f"{one['load']:.0f}",
        ]
        for name, one in ((name, entry["results"]) for name, entry in entries("extractors").items())
    ]
    header = [
        "features",
        "numbers",
        "linear model",
        "ten neighbours",
        "seconds to learn",
        "images a second",
        "load",
    ]
    return markdown(header, lines)


def speed() -> str:
    """What is measured beside what, where it is stored."""
    from benchmarks.speed import ROWS  # which imports Lightning

    found = {name: one["results"] for name, one in entries("speed").items()}
    lines = [
        [wanted.what, wanted.beside, wanted.aim, shown(found[name]), f"{found[name]['load']:.0f}"]
        for name, wanted in ROWS.items()
        if name in found
    ]
    return markdown(["what", "beside", "aim", "ratio of processor seconds", "load"], lines)


def memory() -> str:
    """What a labelling round takes of its own, and the table that it need not hold."""
    lines = [
        [
            f"`{name}`",
            f"{one['settings']['records']:,} x {one['settings']['dimensions']:,}",
            f"{one['results']['table_mb']:,} MB",
            one["settings"]["queries"],
            f"{one['results']['peak_mb_of_its_own']:,} MB",
        ]
        for name, one in entries("table_memory").items()
    ]
    return markdown(["teacher", "private features", "their table", "queries", "peak of its own"], lines)


def shown(found: dict[str, Any]) -> str:
    """A ratio with its range, and the seconds of a command."""
    spread = f" ({found['ratio_min']:.2f} to {found['ratio_max']:.2f})" if "ratio_min" in found else ""
    clock = f"; {found['ratio_on_the_clock']:.2f} on the clock" if "ratio_on_the_clock" in found else ""
    seconds = f"; {found['seconds']:.2f} s" if "seconds" in found else ""
    return f"{found['ratio']:.2f}{spread}{clock}{seconds}"
