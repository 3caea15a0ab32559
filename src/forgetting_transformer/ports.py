"""Ports over which the processes of a job find each other."""

import random
import socket

#: Below those that Linux gives to outgoing connections and to sockets that ask for any port (32768 on): one of those
#: may be given away between the moment it is chosen and the moment rank 0 listens on it. Above those that Lightning
#: derives from the number of a Slurm job (15000 to 24999).
RANGE = range(25000, 32768)


def is_free(port: int) -> bool:
    """Whether a server could listen on `port` of this machine now."""
    for family in (socket.AF_INET, *([socket.AF_INET6] if socket.has_dualstack_ipv6() else [])):
        with socket.socket(family) as probe:
            # As PyTorch's server does: connections that were closed a moment ago do not keep the port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
                probe.listen()
            except OSError:
                return False
    return True


def free_port() -> int:
    """
    Raises:
        OSError: no port of `RANGE` is free.
    """
    for port in random.SystemRandom().sample(RANGE, len(RANGE)):
        if is_free(port):
            return port
    raise OSError(f"no port from {RANGE.start} to {RANGE.stop - 1} is free on this machine")
