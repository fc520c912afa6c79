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


def registry_entry(card: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of a run from its privacy card."""
    model = card["trust_model"].split(" ", 1)[0].capitalize()
    composition = card["composition"]
    mechanisms = "\n".join(
        f"- {m['mechanism']}, {m['count']} releases at most: {m['parameters']}" for m in card["mechanisms"]
    )
    guarantee = card["guarantee"] + (f": {card['reason']}" if card["reason"] else "")
    return {
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
