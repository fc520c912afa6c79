"""Arguments of constructors that tests name without their groups."""

import dataclasses

from pl_privknn.config import argument_names
from pl_privknn.privacy import Budget

BUDGET = {field.name for field in dataclasses.fields(Budget)}


def grouped(owner, **arguments):
    """``arguments`` of a class, those of its groups as mappings in their places."""
    names = argument_names(owner)
    result = {name: value for name, value in arguments.items() if name in names}
    for name, value in arguments.items():
        if name not in names:
            place = next((place for place in names if place.endswith(f".{name}")), name)
            if place == name and name in BUDGET:
                place = f"budget.{name}"
            group, _, inner = place.partition(".")
            given = result.get(group, {})
            given = dataclasses.asdict(given) if dataclasses.is_dataclass(given) else given
            result[group] = {**given, inner: value} if inner else value
    return result
