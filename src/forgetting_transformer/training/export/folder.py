"""From a training checkpoint, of any strategy and at any step, to a Hugging Face folder.

The folder's mark, exported_from.json, names its checkpoint, and the files that the next export may replace.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import processors
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from forgetting_transformer import plugins
from forgetting_transformer.command_line import CommandError, one_line
from forgetting_transformer.console import how_to_install
from forgetting_transformer.data.model_tokenizer import check_vocabulary, load_tokenizer, longcrawl64_tokenizer
from forgetting_transformer.data.storage.checksums import sha256_of
from forgetting_transformer.data.storage.hub import model_folder
from forgetting_transformer.files import explain, write_atomically, write_json
from forgetting_transformer.model import registry
from forgetting_transformer.tokenizer import JSONGPT2Tokenizer
from forgetting_transformer.training.checkpoint.folder import Checkpoint, CheckpointError, read_newest
from forgetting_transformer.training.checkpoint.reading import load_weights
from forgetting_transformer.training.config.continuing import decisive
from forgetting_transformer.training.export import card, official_checkpoint
from forgetting_transformer.training.records.run_directory import RunDirectory

#: The mark, written into every export.
MARK = "exported_from.json"
_UNFINISHED = ".unfinished-export-"


class ExportError(CommandError, RuntimeError):
    """An export is not possible. The message has the reason and the fix."""


def export(
    run_folder: Path,
    save_folder: Path,
    step: int | None = None,
    tokenizer: str | None = None,
    replace: bool = False,
) -> str:
    """Writes `save_folder` and returns a summary of one line.

    A model card (README.md) is written too. One that no export wrote, or that was edited, is kept as it is.

    Args:
        run_folder: output_dir of a training run, of this project or of the authors' code; it may still be training.
        step: training tokens of the checkpoint; None for the newest valid one.
        tokenizer: folder or hub id; None for the run's own.
        replace: replace another run's export too.

    Raises:
        CheckpointError: no valid checkpoint (at that step).
        ExportError: the folder contains another model, another run's export or other files, or cannot be written, or
            the tokenizer cannot be used.
    """
    directory = RunDirectory(run_folder)
    if not directory.checkpoints.is_dir():
        said = "it holds no checkpoints" if directory.root.is_dir() else "there is no such folder"
        raise CheckpointError(f"--hf_load_dir={run_folder}: {said}; give the output_dir of a training run")
    if directory.is_official:
        checkpoint, state, model = official_checkpoint.load_model(directory, step)
    else:
        checkpoint, state, model = read_newest(directory.checkpoints, load_checkpoint, step)
    config = state["config"]
    length, bos = config["datamodule"]["train_batch_len"], model.config.bos_token_id
    found_tokenizer, without = _find_tokenizer(directory, state, tokenizer)
    if hasattr(model.config, "max_position_embeddings"):
        # No effect on the model; lm_eval and others read it as the context length of training.
        model.config.max_position_embeddings = length
    origin = _origin(checkpoint, state, model)
    try:
        save_folder.mkdir(parents=True, exist_ok=True)
        for left in save_folder.glob(f"{_UNFINISHED}*"):  # by an export that was killed
            shutil.rmtree(left)
        before, there = read_mark(save_folder), save_folder / card.CARD
        own = before.get("files", {})
        # Nothing is replaced before all of the new export is on the disk.
        with tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=save_folder) as staged:
            new = Path(staged)
            if found_tokenizer is not None:
                save_tokenizer(found_tokenizer, new, length, bos)
            pad = getattr(found_tokenizer, "pad_token_id", None)
            model.generation_config = GenerationConfig(
                bos_token_id=bos,
                eos_token_id=model.config.eos_token_id,  # without it generation runs to its length limit
                pad_token_id=model.config.eos_token_id if pad is None else pad,
            )
            model.save_pretrained(new)
            for file in new.glob("model*.safetensors"):  # safetensors makes them readable for their owner alone
                shutil.copymode(new / "config.json", file)
            if not (kept_card := there.exists() and own.get(card.CARD) != sha256_of(there)):
                write_atomically(new / card.CARD, _card(origin, config, model, found_tokenizer is not None))
            files = {f.relative_to(new).as_posix(): sha256_of(f) for f in new.rglob("*") if f.is_file()}
            _check_replaceable(save_folder, before, {*own, *files}, origin, replace)
            for name in own.keys() - files.keys() - {card.CARD}:
                (save_folder / name).unlink(missing_ok=True)
            for name in files:
                (save_folder / name).parent.mkdir(exist_ok=True)
                os.replace(new / name, save_folder / name)
        write_json(save_folder / MARK, origin | {"files": files})
    except (OSError, SafetensorError) as error:
        reason = explain(error) if isinstance(error, OSError) else one_line(error)
        raise ExportError(
            f"cannot write the export to {save_folder} ({reason}); make room, or choose another --hf_save_dir"
        ) from error
    line = f"checkpoint {checkpoint.path.name} of {run_folder} is now {save_folder}"
    if kept_card:
        line += f"; {card.CARD} there is not as an export wrote it and is kept"
    if needed := origin.get("plugins"):
        line += f"; loading it needs `import {', '.join(needed)}`, or --plugins {' '.join(needed)}"
    return line + without


def find_model(source: str, files: Sequence[str]) -> Path:
    """The folder of a model.

    Args:
        source: the folder, or a hub id. files: patterns of what is fetched from the hub.

    Raises:
        ExportError: there is no model, or it has other files.
    """
    folder = Path(source).expanduser()
    if not folder.exists():
        try:
            folder = model_folder(source, [*files])
        except ValueError as error:
            raise ExportError(f"{source} is no folder, and {error}") from error
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise ExportError(
            f"{source} has no config.json with *.safetensors, and nothing else is read; give a folder of "
            "save_model.py, which exports a run, or a hub id"
        )
    return folder


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Weights of a model's folder by name, of all its safetensors files, on the CPU."""
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
    return weights


