"""The one exception of reading data."""

from forgetting_transformer.command_line import CommandError
from forgetting_transformer.console import redact


class DataError(CommandError):
    """The data cannot be trained on. The message names the file or key and the fix, without passwords of URLs."""

    def __init__(self, message: object = "") -> None:
        super().__init__(redact(str(message)))
