"""Models to evaluate: a training run's output_dir, an exported folder, or a model on the hub.

Weights are read from safetensors, or from a run's own checkpoints; files that would have to be unpickled are refused,
and no code that comes with a model is run.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

import contextlib
import hashlib
import logging
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import forgetting_transformer.tokenizer  # noqa: F401 (registers it for AutoTokenizer)
from forgetting_transformer import plugins
from forgetting_transformer.analysis import AnalysisError
from forgetting_transformer.command_line import one_line
from forgetting_transformer.data.model_tokenizer import check_vocabulary, encode, load_tokenizer
from forgetting_transformer.data.storage.hub import model_folder, only_cached
from forgetting_transformer.model import DecoderForCausalLM
from forgetting_transformer.ops.finite import NotFiniteError, check_finite
from forgetting_transformer.training import export
from forgetting_transformer.training.checkpoint.folder import CheckpointError, read_newest
from forgetting_transformer.training.execution.choice import choose_on_all_ranks
from forgetting_transformer.training.records.run_directory import RunDirectory

# transformers' table of missing and unused weights; `_check_weights` reports what matters of it.
logging.getLogger("transformers.modeling_utils").addFilter(lambda record: "LOAD REPORT" not in record.getMessage())

# transformers writes this for "no limit".
_NO_LIMIT = 10**9


class EvaluationError(AnalysisError):
    """An evaluation cannot continue; the message has the reason and the fix."""


def folder_name(option: str, name: str) -> str:
    """The argument, checked as the name of a folder of results.

    Raises:
        EvaluationError: it is a path.
    """
    if name in ("", ".", "..") or "/" in name or "\\" in name:
        raise EvaluationError(f"{option}={name!r} names a folder of results; it must not contain a path separator")
    return name


@dataclass(frozen=True)
class EvaluatedModel:
    """A model in evaluation mode, with facts about it.

    Attributes:
        model: a Hugging Face model, fp32 weights, on the device.
        tokenizer: None where there is none.
        name: its name in files and figures.
        source: folder or hub id.
        train_length: sequence length of its training in tokens, None if unknown.
        train_tokens: tokens it was trained on, None if unknown.
        no_tokenizer: why there is no tokenizer.
        seed: of its training, None if unknown.
    """

    model: Any
    tokenizer: Any
    name: str
    source: str
    train_length: int | None
    train_tokens: int | None
    no_tokenizer: str = ""
    seed: int | None = None

    @property
    def about(self) -> dict[str, Any]:
        """Entry of the model in an evaluation's results (analysis/evaluations.py)."""
        known = {"source": self.source, "train_length": self.train_length, "train_tokens": self.train_tokens}
        return known if self.seed is None else known | {"seed": self.seed}

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def bos_token_id(self) -> int | None:
        for owner in (self.model.config, self.tokenizer):
            token = getattr(owner, "bos_token_id", None)
            if token is not None:
                return int(token)
        return None

    @property
    def eos_token_ids(self) -> list[int]:
        """Tokens that end a text."""
        for owner in (self.model.generation_config, self.model.config):
            tokens = getattr(owner, "eos_token_id", None)
            if tokens is not None:
                return [tokens] if isinstance(tokens, int) else list(tokens)
        return []

    @property
    def first(self) -> np.ndarray:
        """The beginning-of-sequence token, with which every sequence of training began; nothing where there is none."""
        return np.array([] if self.bos_token_id is None else [self.bos_token_id], dtype=np.int64)

    def encode(self, text: str) -> np.ndarray:
        """Token ids `(T,)` of a text, int64: `model_tokenizer.encode`."""
        return np.array(encode(self.require_tokenizer(), text), dtype=np.int64)

    def require_tokenizer(self) -> Any:
        """The tokenizer, for an evaluation that reads text.

        Raises:
            EvaluationError: there is none.
        """
        if self.tokenizer is None:
            raise EvaluationError(
                f"{self.source} comes without a tokenizer and this evaluation reads text ({self.no_tokenizer}): name "
                "one with --tokenizer FOLDER_OR_HUB_ID, or export the run with `save_model.py --tokenizer …`"
            )
        return self.tokenizer


