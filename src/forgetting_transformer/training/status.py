"""`output_dir/status.json`: how the last start of a run ended, for schedulers and people.

running     it has begun; if its process is gone it was killed
done        trained to train.max_tokens
preempted   stopped by a signal, saved; the same command continues
failed      stopped by an error; the reason says what to do before the same command continues
"""

import json
import os
import socket
import time
from pathlib import Path

#: EX_TEMPFAIL of sysexits.h, "try again": what train.py exits with when it was preempted.
PREEMPTED_EXIT_CODE = 75


def write_status(root: Path, status: str, step: int, reason: str = "") -> None:
    """Replaces the file at once. `step` is training tokens done. Never raises: a run ends as it ends."""
    entry = {
        "status": status,
        "step": step,
        "reason": reason,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }
    temporary = root / f".status.json.{os.getpid()}"
    try:
        temporary.write_text(json.dumps(entry, indent=1) + "\n", encoding="utf-8")
        temporary.replace(root / "status.json")
    except OSError:
        temporary.unlink(missing_ok=True)
