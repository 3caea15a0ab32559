"""Model and tokenizer of a checkpoint, as an export or an evaluation needs them."""

from pathlib import Path
from typing import Any

from tokenizers.processors import Sequence, TemplateProcessing
from transformers import PreTrainedModel

from forgetting_transformer import plugins
from forgetting_transformer.model import registry
from forgetting_transformer.model_tokenizer import check_vocabulary, load_tokenizer, longcrawl64_tokenizer
from forgetting_transformer.tokenizer import JSONGPT2Tokenizer
from forgetting_transformer.training.checkpoint.folder import Checkpoint, CheckpointError
from forgetting_transformer.training.checkpoint.reading import load_weights
from forgetting_transformer.training.records.run_directory import RunDirectory


def load_checkpoint(checkpoint: Checkpoint) -> tuple[Checkpoint, dict[str, Any], PreTrainedModel]:
    """A checkpoint, its trainer.json and its model, on the CPU, in fp32 and evaluation mode; for `read_newest`."""
    state = checkpoint.trainer_state()
    model = build_model(checkpoint, state)
    load_weights(checkpoint, model)
    return checkpoint, state, model.eval()


def build_model(checkpoint: Checkpoint, state: dict[str, Any]) -> PreTrainedModel:
    """The model of a checkpoint without its weights."""
    if said := plugins.missing(state["config"].get("plugins"), f"{checkpoint.path}: this run"):
        raise CheckpointError(said)
    architecture = registry.get(state["config"]["model"]["name"])
    return architecture.lm_class(architecture.config_class.from_dict(state["model_config"]))


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
        begins = TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B:1", special_tokens=[(bos, bos_token_id)]
        )
        fast = tokenizer.backend_tokenizer
        adds_nothing = fast.post_processor is not None and own == bare  # it computes more, such as character offsets
        fast.post_processor = Sequence([fast.post_processor, begins]) if adds_nothing else begins
    tokenizer.save_pretrained(folder)
    if isinstance(tokenizer, JSONGPT2Tokenizer):
        # The authors' code reads these two, and not tokenizer.json.
        tokenizer.backend_tokenizer.model.save(str(folder))
