"""Files of a corpus are looked at before they are read: a pipe would never end, and neither would /dev/zero."""

import os
import stat

from forgetting_transformer.data.errors import DataError


def check_regular(path: str | os.PathLike[str], at_most: int) -> bool:
    """Whether there is a file at `path`.

    Raises:
        DataError: it is not a regular file, or has more than `at_most` bytes.
    """
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path} is not a regular file, but {_kind(status.st_mode)}; put the file there, or delete it")
    if status.st_size > at_most:
        raise DataError(
            f"{path} has {status.st_size:,} bytes, and it can have no more than {at_most:,}: "
            "it is not the file it should be"
        )
    return True


def _kind(mode: int) -> str:
    kinds = {stat.S_ISFIFO: "a pipe", stat.S_ISCHR: "a device", stat.S_ISBLK: "a device", stat.S_ISDIR: "a folder"}
    return next((kind for test, kind in kinds.items() if test(mode)), "a socket")