def load_model(
    source: str,
    *,
    name: str | None = None,
    step: int | None = None,
    tokenizer: str | None = None,
    device: torch.device | str = "cpu",
    precision: str = "auto",
) -> EvaluatedModel:
    """Loads a model by what `source` is: a run's output_dir, a folder in Hugging Face format, or a hub id.

    A folder that is both is the model in Hugging Face format, unless `step` chooses a checkpoint.

    Args:
        source: the folder or hub id.
        name: what to call it; default the last part of `source`.
        step: training tokens of a run's checkpoint; default the newest valid one.
        tokenizer: folder or hub id, for a model that comes without one.
        precision: of the evaluation, for which the kernels are tested here.

    Raises:
        EvaluationError: nothing there that can be loaded.
    """
    folder = Path(source).expanduser()
    name = folder_name("--model", name or (folder.resolve().name if folder.exists() else source.rsplit("/", 1)[-1]))
    exported, run = (folder / "config.json").is_file(), (folder / "checkpoints").is_dir()
    if run and (step is not None or not exported):
        loaded = _load_run(folder, step, tokenizer)
    elif step is not None:
        raise EvaluationError(f"--step={step} chooses a checkpoint of a training run, and {source} is not one")
    else:
        loaded = _load_pretrained(source, tokenizer)
    loaded.model.to(device).eval()
    if is_own(loaded.model):
        loaded.model.config.loss = "per_token"  # however it was trained: see `token_losses`
    _check_kernels(loaded.model, precision, torch.device(device))
    return replace(loaded, name=name, source=source)


def _check_kernels(model: nn.Module, precision: str, device: torch.device) -> None:
    """Tests the kernels that the model will use before anything relies on them; on a GPU, names them."""
    dtype = torch.bfloat16 if resolve(precision, device) == "bf16" else torch.float32
    chosen = choose_on_all_ranks(model, dtype, device, lengths=None)
    if device.type == "cuda" and not (dist.is_initialized() and dist.get_rank() > 0):
        for op, backend in chosen.items():
            print(f"{op}: {backend.text}", file=sys.stderr)


def pick_device(device: str | None = None) -> torch.device:
    """The chosen device, else the first GPU, else the CPU.

    Raises:
        EvaluationError: this machine has no such device.
    """
    gpus = torch.cuda.device_count()  # only counted, because workers may be forked later
    usable = ["cpu", *["mps"] * torch.backends.mps.is_available()]
    usable += ["cuda", *(f"cuda:{n}" for n in range(gpus))] if gpus else []
    if device and device not in usable:
        raise EvaluationError(f"--device={device}: no such device here; use {', '.join(usable)}")
    return torch.device(device or ("cuda" if gpus else "cpu"))


@contextlib.contextmanager
def precision_context(precision: str, device: torch.device) -> Iterator[None]:
    """Inference in the given precision: "bf16" is autocast over fp32 weights, as in training; "auto" is bf16 on CUDA
    and fp32 elsewhere."""
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=resolve(precision, device) == "bf16"):
        yield


def resolve(precision: str, device: torch.device) -> str:
    """The precision that "auto" stands for; others unchanged."""
    return ("bf16" if device.type == "cuda" else "fp32") if precision == "auto" else precision


def is_own(model: nn.Module) -> bool:
    """Whether this is one of this project's models."""
    return isinstance(model, DecoderForCausalLM)


def token_losses(model: PreTrainedModel, input_ids_BT: Tensor, labels_BT: Tensor) -> Tensor:
    """Loss of every token in nats `(B, T)`, float32: `labels[t]` is the token after `input_ids[t]`.

    This project's models never hold all logits; others do.
    """
    if is_own(model):
        return model(input_ids=input_ids_BT, labels=labels_BT).loss
    logits_BTV = model(input_ids=input_ids_BT, use_cache=False).logits
    losses = [
        F.cross_entropy(logits.float(), labels, reduction="none")
        for logits, labels in zip(logits_BTV, labels_BT, strict=True)
    ]
    return torch.stack(losses)


def fingerprint(model: nn.Module) -> str:
    """A short hash of the weights: equal for a run, its export and a copy of either."""
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(model.state_dict().items()):
        data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {zlib.crc32(data)};".encode())
    return digest.hexdigest()


