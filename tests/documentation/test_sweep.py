"""What docs/guides/loggers.md shows can be run as it stands."""

from pathlib import Path

from pl_privknn.config import get, read_document

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
