"""What docs/guides/loggers.md shows can be run as it stands."""

import re
from pathlib import Path

from pl_privknn.comparison import read_comparison
from pl_privknn.documents import read_document, read_yaml
from pl_privknn.nested_settings import get

ROOT = Path(__file__).resolve().parents[2]
GUIDES = ROOT / "docs" / "guides"


def test_the_sweep_names_settings_that_its_configuration_has():
    sweep = read_document(GUIDES / "sweep.yaml")
    config = read_document(ROOT / sweep["command"][3])
    assert sweep["command"][-1] == "${args}"
    for path, values in sweep["parameters"].items():
        kinds = {type(value) for value in values["values"]} | {type(get(config, path))}
        assert kinds <= {int, float}
    assert len(sweep["parameters"]) == 2


def test_the_values_that_are_set_are_read():
    text = (GUIDES / "loggers.md").read_text(encoding="utf-8")
    ((name, words),) = re.findall(r"privknn compare (\S+) --set (.+)", text)
    overrides = dict(word.strip('"').partition("=")[::2] for word in re.findall(r'"[^"]+"|\S+', words))
    comparison = read_comparison(ROOT / name, {path: read_yaml(value) for path, value in overrides.items()})
    assert comparison.base["trainer"]["max_epochs"] == 4
    assert (comparison.epsilons, comparison.seeds) == ((0.5, 2.0), (0, 1, 2))
