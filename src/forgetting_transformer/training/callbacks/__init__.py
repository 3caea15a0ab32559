"""Measurements and work during training, besides training itself: a small file each. base.py explains the hooks.

The trainer knows none of them by name. They are called in the order of built_in.py, then those of the config's
`callbacks`, in the order in which it names them. docs/extend.md adds one.
"""

from forgetting_transformer.training.callbacks.base import Callback, Callbacks, Interval, Step

__all__ = ["Callback", "Callbacks", "Interval", "Step"]
