"""The one exception of reading data."""


class DataError(ValueError):
    """The data cannot be trained on; the message names the file or the key, and the fix."""
