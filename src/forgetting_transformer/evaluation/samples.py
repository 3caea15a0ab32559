"""The callback `samples`: what the model in training writes after a few prompts.

    python train.py … callbacks=[samples] "callbacks.samples.prompts=['Once upon a time', 'The capital of France is']"

Writes samples.jsonl: `samples/<n>/prompt` and `samples/<n>/text`, the continuation. Without prompts, held-out documents
are continued, and `samples/<n>/document` is how they go on.
"""

import itertools
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field

from forgetting_transformer import metric_names as names
from forgetting_transformer import plugins
from forgetting_transformer.evaluation.generation import continue_prompts
from forgetting_transformer.evaluation.in_training import (
    EvaluationCallback,
    beat,
    evaluated_model,
    held_out_rows,
    precision,
    share,
)
from forgetting_transformer.training.config import Count, Text, Tokens
from forgetting_transformer.training.interface import TrainerInterface

#: Held-out documents that are continued, and tokens of each that are given.
_DOCUMENTS, _GIVEN = 3, 32


@dataclass
class SamplesConfig:
    #: Training tokens between samples; the last ones follow config.final_eval.
    interval: Tokens
    #: Texts to continue; null: the beginnings of three held-out documents.
    prompts: Annotated[list[str], Field(min_length=1)] | None = None
    #: Tokens of a continuation; it ends at the end of a text before that.
    max_new_tokens: Count = 64
    #: 0: the likeliest token always. Above: logits are divided by it, and tokens drawn.
    temperature: Annotated[float, Field(ge=0, le=100)] = 0.0
    #: Seed of the samples, the same every time.
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    #: Folder or hub id; null: the corpus's.
    tokenizer: Text | None = None


@plugins.CALLBACKS.register("samples", config=SamplesConfig, free=[plugins.ALL])
class Samples(EvaluationCallback):
    """Rank 0 writes; with fsdp all ranks write the same."""

    kinds = (names.SAMPLES,)

    def prepare(self, trainer: TrainerInterface) -> None:
        self._model, self._shared = evaluated_model(trainer, "samples", self.config.tokenizer), share(trainer)
        #: For every text the tokens to continue, and those that follow in the document.
        self._texts: list[tuple[list[int], list[int]]] = []
        for prompt in self.config.prompts or ():
            self._texts.append((self._model.encode(prompt).tolist(), []))
        if not self._texts:
            for ids in itertools.islice(held_out_rows(trainer, self._model), _DOCUMENTS):
                document, given = ids.tolist(), min(_GIVEN, len(ids) // 2)
                self._texts.append((document[:given], document[given : given + self.config.max_new_tokens]))

    def evaluate(self, trainer: TrainerInterface) -> dict[str, Any]:
        torch.manual_seed(self.config.seed)  # the trainer puts back what was there
        # All ranks that hold a part of the model go on until each has come to its end.
        options: dict[str, Any] = {"synced_gpus": self._shared.world_size < trainer.fabric.world_size}
        if self.config.temperature > 0:
            options |= {"do_sample": True, "temperature": self.config.temperature, "top_k": 0}
        decode, values = self._model.require_tokenizer().decode, dict[str, Any]()
        for number, (prompt, document) in enumerate(self._texts):
            beat(trainer)
            if not self._shared.is_first:
                continue
            ids = np.array([[*self._model.first, *prompt]], dtype=np.int64)
            (text,) = continue_prompts(self._model, ids, self.config.max_new_tokens, precision(trainer), **options)
            written = {names.PROMPT: decode(prompt, skip_special_tokens=True), names.CONTINUATION: text}
            written |= {names.DOCUMENT: decode(document, skip_special_tokens=True)} if document else {}
            values |= {names.name_of(names.SAMPLES, str(number), name): each for name, each in written.items()}
        return values
