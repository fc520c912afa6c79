"""What the words of a training command say before they are parsed: a run to resume, files, a topic of help."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pl_privknn.callbacks.checkpoints import CHECKPOINT, usable_checkpoint
from pl_privknn.callbacks.run_summary import left_out_of


def help_topic(words: Sequence[str]) -> tuple[list[str], str | None]:
    """The words without a topic of help, such as ``--help trainer``, and the topic."""
    kept = list(words)
    for option in ("--help", "-h"):
        if option in kept and kept[kept.index(option) + 1 :][:1] == ["trainer"]:
            return [word for word in kept if word != "trainer"], "trainer"
    return kept, None


def check_files(files: list[str]) -> None:
    """Refuse configurations that are not there.

    Raises:
        FileNotFoundError: naming the first of them.
    """
    for file in files:
        # jsonargparse reads configuration from the word itself too.
        if file.endswith((".yaml", ".yml", ".json")) and not Path(file).is_file():
            raise FileNotFoundError(
                f"--config {file}: there is no such file; the package's own are configs/NAME.yaml"
            )


def values_of(option: str, words: list[str]) -> list[str]:
    """What the command line gives for an option, for messages."""
    found = []
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.lstrip("-") == option:
            found += [value] if equals else words[place + 1 : place + 2]
    return found


def expand_resume(words: list[str]) -> list[str]:
    """The words with ``--resume DIR`` as the config, folder and last checkpoint of that run.

    Raises:
        FileNotFoundError: for a folder that holds no run.
    """
    if "--resume" not in words:
        return words
    place = words.index("--resume")
    if place + 1 >= len(words):
        raise FileNotFoundError("--resume needs the folder of the run to continue")
    folder = Path(words[place + 1])
    config = folder / "config.yaml"
    if not config.is_file():
        raise FileNotFoundError(f"--resume {folder}: there is no config.yaml; give the folder of a run")
    if (missing := left_out_of(config.read_text(encoding="utf-8"))) is not None:
        raise ValueError(
            f"--resume {folder}: this run was started in Python, and config.yaml can't say its {missing}; go on "
            "there, with trainer.fit(..., ckpt_path=...)"
        )
    resumed = [words[0], "--config", str(config), "--run_dir", str(folder)]
    if (checkpoint := usable_checkpoint(folder / CHECKPOINT)) is not None:
        resumed += ["--ckpt_path", str(checkpoint)]
    return resumed + words[1:place] + words[place + 2 :]
