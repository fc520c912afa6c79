"""Released models: export as one file with a privacy card, and predictions of a run or an exported file."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "prediction": ["Predictions", "open_model", "predict"],
        "released_model": ["ReleasedModel", "export_run", "released_model"],
    },
)
