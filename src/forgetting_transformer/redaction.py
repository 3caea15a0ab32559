"""Keeps passwords out of what is written and printed: config.yaml, checkpoints, logs, error messages, wandb.

A URL such as https://reader:PASSWORD@host/data?token=TOKEN is used as it is given and shown as
https://reader:***@host/data?token=***. Imports only the standard library.
"""

import logging
import re
from typing import Any, TextIO

REDACTED = "***"
# Up to the last @ before the path, since passwords hold @ too.
_USER = re.compile(r"(?<=://)[^/?#\s]*@")
_QUERY = re.compile(r"([?&][\w.-]*(?:token|sig|secret|password|passwd|credential|key|auth)[\w.-]*=)[^&#\s'\"]+", re.I)


def redact(text: str) -> str:
    """`text` without the secrets of its URLs: passwords, user names without one (often tokens), keys in queries."""
    if "://" not in text:
        return text
    return _QUERY.sub(rf"\g<1>{REDACTED}", _USER.sub(_without_password, text))


def _without_password(match: re.Match[str]) -> str:
    user, colon, _ = match[0][:-1].partition(":")
    return f"{user}:{REDACTED}@" if colon else f"{REDACTED}@"


def redact_tree(value: Any) -> Any:
    """The same for every string in nested dictionaries and lists, such as a configuration."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {key: redact_tree(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_tree(inner) for inner in value]
    return value


def is_redacted(url: str) -> bool:
    """Whether this is a record of a URL, without its password, rather than the URL."""
    return f"{REDACTED}@" in url or f"={REDACTED}" in url


class RedactingFormatter(logging.Formatter):
    """A formatter whose lines, tracebacks included, hold no password of a URL."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


class RedactingStream:
    """A stream, such as standard output, to which no password of a URL is written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(redact(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
