"""Words of ``fit``, ``validate``, ``test`` and ``predict`` that need no torch: their short help, and plain mistakes.

LightningCLI describes every option, which takes seconds. What stands here is the part that is asked for most;
``--help-all`` has the rest, and a test compares both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from pl_privknn.config import ConfigurationError, did_you_mean, read_document

#: The commands, each in one line.
COMMANDS = {
    "fit": "train a student on privately released labels, or a model by DP-SGD",
    "validate": "evaluate a checkpoint on public images",
    "test": "evaluate a checkpoint on the test set",
    "predict": "class probabilities for the test images",
}
#: First words of all options, and keys of a configuration.
SECTIONS = (
    "data", "model", "labeling", "trainer", "seed_everything", "run_dir", "attach_ledger", "ckpt_path",
    "weights_only", "verbose", "return_predictions",
)  # fmt: skip
_OTHERS = ("config", "resume", "help", "help-all", "print_config", "optimizer", "lr_scheduler")
_RECOMMENDED = ("epsilon", "private-records", "delta", "num-classes", "teacher")
_STARTS = ("config", "c", "resume", "data", "model", "print_config")


def short_help(command: str) -> str:
    """The options that matter most, on one screen."""
    text = Path(__file__).with_name("help.txt").read_text(encoding="utf-8")
    return text.format(command=command, purpose=COMMANDS[command])


def check_words(words: Sequence[str]) -> None:
    """Refuse what can be seen to be a mistake without knowing any class.

    Args:
        words: the command and its arguments.

    Raises:
        ConfigurationError: for an option or a section of a file that there is not, and where nothing is named to run.
        FileNotFoundError: for a file or folder that is not there.
    """
    command, given = words[0], list(words[1:])
    for word in given:
        first = word[2:].partition("=")[0].partition(".")[0].rstrip("+")
        if word.startswith("--") and first in _RECOMMENDED:
            raise ConfigurationError(
                f"--{first} belongs to privknn fit --data PATH --epsilon ε --private-records N; give these three, or "
                "--config FILE without it"
            )
        if word.startswith("--") and first not in (*SECTIONS, *_OTHERS):
            known = did_you_mean(first, (*SECTIONS, *_OTHERS), "options are")
            raise ConfigurationError(
                f"--{first}: there is no such option; {known}; see privknn {command} --help"
            )
    names = {word.lstrip("-").partition("=")[0].partition(".")[0] for word in given if word.startswith("-")}
    if not names & {*_STARTS}:
        resume = ", or --resume DIR" if command == "fit" else ""
        raise ConfigurationError(
            "nothing says what to run; give --config FILE, as in --config configs/digits_reverse_knn.yaml"
            f"{resume}; see privknn {command} --help"
        )
    for file in files_of(given):
        # jsonargparse reads configuration from the word itself too.
        if file.endswith((".yaml", ".yml", ".json")) and not Path(file).is_file():
            raise FileNotFoundError(
                f"--config {file}: there is no such file; the package's own are configs/NAME.yaml"
            )
        document = read_document(file) if Path(file).is_file() else {}
        for key in document if isinstance(document, dict) else ():
            if key not in SECTIONS:
                known = did_you_mean(str(key), SECTIONS, "sections are")
                raise ConfigurationError(f"--config {file}: {key}: there is no such section; {known}")
    for folder in values_of("resume", given):
        if not (Path(folder) / "config.yaml").is_file():
            raise FileNotFoundError(f"--resume {folder}: there is no config.yaml; give the folder of a run")


def files_of(words: Sequence[str]) -> list[str]:
    """The configurations that the words name."""
    return [file for option in ("config", "c") for file in values_of(option, words)]


def values_of(option: str, words: Sequence[str]) -> Iterator[str]:
    """Value that the words give for an option."""
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.lstrip("-") == option and name.startswith("-"):
            yield from [value] if equals else words[place + 1 : place + 2]
