"""What ends training with one line that says what to do."""


class TrainingError(RuntimeError):
    """Training cannot go on; the message says what happened and what still holds."""


class DeviceError(TrainingError):
    """The GPU failed, and this process can do nothing with it any more. Another process may be able to."""
