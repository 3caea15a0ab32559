"""Runs the scripts under eval/ and scripts/ as a command line would; returns their exit status and output."""

import contextlib
import inspect
import io
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from forgetting_transformer.evaluation import generation
from tests.processes import Command, free_port, run_here, shell_environment

ROOT = Path(__file__).parents[2]


def run_script(
    script: str, *arguments: object, processes: int = 1, before: str = "pass"
) -> subprocess.CompletedProcess:
    """Runs `script` (relative to the repository) in this process, or in forked ones: both save seconds of imports.

    Args:
        before: Python that forked processes run first.
    """
    command = [str(ROOT / script), *map(str, arguments)]
    if processes == 1:
        return _run_here(command)
    common = {"WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "HF_HUB_OFFLINE": 1}
    with tempfile.TemporaryDirectory() as folder:
        said = [(Path(folder) / f"{rank}.out", Path(folder) / f"{rank}.err") for rank in range(processes)]
        program = f"import runpy, sys\nsys.argv = {command}\nrunpy.run_path(sys.argv[0], run_name='__main__')"
        ranks = []
        for rank, (out, err) in enumerate(said):
            places = {name: str(value) for name, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()}
            environment = shell_environment() | places
            ranks.append(Command("-c", f"{before}\n{program}", output=out, errors=err, environment=environment))
        codes = [rank.wait() for rank in ranks]
        out, err = ("".join(file.read_text() for file in files) for files in zip(*said, strict=True))
    return subprocess.CompletedProcess(command, next(filter(None, codes), 0), out, err)


def _run_here(command: list[str]) -> subprocess.CompletedProcess:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = run_here(*command)
    if isinstance(status, str):  # Python prints it
        err.write(status)
        status = 1
    return subprocess.CompletedProcess(command, status or 0, out.getvalue(), err.getvalue())


def index_few_tasks(patch: Callable[[Any, str, object], None] = setattr) -> None:
    """lm_eval indexes its own folders of the paper's tasks alone, and starts no pip to record what is installed.

    All of its 14,000 files take eight seconds.
    """
    from lm_eval.tasks import TaskManager, _index
    from torch.utils import collect_env

    own = Path(inspect.getfile(TaskManager)).parent
    names = ("arc", "hellaswag", "lambada", "openbookqa", "piqa", "sciq", "super_glue", "wikitext", "winogrande")
    files_of = _index.TaskIndex._iter_yaml_files

    def few(root: Path) -> Iterator[Path]:
        for folder in [own / name for name in names] if root == own else [root]:
            yield from files_of(folder)

    patch(_index.TaskIndex, "_iter_yaml_files", staticmethod(few))
    patch(collect_env, "get_pretty_env_info", lambda: "not looked at")


def short_answers(monkeypatch) -> list[int]:
    """Every answer has four tokens; the numbers of tokens that were asked for."""
    asked, whole = [], generation.continue_prompts

    def answer(model, prompts, max_new_tokens, *arguments, **options):
        asked.append(max_new_tokens)
        return whole(model, prompts, min(4, max_new_tokens), *arguments, **options)

    monkeypatch.setattr(generation, "continue_prompts", answer)
    return asked