def _origin(checkpoint: Checkpoint, state: dict[str, Any], model: PreTrainedModel) -> dict[str, Any]:
    """The fields of an export's mark that describe its weights."""
    config = state["config"]
    run = [decisive(config), state.get("data_fingerprint")]
    models = (plugins.MODELS.get(name).build for name in (config["model"]["name"], *model.config.mixer_architectures))
    is_ours = all(model.__module__.startswith("forgetting_transformer.") for model in models)
    return {
        "checkpoint": checkpoint.step,
        "tag": config.get("tag"),
        "seed": config.get("seed"),
        "run": hashlib.sha256(json.dumps(run, sort_keys=True, default=str).encode()).hexdigest()[:16],
        **({} if is_ours else {"plugins": config["plugins"]}),
    }


def _card(origin: dict[str, Any], config: dict[str, Any], model: PreTrainedModel, has_tokenizer: bool) -> str:
    about = (
        f"A language model with {model.num_parameters():,} parameters, trained on {origin['checkpoint']:,} tokens. "
        "It is a base model: it continues text and has not learnt to follow instructions."
    )
    title, dataset = config.get("tag") or config["model"]["name"], config["datamodule"]["dataset"]
    return card.text(title, about, has_tokenizer, dataset, origin.get("plugins", ()))


def _check_replaceable(
    folder: Path, before: dict[str, Any], files: set[str], origin: dict[str, Any], replace: bool
) -> None:
    """Refuses to overwrite, or to be mixed with, what is not an earlier export of the same run.

    Args:
        before: mark of the export there, empty without one.
        files: names of the files of that export and of the new one. A card is not overwritten.
        origin: fields of the new export's mark. replace: whether another run's export may be replaced.

    Raises:
        ExportError: a file there is not as an export wrote it, or the export there is another run's.
    """
    own = before.get("files", {})
    there = {file.name for file in folder.iterdir() if not file.name.startswith(_UNFINISHED)}
    for name in sorted((files if before else there) - {card.CARD}):
        file = folder / name
        # Training further saves under the same names.
        if file.exists() and (name not in own or sha256_of(file) != own[name]):
            raise ExportError(
                f"{file} is not from an export, or has changed since, and an export would overwrite it or be mixed "
                "with it; move it away, or choose another --hf_save_dir"
            )
    if before and before.get("run") != origin["run"] and not replace:
        raise ExportError(
            f"{folder} holds the export of another run ({before.get('tag')}, seed {before.get('seed')}, "
            f"{before['checkpoint']:,} tokens); choose another --hf_save_dir, or replace it with --replace"
        )


def read_mark(folder: Path) -> dict[str, Any]:
    """Mark of the last export; empty if no export wrote there."""
    try:
        found = json.loads((folder / MARK).read_text(encoding="utf-8"))
        return found if isinstance(found["checkpoint"], int) and isinstance(found["files"], dict) else {}
    except (OSError, ValueError, TypeError, LookupError):
        return {}


