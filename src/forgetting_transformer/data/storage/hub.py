"""Quick check that the Hugging Face Hub answers, with one line where it does not."""

import functools
import logging
import re
import socket
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from forgetting_transformer.command_line import one_line

log = logging.getLogger(__name__)

#: Seconds that the hub has for its answer.
TIMEOUT = 5


def only_cached() -> bool:
    """Returns True if the hub does not answer, so that only files in the local cache can be had.

    Pass it to `from_pretrained` and the like as `local_files_only`. Otherwise the client asks for each file six
    times with growing waits, which is a minute and 80 lines for a tokenizer. False also with HF_HUB_OFFLINE, which the
    client obeys, and with a proxy, which may reach the hub where this process does not.
    """
    from huggingface_hub import constants

    hub, proxies = urlsplit(constants.ENDPOINT), urllib.request.getproxies()
    if constants.HF_HUB_OFFLINE or hub.scheme in proxies or "all" in proxies:
        return False
    return not _answers(hub.hostname or constants.ENDPOINT, hub.port or (80 if hub.scheme == "http" else 443))


def use_cached_datasets() -> None:
    """Lets the datasets library look in its cache alone where `only_cached`, from now on in this process.

    It asks for each file as often, and has no argument that prevents it for the names of data sets.

    Raises:
        ImportError: the library is not installed.
    """
    import datasets

    if not datasets.config.HF_HUB_OFFLINE and only_cached():
        datasets.config.HF_HUB_OFFLINE = True


def model_folder(name: str, files: list[str] | None = None) -> Path:
    """The folder of the local cache with a model of the hub, which is downloaded if the hub answers.

    Args:
        files: patterns of the files that are needed; None for all.

    Raises:
        ValueError: it is not in the cache and cannot be downloaded; the message continues a list of what `name` is not.
    """
    from huggingface_hub import snapshot_download

    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) is None or name.startswith("."):
        raise ValueError("no model of the hub has such a name; give a folder, or OWNER/NAME")
    try:
        return Path(snapshot_download(name, allow_patterns=files, local_files_only=only_cached()))
    except Exception as error:  # of the client, or of the library that sends its requests
        raise ValueError(
            f"the hub's model of this name cannot be had ({one_line(error)}); without a network run "
            f"`hf download {name} --local-dir FOLDER` elsewhere and give that folder"
        ) from error


@functools.cache
def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=TIMEOUT).close()
    except (OSError, UnicodeError) as error:  # UnicodeError: the name cannot be that of a host
        log.warning("%s:%d cannot be reached (%s): only files in the local cache are used", host, port, error)
        return False
    return True
