"""Callbacks that connect private teachers with ``trainer.fit``."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
