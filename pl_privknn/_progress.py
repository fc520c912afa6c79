"""Progress bars of work that takes longer than a moment."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from pl_privknn.privacy.redaction import terminal

#: Called on progress: name of the step, number of done parts, number of all parts. None for work on private
#: records, whose number is not shown: 0 parts are done when it begins and 1 when it has ended.
ProgressHook = Callable[[str, int, int | None], None]


@contextlib.contextmanager
def progress_bars(enabled: bool, before: str = "") -> Iterator[ProgressHook]:
    """Context that gives each step a progress bar; none unless ``enabled``, or inside a bar that allows no other.

    Work on private records pulses, without a count, a total or a time.

    Args:
        enabled: show them.
        before: text before the name of each step.
    """
    from rich.console import Console
    from rich.errors import LiveError
    from rich.progress import BarColumn, Progress, TaskID, TextColumn

    with contextlib.ExitStack() as stack:
        if enabled:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"))
            bars = Progress(*columns, console=Console(file=stack.enter_context(terminal())))
            try:
                stack.enter_context(bars)
            except LiveError:  # before rich 14.1 a bar inside another bar is refused
                enabled = False
        if not enabled:
            yield lambda what, done, total: None
            return
        tasks: dict[str, TaskID] = {}

        def update(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(before + what, total=None, count="")
            if total is not None:
                bars.update(tasks[what], completed=done, total=total, count=f"{done}/{total}")
            elif done:
                bars.update(tasks[what], completed=1, total=1)

        yield update
