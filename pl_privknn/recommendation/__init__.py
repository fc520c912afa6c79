"""Recommendation of a run, and of a comparison of methods, from public data, sizes and ε."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submod_attrs={"recommend": ["Recommendation", "recommend"]}
)