def origin_of(folder: Path) -> tuple[int | None, int | None]:
    """Tokens and seed of the training that an exported model comes from; None for what is not known.

    Weights that have changed since the export, as by fine-tuning, come from elsewhere.
    """
    mark = read_mark(folder)
    if not mark or any(mark["files"].get(file.name) != sha256_of(file) for file in folder.glob("*.safetensors")):
        return None, None
    return mark["checkpoint"], mark.get("seed")


def _find_tokenizer(directory: RunDirectory, state: dict[str, Any], source: str | None) -> tuple[Any, str]:
    """The tokenizer to export; None and the end of the line, where the run has none and none is named.

    Raises:
        ExportError: the one that is named, or the run's own, cannot be used.
    """
    fix = "name one with --tokenizer FOLDER_OR_HUB_ID"
    if state["config"]["datamodule"]["dataset"] == "longcrawl64":
        fix += "; a folder with GPT-2's vocab.json and merges.txt will do, or " + how_to_install("gpt2")
    try:
        return tokenizer_of_run(directory, state, source), ""
    except (OSError, ValueError) as error:
        if source is None and not directory.tokenizer.is_dir():
            return None, f", without a tokenizer ({one_line(error)}): {fix}"
        whose = "the run's tokenizer" if source is None else f"--tokenizer={source}"
        raise ExportError(f"nothing is written: {whose} cannot be used ({one_line(error)}); {fix}") from error


def load_checkpoint(checkpoint: Checkpoint) -> tuple[Checkpoint, dict[str, Any], PreTrainedModel]:
    """A checkpoint, its trainer.json and its model, on the CPU, in fp32 and evaluation mode; for `read_newest`."""
    state = checkpoint.trainer_state()
    if said := plugins.missing(state["config"].get("plugins"), f"{checkpoint.path}: this run"):
        raise CheckpointError(said)
    architecture = registry.get(state["config"]["model"]["name"])
    model = architecture.lm_class(architecture.config_class.from_dict(state["model_config"]))
    load_weights(checkpoint, model)
    return checkpoint, state, model.eval()


def tokenizer_of_run(directory: RunDirectory, state: dict[str, Any], source: str | None = None) -> Any:
    """The tokenizer a run's model was trained with, or the one named by `source`.

    Args:
        state: trainer.json of a checkpoint.
        source: folder or hub id; None for the run's own, or, on LongCrawl64, its tokenizer over GPT-2's vocabulary.

    Raises:
        OSError, ValueError: there is none, it cannot be read, or it has another vocabulary than the model.
    """
    if source is None and directory.tokenizer.is_dir():
        where, tokenizer = str(directory.tokenizer), load_tokenizer(directory.tokenizer)
    elif state["config"]["datamodule"]["dataset"] == "longcrawl64":
        where, tokenizer = source or "GPT-2's tokenizer", longcrawl64_tokenizer(source or "gpt2")
    elif source is None:
        raise OSError(f"{directory.root} holds no tokenizer")
    else:
        where, tokenizer = source, load_tokenizer(source)
    fields = state["model_config"]
    try:
        check_vocabulary(tokenizer, fields["vocab_size"], fields.get("bos_token_id"))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return tokenizer


def save_tokenizer(tokenizer: Any, folder: Path, length: int, bos_token_id: int | None) -> None:
    """Saves a tokenizer that makes prompts like training data: BOS first, no EOS behind, padding on the left.

    Corpora are written without BOS, which is put before every training sequence. An EOS behind a prompt would make a
    model begin another text. transformers' pipelines and lm_eval's own models do what the tokenizer does.

    Args:
        length: tokens of a training sequence.
    """
    tokenizer.model_max_length = length
    # transformers saves what a tokenizer was made with, and not what was set afterwards.
    tokenizer.padding_side = tokenizer.init_kwargs["padding_side"] = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.bos_token
    own, bare = tokenizer("").input_ids, tokenizer("", add_special_tokens=False).input_ids
    if bos_token_id is not None and own != [bos_token_id, *bare]:
        bos = tokenizer.bos_token = tokenizer.convert_ids_to_tokens(bos_token_id)
        begins = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B:1", special_tokens=[(bos, bos_token_id)]
        )
        fast = tokenizer.backend_tokenizer
        adds_nothing = fast.post_processor is not None and own == bare  # it computes more, such as character offsets
        fast.post_processor = processors.Sequence([fast.post_processor, begins]) if adds_nothing else begins
    tokenizer.save_pretrained(folder)
    if isinstance(tokenizer, JSONGPT2Tokenizer):
        # The authors' code reads these two, and not tokenizer.json.
        tokenizer.backend_tokenizer.model.save(str(folder))
