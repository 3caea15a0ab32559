"""Errors that end training with one line: the reason and the fix."""

from forgetting_transformer.command_line import CommandError


class TrainingError(CommandError, RuntimeError):
    """Training cannot continue; the message has the reason and the state of the run."""


class DeviceError(TrainingError):
    """The GPU failed, and this process can do nothing with it any more. Another process may be able to."""
