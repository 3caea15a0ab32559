"""The callback `samples`: what the model in training writes after a few prompts.

    python train.py … callbacks=[samples] "callbacks.samples.prompts=['Once upon a time', 'The capital of France is']"

Writes samples.jsonl: `samples/<n>/prompt` and `samples/<n>/text`, the continuation. Without prompts, held-out documents
are continued, and `samples/<n>/document` is how they go on.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forgetting_transformer import metric_names as names
from forgetting_transformer import plugins
from forgetting_transformer.ranges import COUNT, TOKENS, Range, within
from forgetting_transformer.training.callbacks import Callback, Interval
from forgetting_transformer.training.config import ConfigError

if TYPE_CHECKING:
    from forgetting_transformer.training.interface import TrainerInterface

log = logging.getLogger(__name__)

#: Held-out documents that are continued, and tokens of each that are given.
_DOCUMENTS, _GIVEN = 3, 32


@dataclass
class SamplesConfig:
    #: Training tokens between samples; the last ones follow config.final_eval.
    interval: int = within(TOKENS)
    #: Texts to continue; null: the beginnings of three held-out documents.
    prompts: list[str] | None = None
    #: Tokens of a continuation; it ends at the end of a text before that.
    max_new_tokens: int = within(COUNT, 64)
    #: 0: the likeliest token always. Above: logits are divided by it, and tokens drawn.
    temperature: float = within(Range(0, 100), 0.0)
    #: Of the drawing, the same every time.
    seed: int = within(Range(0, 2**63 - 1), 0)
    #: Folder or hub id; null: the corpus's.
    tokenizer: str | None = None

    def check(self) -> None:
        if self.prompts is not None and not self.prompts:
            raise ValueError(
                "callbacks.samples.prompts=[] is empty; give texts, or null for the beginnings of held-out documents"
            )


@plugins.CALLBACKS.register("samples", config=SamplesConfig, free=[plugins.ALL])
class Samples(Callback):
    """Rank 0 writes; with fsdp all ranks write the same, because a shard alone is no model."""

    all_ranks = True
    evaluates = True
    kinds = (names.SAMPLES,)

    def __init__(self, config: SamplesConfig) -> None:
        self.config, self.interval = config, config.interval

    def on_start(self, trainer: TrainerInterface) -> None:
        """
        Raises:
            ConfigError: there is no tokenizer. DataError: no prompt is given and nothing is held out.
        """
        from forgetting_transformer.evaluation import texts
        from forgetting_transformer.evaluation.in_training import evaluated_model, share
        from forgetting_transformer.evaluation.models import EvaluationError

        self._model = evaluated_model(trainer, "samples", self.config.tokenizer)
        self._shared = share(trainer)
        #: Of every text: the tokens to continue, and those that follow in the document.
        self._texts: list[tuple[list[int], list[int]]] = []
        try:
            for prompt in self.config.prompts or ():
                self._texts.append((texts.encode(self._model, prompt), []))
            for document in self._documents(trainer) if not self._texts else ():
                given = min(_GIVEN, len(document) // 2)
                self._texts.append((document[:given], document[given : given + self.config.max_new_tokens]))
        except EvaluationError as error:
            raise ConfigError(f"callbacks.samples: {error}") from error

    def on_interval(self, trainer: TrainerInterface, kind: Interval) -> None:
        if kind != "eval":
            return
        import torch

        from forgetting_transformer.evaluation.in_training import BrokenOff, beat

        trainer.model.eval()
        torch.manual_seed(self.config.seed)  # the trainer puts back what was there
        decode, values = self._model.require_tokenizer().decode, {}
        try:
            with trainer.uncompiled():
                for number, (prompt, document) in enumerate(self._texts):
                    beat(trainer)
                    if not self._shared.is_first:
                        continue
                    at = names.name_of(names.SAMPLES, str(number))
                    values[names.name_of(at, names.PROMPT)] = decode(prompt, skip_special_tokens=True)
                    values[names.name_of(at, names.CONTINUATION)] = self._continue(trainer, prompt)
                    if document:
                        values[names.name_of(at, names.DOCUMENT)] = decode(document, skip_special_tokens=True)
        except BrokenOff:
            return
        trainer.report(names.SAMPLES, values)

    def _continue(self, trainer: TrainerInterface, prompt: list[int]) -> str:
        import torch

        from forgetting_transformer.evaluation import texts
        from forgetting_transformer.evaluation.in_training import precision
        from forgetting_transformer.evaluation.models import precision_context

        model, drawn = self._model, self.config.temperature > 0
        sampling = {"temperature": self.config.temperature, "top_k": 0} if drawn else {}
        input_ids = torch.tensor([[*texts.begin(model), *prompt]], device=model.device)
        with precision_context(precision(trainer), model.device):
            output_ids = model.model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=self.config.max_new_tokens,
                pad_token_id=0,
                do_sample=drawn,
                # All ranks hold a part of the model, so that all go on until each has come to its end.
                synced_gpus=self._shared.world_size < trainer.fabric.world_size,
                **sampling,
            )
        return model.require_tokenizer().decode(output_ids[0, input_ids.shape[1] :], skip_special_tokens=True)

    def _documents(self, trainer: TrainerInterface) -> list[list[int]]:
        """The first held-out sequences as token ids."""
        from forgetting_transformer.evaluation import texts

        trainer.data.eval_info()
        found: list[list[int]] = []
        for batch in trainer.data.eval_loader(0, 1):  # alike on every rank
            for ids in batch["labels"][batch["weight"] > 0].numpy():
                ids = texts.without_bounds(self._model, ids)
                texts.check_ids(self._model, ids)
                found.append(ids.tolist())
            if len(found) >= _DOCUMENTS:
                break
        return found[:_DOCUMENTS]
