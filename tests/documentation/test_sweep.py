"""What docs/guides/loggers.md shows can be run as it stands."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from wandb_files import finished_run

from pl_privknn.cli.main import main
from pl_privknn.comparison import read_comparison
from pl_privknn.config import get, read_document, read_yaml

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


SHORT = [
    "--trainer.logger.offline", "true", "--trainer.max_epochs", "2", "--trainer.limit_train_batches", "1",
    "--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false", "--labeling.epochs_per_round", "1",
    "--labeling.progress", "false",
]  # fmt: skip


@pytest.fixture
def agent(tmp_path, monkeypatch):
    """W&B's own agent, which is told of a run as its server would, and gives the command that it would start."""
    wandb_agent = pytest.importorskip("wandb.wandb_agent")
    taken = []

    class Started:
        def __init__(self, *, command, **_):
            taken.append(command)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(wandb_agent, "AgentProcess", Started)
    for name in ("WANDB_SWEEP_ID", "WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH"):
        monkeypatch.setenv(name, "try")
    sweep = read_document(GUIDES / "sweep.yaml")

    def start(run_id, values):
        own = SimpleNamespace(
            _in_jupyter=False,
            _sweep_command=list(sweep["command"]),
            _function=None,
            _forward_signals=False,
            _run_processes={},
        )
        said = {
            "run_id": run_id,
            "program": sweep["program"],
            "args": {p: {"value": v} for p, v in values.items()},
        }
        wandb_agent.Agent._command_run(own, said)
        return taken[-1]

    return start, sweep["parameters"]


def config_of(folder):
    """The config of the one offline run below a folder."""
    records = finished_run(folder)
    updates = [record.run.config.update for record in records if record.WhichOneof("record_type") == "run"]
    updates += [record.config.update for record in records if record.WhichOneof("record_type") == "config"]
    return {item.key: json.loads(item.value_json) for update in updates for item in update}


@pytest.mark.long
def test_runs_of_the_sweep_are_grouped_by_what_was_swept(agent):
    import wandb

    start, parameters = agent
    (sigma_path, sigmas), (k_path, ks) = parameters.items()
    for number, (sigma, k) in enumerate([(sigmas["values"][0], 60), (sigmas["values"][-1], 90)]):
        assert k in ks["values"]
        command, *words = start(f"run{number}", {sigma_path: sigma, k_path: k})
        assert command == "privknn"
        wandb.teardown()
        assert main([*words, *SHORT, "--run_dir", f"runs/{number}"]) == 0
        wandb.finish()
        config = config_of(f"runs/{number}")
        # By the keys of loggers.md, and by the sweep's own.
        assert config["noise"]["gaussian"]["sigma"] == config[sigma_path] == sigma
        assert config[k_path] == k
        summary = json.loads(Path(f"runs/{number}/summary.json").read_text(encoding="utf-8"))
        assert summary["labeler"] == config["labeler"] == "PrivateKNN"


def test_the_values_that_are_set_are_read():
    text = (GUIDES / "loggers.md").read_text(encoding="utf-8")
    ((name, words),) = re.findall(r"privknn compare (\S+) --set (.+)", text)
    overrides = dict(word.strip('"').partition("=")[::2] for word in re.findall(r'"[^"]+"|\S+', words))
    comparison = read_comparison(ROOT / name, {path: read_yaml(value) for path, value in overrides.items()})
    assert comparison.base["trainer"]["max_epochs"] == 4
    assert (comparison.epsilons, comparison.seeds) == ((0.5, 2.0), (0, 1, 2))