def _load_run(folder: Path, step: int | None, tokenizer: str | None) -> EvaluatedModel:
    directory = RunDirectory(folder)
    if directory.is_official:
        raise EvaluationError(
            f"{folder} is a run of the authors' code: evaluate its export, python save_model.py --hf_load_dir={folder} "
            "--hf_save_dir=…"
        )
    try:
        with warnings.catch_warnings():
            # torch warns where a checkpoint is read on one process, which is intended.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            checkpoint, state, model = read_newest(directory.checkpoints, export.load_checkpoint, step)
    except CheckpointError as error:
        raise EvaluationError(str(error)) from error
    found, problem = _tokenizer(lambda: export.tokenizer_of_run(directory, state, tokenizer), tokenizer)
    config = state["config"]
    length = config["datamodule"]["train_batch_len"]
    return EvaluatedModel(model, found, "", "", length, checkpoint.step, problem, config.get("seed"))


def _tokenizer(load: Callable[[], Any], chosen: str | None) -> tuple[Any, str]:
    """The tokenizer, or None and why there is none.

    Raises:
        EvaluationError: it was chosen with --tokenizer, and there is none.
    """
    try:
        return load(), ""
    except (OSError, ValueError, KeyError) as error:
        if chosen is not None:
            raise EvaluationError(f"--tokenizer={chosen}: {one_line(error)}") from error
        return None, one_line(error)


def _load_pretrained(source: str, tokenizer: str | None) -> EvaluatedModel:
    folder = Path(source).expanduser()
    if missing := plugins.missing(export.read_mark(folder).get("plugins"), f"{folder}: this model"):
        raise EvaluationError(missing)
    cached = not Path(source).is_dir() and only_cached()
    try:
        # Not local_files_only, with which the client asks the hub for adapters all the same.
        place = model_folder(source) if cached else source
        # safetensors only: a pickle from the hub may run any code.
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            place,
            use_safetensors=True,
            trust_remote_code=False,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
        )
        model, loading = loaded
        if not is_own(model):  # which was looked at while it was loaded
            check_finite(model.named_parameters(), source)
    except SafetensorError as error:
        raise EvaluationError(
            f"the weights of {source} are damaged ({one_line(error)}); export or download the model again"
        ) from error
    except NotFiniteError as error:
        raise EvaluationError(str(error)) from error
    except (OSError, ValueError, RuntimeError) as error:
        advice = f"there is no folder {source} here; without a network run `hf download {source} --local-dir FOLDER` "
        advice += "elsewhere and give that folder"
        if Path(source).is_dir():
            advice = "if its export was interrupted, the same command of save_model.py makes it again"
        raise EvaluationError(
            f"cannot load the model {source}: {one_line(error)}. It must be a run with checkpoints, or a "
            f"folder or hub id with config.json and safetensors weights; {advice}"
        ) from error
    _check_weights(source, model, loading)
    config = model.config.get_text_config()

    def load() -> Any:
        found = load_tokenizer(tokenizer or source)
        check_vocabulary(found, config.vocab_size)
        return found

    found, problem = _tokenizer(load, tokenizer)
    length = getattr(found, "model_max_length", None)
    if length is None or length > _NO_LIMIT:
        length = getattr(config, "max_position_embeddings", None)
    tokens, seed = export.origin_of(folder)
    return EvaluatedModel(model, found, "", "", length, tokens, problem, seed)


def _check_weights(source: str, model: nn.Module, loading: dict[str, Any]) -> None:
    """Refuses a model with unread weights: transformers initialises these as for training.

    Args:
        loading: transformers' account of it; tied weights, which are stored once, do not count as missing.

    Raises:
        EvaluationError: naming a weight that is missing or has another shape, or one that this project's models do not
            have. Other models' files may contain more than is used, such as masks.
    """
    shapes = {
        name: f"{name} has the shape {tuple(stored)}, and the model {tuple(wanted)}"
        for name, stored, wanted in loading["mismatched_keys"]
    }
    unexpected = sorted(loading["unexpected_keys"])
    problems = [shapes[name] for name in sorted(shapes)]
    problems += [f"{name} is missing" for name in sorted({*loading["missing_keys"]} - shapes.keys())]
    if is_own(model):
        problems += [f"the model has no {name}" for name in unexpected]
    if problems:
        others = f", the file has {unexpected[0]}" if unexpected and unexpected[0] not in problems[0] else ""
        raise EvaluationError(
            f"the weights of {source} do not fit its config.json: {problems[0]}{others} ({len(problems)} such in all); "
            "save the model again with the configuration it was trained with, or download all of its files"
        )
