"""Waiting in tests: for what is to happen, or for a limit that only a hang reaches."""

import time
from collections.abc import Callable

#: Seconds. However busy the machine is, nothing in this suite takes as long unless it hangs.
HANG = 1800.0


def wait_until(happened: Callable[[], object], alive: Callable[[], object] = lambda: True, said: object = "") -> None:
    """Returns when `happened()` is true. Fails when `alive()` is not, or after HANG seconds.

    Args:
        said: for the message; called if it can be.
    """
    deadline = time.monotonic() + HANG
    while not happened():
        # What it waits for may have been the last thing that was done.
        if not alive() and not happened():
            raise AssertionError(f"what should do it has ended: {said() if callable(said) else said}")
        assert time.monotonic() < deadline, f"it hangs: {said() if callable(said) else said}"
        time.sleep(0.01)
