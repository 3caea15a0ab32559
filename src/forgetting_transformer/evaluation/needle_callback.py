"""The callback `needle`: a small needle-in-a-haystack test of the model that is being trained.

    python train.py … callbacks=[needle] callbacks.needle.interval=1000000000

A sentence is hidden in held-out text and asked for (niah.py). Nothing is generated: one forward pass over prompt and
answer gives the loss of the answer, which moves long before a model can write it, and tells whether greedy decoding
would give it word for word. Writes needle.jsonl, for every length L and depth D:

    needle/length_<L>/loss              of the answer, nats per token, mean over depths and samples
    needle/length_<L>/loss_without      the same with no needle in the text: what the model guesses without looking
    needle/length_<L>/accuracy          share of prompts whose answer greedy decoding gives, token for token
    needle/length_<L>/tokens_right      share of the answer's tokens that are the likeliest ones
    needle/length_<L>/…_stderr          standard errors of these means over prompts
    needle/length_<L>/depth_<D>/…       loss, accuracy and tokens_right at one depth, in percent of the text
    needle/mode, depths, samples        the keys of the config; a line with others is a point of another curve

Axes: B prompts, T tokens of a prompt, K tokens of an answer, S = T + K - 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from forgetting_transformer import metric_names as names
from forgetting_transformer import plugins
from forgetting_transformer.evaluation import niah, texts
from forgetting_transformer.evaluation.in_training import (
    EvaluationCallback,
    beat,
    evaluated_model,
    precision,
    share,
)
from forgetting_transformer.evaluation.models import EvaluatedModel, EvaluationError, precision_context
from forgetting_transformer.training.config import ConfigError, Count, Text, Tokens
from forgetting_transformer.training.interface import TrainerInterface
from forgetting_transformer.training.records.metrics import prefixed

#: Scores of a prompt: of its answer the mean loss, the share of tokens that are right, and whether all are.
_SCORES = (names.ANSWER_LOSS, "tokens_right", names.ACCURACY)


@dataclass
class NeedleConfig:
    #: Training tokens between tests; the last one follows config.final_eval.
    interval: Tokens
    #: Tokens of a prompt with its answer; null: as in training, and half of that if there is room.
    lengths: Annotated[list[Count], Field(min_length=1)] | None = None
    #: Where the needle is, 0 (beginning of the text) to 1 (end).
    depths: Annotated[list[Annotated[float, Field(ge=0, le=1)]], Field(min_length=1)] = field(
        default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0]
    )
    #: Stretches of text for each length and depth.
    samples: Count = 4
    #: "easy" hides the question with its answer, "standard" the answer alone.
    mode: Literal["easy", "standard"] = "easy"
    #: What is hidden and asked; the question's answer begins with the statement.
    question: Text = "What is the best thing to do in San Francisco?"
    statement: Text = "The best thing to do in San Francisco is"
    answer: Text = "eat a sandwich and sit in Dolores Park on a sunny day"
    #: Folder of texts to hide it in; null: held-out documents of the corpus.
    haystack: str | None = None
    #: Prompts in one forward pass of one rank.
    batch_size: Count = 4
    #: Folder or hub id; null: the corpus's.
    tokenizer: str | None = None


@plugins.CALLBACKS.register("needle", config=NeedleConfig, free=[plugins.ALL])
class NeedleTest(EvaluationCallback):
    kinds = (names.NEEDLE,)

    def prepare(self, trainer: TrainerInterface) -> None:
        """Makes all prompts."""
        config, length = self.config, trainer.config.datamodule.train_batch_len
        self._model, self._workers = evaluated_model(trainer, "needle", config.tokenizer), share(trainer)
        needle = niah.Needle(config.question, config.statement, config.answer)
        self._answer_K = np.array(texts.encode(self._model, f" {needle.answer}"), dtype=np.int64)
        around = (needle.text(config.mode), needle.query)
        least = len(texts.begin(self._model)) + len(self._answer_K) + 1
        least += sum(len(texts.encode(self._model, text)) for text in around)
        half = [length // 2] if length // 2 >= least else []
        self._lengths = sorted({*(config.lengths or [*half, length])})
        self._depths = sorted({*config.depths})
        if self._lengths[0] < least:
            given = f"callbacks.needle.lengths={config.lengths or 'null'}"
            raise ConfigError(
                f"{given} has prompts of {self._lengths[0]} tokens, and needle, question and answer alone have "
                f"{least - 1}; give lengths of {least} or more"
            )
        haystack = self._haystack(trainer, config.samples * self._lengths[-1])
        #: Every prompt that is to be scored: its cell, whether there is a needle in it, and its tokens.
        self._prompts: list[tuple[niah.Cell, bool, np.ndarray]] = []
        for at in self._lengths:
            hidden = [(cell, True) for cell in niah.grid([at], self._depths, config.samples)]
            for cell, inside in [*hidden, *((cell, False) for cell in niah.grid([at], [0], config.samples))]:
                shorter = niah.Cell(at - len(self._answer_K), cell.depth, cell.sample)
                prompt = haystack.prompt(needle, config.mode if inside else None, shorter)
                self._prompts.append((cell, inside, prompt))

    def evaluate(self, trainer: TrainerInterface) -> dict[str, Any]:
        scores_N3 = torch.zeros(len(self._prompts), 3, dtype=torch.float64, device=trainer.fabric.device)
        for rows in self._batches():
            beat(trainer)
            if rows:
                prompts_BT = np.stack([self._prompts[n][2] for n in rows])
                losses_BK, right_BK = answer_losses(self._model, prompts_BT, self._answer_K, precision(trainer))
                shares = right_BK.double().mean(1), right_BK.all(1).double()
                scores_N3[rows] = torch.stack([losses_BK.mean(1), *shares], dim=1)
        if self._workers.world_size > 1:
            trainer.sum_over_ranks(scores_N3)
        depths = " ".join(f"{100 * depth:g}" for depth in self._depths)
        test = {names.MODE: self.config.mode, names.DEPTHS: depths, names.PROMPTS: self.config.samples}
        return self._values(scores_N3.cpu().numpy()) | prefixed(names.NEEDLE, test)

    def _haystack(self, trainer: TrainerInterface, needed: int) -> niah.Haystack:
        """At least `needed` tokens of text where there are as many."""
        if (folder := self.config.haystack) is not None:
            try:
                text = "\n\n".join(texts.read_folder(Path(folder).expanduser()))
            except EvaluationError as error:
                raise ConfigError(f"callbacks.needle.haystack={folder}: {error}") from error
            return niah.Haystack(self._model, np.array(texts.encode(self._model, text)))
        found: list[np.ndarray] = []
        for ids in texts.held_out_rows(trainer.data, self._model):
            found.append(ids)
            if sum(map(len, found)) >= needed:
                break
        return niah.Haystack(self._model, np.concatenate(found))

    def _batches(self) -> list[list[int]]:
        """The prompts of this rank, in batches of one length: of every rank as many batches, the last perhaps empty."""
        rank, world_size, size = self._workers.rank, self._workers.world_size, self.config.batch_size
        found = []
        for length in self._lengths:
            rows = [n for n, (cell, _, _) in enumerate(self._prompts) if cell.length == length]
            mine, most = rows[rank::world_size], -(-len(rows) // world_size)
            found += [mine[start : start + size] for start in range(0, most, size)]
        return found

    def _values(self, scores_N3: np.ndarray) -> dict[str, float]:
        """What needle.jsonl says; see the module docstring."""
        values: dict[str, float] = {}
        for length in self._lengths:

            def chosen(hidden: bool, *depths: float, length: int = length) -> np.ndarray:
                cells = [(cell.length, inside, cell.depth) for cell, inside, _ in self._prompts]
                return scores_N3[[(at, inside) == (length, hidden) and d in depths for at, inside, d in cells]]

            at = names.name_of(names.NEEDLE, f"{names.LENGTH}{length}")
            values |= _means(at, _SCORES, chosen(True, *self._depths))
            values |= _means(at, (names.LOSS_WITHOUT_NEEDLE,), chosen(False, 0))
            for depth in self._depths:
                means = zip(_SCORES, chosen(True, depth).mean(0).tolist(), strict=True)
                values |= {names.name_of(at, f"depth_{100 * depth:g}", name): value for name, value in means}
        return values


def answer_losses(
    model: EvaluatedModel, prompts_BT: np.ndarray, answer_K: np.ndarray, precision: str
) -> tuple[Tensor, Tensor]:
    """How surprised a model is by the answer after each prompt, in one forward pass.

    Args:
        answer_K: token ids `(K,)` that should follow every prompt.

    Returns:
        `(B, K)`: the loss of every token of the answer in nats, float64, and whether it is the likeliest one. Greedy
        decoding gives the answer where all are.
    """
    answers_BK = np.broadcast_to(answer_K, (len(prompts_BT), len(answer_K)))
    inputs_BS = np.concatenate([prompts_BT, answers_BK[:, :-1]], axis=1)
    target_BK = torch.from_numpy(answers_BK.copy()).to(model.device)
    with precision_context(precision, model.device):
        logits = model.model(
            input_ids=torch.from_numpy(inputs_BS).to(model.device), use_cache=False, logits_to_keep=len(answer_K)
        ).logits[:, -len(answer_K) :]
    losses_BK = F.cross_entropy(logits.double().transpose(1, 2), target_BK, reduction="none")
    return losses_BK, logits.argmax(-1) == target_BK


def _means(at: str, scores: Sequence[str], scores_N3: np.ndarray) -> dict[str, float]:
    """Means over prompts, with their standard errors where there are several."""
    found = {}
    for name, scores_N in zip(scores, scores_N3.T, strict=False):
        found[names.name_of(at, name)] = float(scores_N.mean())
        if scores_N.size > 1:
            error = scores_N.std(ddof=1) / np.sqrt(scores_N.size)
            found[names.name_of(at, f"{name}{names.STANDARD_ERROR}")] = float(error)
    return found
