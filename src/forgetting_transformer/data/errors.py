"""The one exception of reading data."""

from forgetting_transformer.redaction import redact


class DataError(ValueError):
    """The data cannot be trained on; the message names the file or the key, and the fix. Passwords of URLs are left out."""

    def __init__(self, message: object = "") -> None:
        super().__init__(redact(str(message)))
