#!/usr/bin/env python
"""Serves an exported model to programs on this machine, with OpenAI's protocol, by transformers' own server.

    pip install -e ".[serve]"
    python scripts/serve.py output/hf/demo
    curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
        -d '{"model": "output/hf/demo", "prompt": "import os", "max_tokens": 32, "temperature": 0.8}'

This is `transformers serve` with this package's model classes, which `transformers serve` by itself does not know. It
answers on 127.0.0.1 only. Use /v1/completions: these are base models, and /v1/chat/completions needs a tokenizer with a
chat template (docs/use_a_model.md).
"""

import argparse
import importlib.util
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forgetting_transformer import command_line
from forgetting_transformer.command_line import port

_NEEDED = ("fastapi", "uvicorn", "openai")


def main() -> int:
    arguments = parse()
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        sys.exit(f"error: the server needs {', '.join(missing)}: pip install 'transformers[serving]'")

    import transformers
    from transformers.cli.serve import Serve
    from transformers.cli.serving import server as parts

    import forgetting_transformer.tokenizer  # noqa: F401  (registers LongCrawl64's tokenizer)
    from forgetting_transformer.evaluation.models import EvaluationError, pick_device
    from forgetting_transformer.model import registry

    for known in registry.MODELS.values():
        # The server looks classes up by name in transformers, not by Auto classes.
        setattr(transformers, known.lm_class.__name__, known.lm_class)
    parts.build_server = answering_as_openai(parts.build_server)
    try:
        device = str(pick_device(arguments.device))
        server = Serve(
            force_model=arguments.model,
            device=device,
            dtype=arguments.dtype,
            host="127.0.0.1",
            port=arguments.port,
            non_blocking=True,
        )
    except (EvaluationError, OSError, ValueError) as error:
        sys.exit(f"error: {arguments.model} cannot be served: {command_line.one_line(error)}")
    for loaded in server._model_manager.loaded_models.values():
        # As OpenAI's protocol has it: a temperature draws, 0 does not, and no top_k that nobody asked for.
        loaded.model.generation_config.update(do_sample=True, top_k=0)
        if not getattr(loaded.processor, "chat_template", None):
            refuse_chats(server.server.config.app)
            print("the tokenizer has no chat template: /v1/completions works, /v1/chat/completions does not")
    print(f"{arguments.model} at http://127.0.0.1:{arguments.port}/v1 on {device}; Ctrl-C ends", flush=True)
    # A handler and not KeyboardInterrupt: threads of the server would keep the process, which holds nothing to save.
    signal.signal(signal.SIGINT, lambda *_: os._exit(0))
    server._thread.join()
    return 0 if server.server.started else 1


def answering_as_openai(build: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the function that builds the server: errors, as that of another model, get the body of the protocol."""
    from starlette.exceptions import HTTPException

    async def answer(_: Any, error: HTTPException) -> Any:
        return refusal(str(error.detail), error.status_code)

    def build_server(*args: Any, **options: Any) -> Any:
        app = build(*args, **options)
        app.add_exception_handler(HTTPException, answer)
        return app

    return build_server


def refusal(message: str, status: int) -> Any:
    """An answer with the body that OpenAI's protocol has for errors."""
    from starlette.responses import JSONResponse

    return JSONResponse({"error": {"message": message, "type": "invalid_request_error"}}, status_code=status)


def refuse_chats(app: Any) -> None:
    """Answers requests for dialogues with the reason; the server itself would answer "Internal Server Error"."""
    from starlette.routing import Route

    reason = "the tokenizer of this model has no chat template, as those of base models: use /v1/completions"

    async def refuse(_: Any) -> Any:
        return refusal(reason, 400)

    paths = ("/v1/chat/completions", "/v1/responses")
    app.router.routes[:0] = [Route(path, refuse, methods=["POST"]) for path in paths]


def parse() -> argparse.Namespace:
    parser = command_line.make_parser(__doc__)
    parser.add_argument(
        "model", type=command_line.name, help="folder that save_model.py wrote, or the hub id of a released model"
    )
    parser.add_argument("--port", type=port, default=8000, help="default 8000")
    parser.add_argument("--device", help="default: cuda if available")
    parser.add_argument("--dtype", default="auto", help="of the weights, such as bfloat16; default: as they are stored")
    command_line.add_plugins(parser)
    arguments = parser.parse_args()
    folder = Path(arguments.model)
    if folder.is_dir() and not (folder / "config.json").is_file():
        parser.error(f"{folder} holds no config.json; export a run with save_model.py and serve that folder")
    if "@" in arguments.model or ":" in arguments.model:
        parser.error(f"{arguments.model}: the server reads @ and : as a revision and a file; rename the folder")
    if not folder.is_dir() and (folder.is_absolute() or arguments.model.count("/") > 1 or arguments.model[0] in ".~"):
        parser.error(f"there is no folder {folder}")
    return arguments


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(command_line.run(main))
