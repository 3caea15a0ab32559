"""Whether the Hugging Face Hub answers, found out once and at once."""

import functools
import logging
import socket
import urllib.request
from urllib.parse import urlsplit

log = logging.getLogger(__name__)

#: Seconds that the hub has for its answer.
TIMEOUT = 5


@functools.cache
def offline_if_unreachable() -> None:
    """Turns the offline mode of huggingface_hub on for this process if nothing answers at the hub's address.

    Offline, files in the local cache are found, and others are an error at once. Otherwise the client asks for each
    file six times with growing waits, which is a minute and 80 lines for a tokenizer.
    """
    from huggingface_hub import constants

    hub, proxies = urlsplit(constants.ENDPOINT), urllib.request.getproxies()
    # A proxy may get through where this process does not.
    if constants.HF_HUB_OFFLINE or hub.hostname is None or hub.scheme in proxies or "all" in proxies:
        return
    try:
        port = hub.port or (80 if hub.scheme == "http" else 443)
        socket.create_connection((hub.hostname, port), timeout=TIMEOUT).close()
    except OSError as error:
        log.warning(
            "%s cannot be reached (%s): only models and tokenizers in the local cache are found", hub.netloc, error
        )
        constants.HF_HUB_OFFLINE = True
