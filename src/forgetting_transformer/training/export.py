"""From a training checkpoint, of any strategy and at any step, to a Hugging Face folder."""

from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from forgetting_transformer.model import registry
from forgetting_transformer.training.checkpoint import (
    Checkpoint,
    CheckpointError,
    load_weights,
    read_newest,
    steps_in,
)
from forgetting_transformer.training.run_directory import RunDirectory


class ExportError(RuntimeError):
    """The export could not be completed; the message says what is missing and how to give it."""


def export(run_folder: Path, save_folder: Path, step: int | None = None, tokenizer: str | None = None) -> str:
    """Writes `save_folder` and returns a line that says what was written.

    Args:
        run_folder: output_dir of a training run; it may still be training.
        step: training tokens of the checkpoint; None for the newest valid one.
        tokenizer: folder or hub id; None for the run's own.

    Raises:
        CheckpointError: no valid checkpoint (at that step).
        ExportError: no tokenizer to be had. The model is written all the same.
    """
    directory = RunDirectory(run_folder)
    found = read_newest(directory.checkpoints, load_checkpoint, step)
    if found is None:
        wanted = "no valid checkpoint" if step is None else f"no valid checkpoint at step {step}"
        raise CheckpointError(
            f"{wanted} in {directory.checkpoints}; it holds {steps_in(directory.checkpoints) or 'nothing'}"
        )
    checkpoint, state, model = found
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,  # without it generation runs to its length limit
        pad_token_id=model.config.eos_token_id,
    )
    if hasattr(model.config, "max_position_embeddings"):
        # No effect on the model; lm_eval and others read it as the context length of training.
        model.config.max_position_embeddings = state["config"]["datamodule"]["train_batch_len"]
    model.save_pretrained(save_folder)
    _save_tokenizer(directory, save_folder, state["config"], tokenizer)
    return f"checkpoint {checkpoint.path.name} of {run_folder} is now {save_folder}"


def load_checkpoint(checkpoint: Checkpoint) -> tuple[Checkpoint, dict[str, Any], PreTrainedModel]:
    """A checkpoint, its trainer.json and its model; for `read_newest`."""
    state = checkpoint.trainer_state()
    return checkpoint, state, build_from_checkpoint(checkpoint, state)


def build_from_checkpoint(checkpoint: Checkpoint, state: dict[str, Any]) -> PreTrainedModel:
    """The model of a checkpoint on the CPU, in fp32 and evaluation mode."""
    architecture = registry.get(state["config"]["model"]["name"])
    model = architecture.lm_class(architecture.config_class.from_dict(state["model_config"]))
    load_weights(checkpoint, model)
    return model.eval()


def tokenizer_of_run(directory: RunDirectory, config: dict[str, Any], source: str | None = None) -> Any:
    """The tokenizer a run's model was trained with, or the one named by `source`.

    Args:
        config: the run's resolved configuration.
        source: folder or hub id; None for the run's own, or, on LongCrawl64, its tokenizer over GPT-2's vocabulary.

    Raises:
        OSError, ValueError: there is none, or it cannot be read.
    """
    from forgetting_transformer.tokenizer import JSONGPT2Tokenizer, load_tokenizer

    if source is None and directory.tokenizer.is_dir():
        return load_tokenizer(directory.tokenizer)
    if config["datamodule"]["dataset"] == "longcrawl64":
        return JSONGPT2Tokenizer.from_pretrained(source or "gpt2", add_bos_token=True, trust_remote_code=False)
    if source is None:
        raise OSError(f"{directory.root} holds no tokenizer")
    return load_tokenizer(source)


def _save_tokenizer(directory: RunDirectory, folder: Path, config: dict[str, Any], source: str | None) -> None:
    try:
        tokenizer = tokenizer_of_run(directory, config, source)
    except (OSError, ValueError) as error:
        raise ExportError(
            f"the model is in {folder}, but without a tokenizer ({str(error).splitlines()[0]}). Name one with "
            "--tokenizer FOLDER_OR_HUB_ID; for LongCrawl64 a folder with GPT-2's vocab.json and merges.txt will do"
        ) from error
    tokenizer.model_max_length = config["datamodule"]["train_batch_len"]
    tokenizer.save_pretrained(folder)
