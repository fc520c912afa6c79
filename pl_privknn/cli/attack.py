"""``privknn audit --attack``."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add_attack(audit: argparse.ArgumentParser) -> None:
    """Add the options of the attack to ``privknn audit``."""
    group = audit.add_argument_group("attack")
    group.add_argument(
        "--attack",
        metavar="CONFIG",
        default=None,
        help="attack the labeler, or the private training, of a configuration on its own data, as suits it",
    )
    group.add_argument("--canaries", type=int, default=None, help="of a one-run attack, at least (3000)")
    group.add_argument(
        "--runs", type=int, default=None, help="on either side, of the other form (3000, or 300)"
    )


def run_attack(parsed: argparse.Namespace) -> int:
    """Attack a configuration; 1 where its guarantee is refuted."""
    if parsed.files or parsed.empirical or parsed.labeler is not None:
        raise ValueError(
            f"--attack {parsed.attack} takes a configuration alone; leave the ledger and --empirical out"
        )
    from pl_privknn.attacks.attack import CANARIES, attack_labeler, attack_training
    from pl_privknn.attacks.configuration import target_of_config
    from pl_privknn.attacks.training_configuration import training_of_config
    from pl_privknn.cli.training_words import importable
    from pl_privknn.comparison.trainings import is_training
    from pl_privknn.documents import read_configuration
    from pl_privknn.privacy.noise import SeededNoise

    document = read_configuration(parsed.attack)
    if not isinstance(document, dict):
        raise ValueError(f"{parsed.attack}: there is no labeling section, so there is nothing to attack")
    options: dict[str, Any] = {
        "canaries": CANARIES if parsed.canaries is None else parsed.canaries,
        "noise": None if parsed.seed is None else SeededNoise(parsed.seed),
    }
    with importable([parsed.attack]):
        if is_training(document):
            if parsed.runs is not None:
                raise ValueError(f"--runs {parsed.runs}: a training is attacked in one run; give --canaries")
            found = attack_training(training_of_config(document, parsed.attack), **options)
        else:
            target = target_of_config(document, parsed.attack)
            found = attack_labeler(target, runs=parsed.runs, **options)
    if parsed.json:
        print(json.dumps(found.to_dict(), ensure_ascii=False))
        return int(found.violated)
    told = {name: value for name, value in found.to_dict().items() if value is not None}
    width = max(map(len, told))
    for name, value in told.items():
        print(f"{name:{width}}  {value:.6g}" if isinstance(value, float) else f"{name:{width}}  {value}")
    if found.smallest_breach is None:
        print("nothing found says little: not even noise 16 times too small would surely have been noticed")
    elif not found.violated:
        print(
            f"nothing found: noise {found.smallest_breach:g} times too small would have been noticed in "
            f"{found.breach_power:.0%} of such attacks"
        )
    return int(found.violated)
