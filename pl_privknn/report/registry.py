"""An entry for the Differential Privacy Deployments Registry (Nanayakkara, Ghazi, Vadhan 2025, arXiv:2509.13509).

The schema is that of the registry's data repository. What a run can't know, such as the curator or the region, is
left to be filled in, and the entry's status is Draft.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from typing import Any

#: What stands where a person has to write something.
TO_FILL = "To be filled in by the curator."

# Fields of each object, those that are required with a star; values that a field may take.
_FIELDS = {
    "": "url_slug* deployment*",
    "deployment": "basic* dp_variant privacy_loss deployment_model implementation administrative*",
    "deployment.basic": "name* data_curators* description* intended_use* data_product_type* data_product_region* "
    "publication_date* data_product_sector",
    "deployment.dp_variant": "variant_name data_domain unprotected_quantities",
    "deployment.privacy_loss": "privacy_unit privacy_unit_details number_of_privacy_units privacy_parameters "
    "privacy_parameters_details",
    "deployment.privacy_loss.privacy_parameters": "epsilon delta rho",
    "deployment.deployment_model": "model_name model_name_details trust_assumptions actors release_type "
    "release_type_details data_source_type data_source_type_details access_type access_type_details",
    "deployment.implementation": "preprocessing_and_hyperparameter_tuning mechanisms composition post_processing "
    "justification utility additional_information",
    "deployment.administrative": "evidence_sources* status* registry_authors* tier*",
}
_CHOICES = {
    "deployment.basic.data_product_type": (
        "Summary statistics",
        "Machine learning model",
        "Dataset",
        "Synthetic data",
    ),
    "deployment.dp_variant.variant_name": (
        "Pure DP",
        "Approximate DP",
        "Zero-concentrated DP",
        "Renyi DP",
        "Custom",
    ),
    "deployment.deployment_model.model_name": ("Local", "Central", "Shuffle", "Federated", "Varies"),
    "deployment.deployment_model.release_type": ("One release", "Many releases"),
    "deployment.deployment_model.data_source_type": ("Static", "Dynamic"),
    "deployment.deployment_model.access_type": ("Interactive", "Non-interactive"),
    "deployment.administrative.status": ("Draft", "Pending", "Changes Required", "Approved"),
    "deployment.administrative.tier": (1, 2, 3),
}
_NUMBERS = ("epsilon", "delta", "rho", "number_of_privacy_units", "tier")


def registry_entry(card: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of a run from its privacy card.

    Raises:
        ValueError: where the entry is none by the schema.

    Example:
        >>> from pl_privknn.report.registry import check_entry
        >>> check_entry({"url_slug": "a run"})
        Traceback (most recent call last):
        ...
        ValueError: the entry lacks deployment
    """
    model = card["trust_model"].split(" ", 1)[0].capitalize()
    composition = card["composition"]
    mechanisms = "\n".join(
        f"- {m['mechanism']}, {m['count']} releases at most: {m['parameters']}" for m in card["mechanisms"]
    )
    guarantee = card["guarantee"] + (f": {card['reason']}" if card["reason"] else "")
    entry = {
        "url_slug": re.sub(r"[^a-z0-9]+", "-", str(card["subject"]).lower()).strip("-") or "run",
        "deployment": {
            "basic": {
                "name": str(card["subject"]),
                "data_curators": [{"data_curator_name": TO_FILL, "data_curator_type": "Industry"}],
                "description": f"Released: {card['what_is_released']}.",
                "intended_use": TO_FILL,
                "data_product_type": "Machine learning model",
                "data_product_region": TO_FILL,
                "publication_date": datetime.date.today().isoformat(),
            },
            "dp_variant": {
                "variant_name": "Approximate DP",
                "data_domain": TO_FILL,
                "unprotected_quantities": "\n".join(f"- {text}" for text in card["known_exclusions"]),
            },
            "privacy_loss": {
                "privacy_unit": card["unit"],
                "privacy_unit_details": card["unit_of_privacy"],
                "privacy_parameters": {"epsilon": card["epsilon"], "delta": card["delta"]},
                "privacy_parameters_details": f"Guarantee: {guarantee}. Ledger head: {card['ledger_head']}.",
            },
            "deployment_model": {
                "model_name": model,
                "trust_assumptions": card["trust_model"],
                "actors": TO_FILL,
                "release_type": "One release" if composition["runs"] == 1 else "Many releases",
                "data_source_type": "Static",
                "access_type": "Non-interactive",
            },
            "implementation": {
                "preprocessing_and_hyperparameter_tuning": card["tuning"],
                "mechanisms": f"{mechanisms}\n- drawn and accounted by pl_privknn: {card['versions']}",
                "composition": f"{composition['how']}; {composition['rule']}",
                "post_processing": "Everything that is computed from what was released.",
                "justification": TO_FILL,
            },
            "administrative": {
                "evidence_sources": {
                    "privacy_card": {"evidence_source_type": "Privacy card, privacy_card.json"}
                },
                "status": "Draft",
                "registry_authors": [TO_FILL],
                "tier": 3,
            },
        },
    }
    check_entry(entry)
    return entry


def check_entry(entry: Mapping[str, Any], path: str = "") -> None:
    """Raise ``ValueError`` unless the entry follows the registry's schema."""
    fields = _FIELDS[path].split()
    for name in fields:
        if name.endswith("*") and name[:-1] not in entry:
            raise ValueError(f"the entry lacks {f'{path}.{name}'.strip('.*')}")
    for name, value in entry.items():
        place = f"{path}.{name}".lstrip(".")
        if not {name, f"{name}*"} & {*fields}:
            known = _FIELDS[path].replace("*", "")
            raise ValueError(f"{place} is no field of the registry; those are {known}")
        if place in _CHOICES and value not in _CHOICES[place]:
            raise ValueError(f"{place}={value!r} must be one of {', '.join(map(str, _CHOICES[place]))}")
        if place in _FIELDS:
            check_entry(value, place)
        elif name in _NUMBERS:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{place}={value!r} must be a number")
        elif name not in ("data_curators", "registry_authors", "evidence_sources") and not isinstance(
            value, str
        ):
            raise ValueError(f"{place}={value!r} must be text")
    if path == "deployment.basic":
        datetime.date.fromisoformat(entry["publication_date"])
