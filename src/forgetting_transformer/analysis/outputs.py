"""Files that commands write into a folder which may hold files of others.

A command replaces what it wrote before and nothing else. `.written.json` in the folder says which command wrote which
file, with a hash of it. A file that is not in that list, or was changed since, is somebody's work: it is left as it is,
and the command ends with one line.
"""

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from forgetting_transformer.analysis import AnalysisError
from forgetting_transformer.files import write_atomically, write_json

LIST = ".written.json"


def check(folder: Path, command: str, names: Iterable[str]) -> None:
    """Makes the folder; refuses it if a file that the command will write exists and is not the command's.

    Call it before long work.

    Args:
        command: name of the writer, in a word or two; the same at every start.
        names: of the files.

    Raises:
        AnalysisError: that, or the folder cannot be made.
    """
    with _one_line(folder):
        folder.mkdir(parents=True, exist_ok=True)
        written = _read_list(folder)
        for path in (folder / name for name in names):
            own = written.get(path.name, {}).get("command") == command and path.is_file()
            if path.exists() and not (own and _hash(path.read_bytes()) in written[path.name]["sha256"]):
                raise AnalysisError(
                    f"{path} is not as {command} has written it: move it away, or choose another folder for the results"
                )


@contextlib.contextmanager
def writing(folder: Path, command: str) -> Iterator[Path]:
    """A folder to write into; at the end of the block its files replace those in `folder`, all of them or none.

    Args:
        command: as for `check`.

    Raises:
        AnalysisError: a file that would be replaced is not the command's, or the folder cannot be written to.
    """
    with tempfile.TemporaryDirectory() as temporary:
        yield Path(temporary)
        new = {path.name: path.read_bytes() for path in sorted(Path(temporary).iterdir())}
    check(folder, command, new)
    with _one_line(folder):
        written = _read_list(folder)
        for name, content in new.items():
            # In the list before it is there: a process that is killed in between still knows what it has left.
            now = [_hash((folder / name).read_bytes())] if (folder / name).exists() else []
            written[name] = {"command": command, "sha256": list(dict.fromkeys([*now, _hash(content)]))}
        write_json(folder / LIST, written, durable=False)
        for name, content in new.items():
            write_atomically(folder / name, content, durable=False)


@contextlib.contextmanager
def _one_line(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise AnalysisError(f"cannot write to {folder} ({error.strerror or error}); name another folder") from error


def _read_list(folder: Path) -> dict[str, dict[str, Any]]:
    """File name -> the `command` that wrote it, and `sha256` of what it wrote and of what that replaced."""
    try:
        content = json.loads((folder / LIST).read_text(encoding="utf-8"))
        return {str(name): {"command": one["command"], "sha256": list(one["sha256"])} for name, one in content.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise AnalysisError(f"{folder / LIST} is damaged; delete it, and move away the files to be kept") from error


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
