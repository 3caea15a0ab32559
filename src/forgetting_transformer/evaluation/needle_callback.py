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
    needle/length_<L>/texts             fingerprint of all prompts and the answer
    needle/mode, depths, samples        the keys of the config; a line with others is a point of another curve
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forgetting_transformer import metric_names as names
from forgetting_transformer import plugins
from forgetting_transformer.ranges import COUNT, TOKENS, one_of, within
from forgetting_transformer.training.callbacks import Callback, Interval
from forgetting_transformer.training.config import ConfigError
from forgetting_transformer.training.metrics import duration, prefixed

if TYPE_CHECKING:
    from forgetting_transformer.evaluation.niah import Haystack
    from forgetting_transformer.training.interface import TrainerInterface

log = logging.getLogger(__name__)

#: Of every prompt with a needle, in the order of the columns of the results.
_SCORES = (names.ANSWER_LOSS, "tokens_right", names.ACCURACY)


@dataclass
class NeedleConfig:
    #: Training tokens between tests; the last one follows config.final_eval.
    interval: int = within(TOKENS)
    #: Tokens of a prompt with its answer; null: as in training, and half of that if there is room.
    lengths: list[int] | None = None
    #: Where the needle is, 0 (beginning of the text) to 1 (end).
    depths: list[float] = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])
    #: Stretches of text for each length and depth.
    samples: int = within(COUNT, 4)
    #: "easy" hides the question with its answer, "standard" the answer alone.
    mode: str = one_of("easy", "standard")
    #: What is hidden and asked; the question's answer begins with the statement.
    question: str = "What is the best thing to do in San Francisco?"
    statement: str = "The best thing to do in San Francisco is"
    answer: str = "eat a sandwich and sit in Dolores Park on a sunny day"
    #: Folder of texts to hide it in; null: held-out documents of the corpus.
    haystack: str | None = None
    #: Prompts in one forward pass of one rank.
    batch_size: int = within(COUNT, 4)
    #: Folder or hub id; null: the corpus's.
    tokenizer: str | None = None

    def check(self) -> None:
        if self.lengths is not None and (not self.lengths or min(self.lengths) < 1):
            raise ValueError(
                f"callbacks.needle.lengths={self.lengths} must be numbers of tokens, as in [512,1024], or null"
            )
        if not self.depths or not all(0 <= depth <= 1 for depth in self.depths):
            raise ValueError(f"callbacks.needle.depths={self.depths} must be from 0 to 1, as in [0,0.5,1]")
        for key in ("question", "statement", "answer"):
            if not getattr(self, key).strip():
                raise ValueError(f"callbacks.needle.{key} is empty; give a text, or leave the key out")


@plugins.CALLBACKS.register("needle", config=NeedleConfig, free=[plugins.ALL])
class NeedleTest(Callback):
    """With ddp ranks share the prompts. With fsdp every rank answers all of them: a shard alone is no model."""

    all_ranks = True
    evaluates = True
    kinds = (names.NEEDLE,)

    def __init__(self, config: NeedleConfig) -> None:
        self.config, self.interval = config, config.interval

    def on_start(self, trainer: TrainerInterface) -> None:
        """Makes all prompts.

        Raises:
            ConfigError: there is no tokenizer or text, or a length has no room. DataError: nothing is held out.
        """
        from forgetting_transformer.evaluation import niah, texts
        from forgetting_transformer.evaluation.in_training import evaluated_model, share, warn_of_another_test
        from forgetting_transformer.evaluation.models import EvaluationError

        config, length = self.config, trainer.config.datamodule.train_batch_len
        self._model, self._workers = evaluated_model(trainer, "needle", config.tokenizer), share(trainer)
        needle = niah.Needle(config.question, config.statement, config.answer)
        self._answer = np.array(texts.encode(self._model, f" {needle.answer}"), dtype=np.int64)
        known = (*texts.begin(self._model), *self._answer)
        known_texts = (needle.text(config.mode), needle.query)
        least = len(known) + sum(len(texts.encode(self._model, text)) for text in known_texts) + 1
        half = [length // 2] if length // 2 >= least else []
        lengths = sorted({*(config.lengths or [*half, length])})
        if lengths[0] < least and config.lengths is None:
            raise ConfigError(
                f"callbacks.needle.lengths=null takes the {length} tokens of datamodule.train_batch_len, and needle, "
                f"question and answer alone have {least - 1}; train on longer sequences, or give a shorter "
                "callbacks.needle.question, statement and answer"
            )
        if lengths[0] < least:
            raise ConfigError(
                f"callbacks.needle.lengths={lengths}: needle, question and answer alone have {least - 1} tokens; give "
                f"lengths of {least} or more"
            )
        try:
            hay = self._haystack(trainer, config.samples * lengths[-1])
        except EvaluationError as error:
            raise ConfigError(f"callbacks.needle.haystack={config.haystack}: {error}") from error
        #: Every prompt that is to be scored: its cell, whether there is a needle in it, and its tokens.
        self._prompts: list[tuple[niah.Cell, bool, np.ndarray]] = []
        for at in lengths:
            hidden = [(cell, True) for cell in niah.grid([at], sorted({*config.depths}), config.samples)]
            for cell, inside in [*hidden, *((cell, False) for cell in niah.grid([at], [0], config.samples))]:
                shorter = niah.Cell(at - len(self._answer), cell.depth, cell.sample)
                mode = config.mode if inside else None
                self._prompts.append((cell, inside, niah.build_prompt(self._model, hay, needle, mode, shorter)))
        self._test = self._describe(lengths)
        warn_of_another_test(trainer, names.NEEDLE, self._test)

    def on_interval(self, trainer: TrainerInterface, kind: Interval) -> None:
        if kind != "eval":
            return
        import torch

        from forgetting_transformer.evaluation import niah
        from forgetting_transformer.evaluation.in_training import BrokenOff, beat, precision

        trainer.model.eval()
        started, tokens = time.perf_counter(), f"{trainer.counters.token_count:,}"
        # Of every prompt: loss of the answer, share of its tokens that are right, whether all are.
        scores_N3 = torch.zeros(len(self._prompts), 3, dtype=torch.float64, device=trainer.fabric.device)
        try:
            with trainer.uncompiled():
                for rows in self._batches():
                    beat(trainer)
                    if not rows:
                        continue
                    prompts = np.stack([self._prompts[n][2] for n in rows])
                    losses_BK, right_BK = niah.answer_losses(self._model, prompts, self._answer, precision(trainer))
                    shares = right_BK.double().mean(1), right_BK.all(1).double()
                    scores_N3[rows] = torch.stack([losses_BK.mean(1), *shares], dim=1)
        except BrokenOff:
            log.info("the needle test after %s tokens was broken off", tokens)
            return
        if self._workers.world_size > 1:
            trainer.sum_over_ranks(scores_N3)
        values = self._values(scores_N3.cpu().numpy())
        trainer.report(names.NEEDLE, values | self._test)
        longest = _at(self._prompts[-1][0].length)
        log.info(
            "needle test after %s tokens: loss of the answer %.3f, %.3f without a needle, accuracy %.0f %% at %s "
            "tokens; took %s",
            tokens,
            values[names.name_of(longest, names.ANSWER_LOSS)],
            values[names.name_of(longest, names.LOSS_WITHOUT_NEEDLE)],
            100 * values[names.name_of(longest, names.ACCURACY)],
            f"{self._prompts[-1][0].length:,}",
            duration(time.perf_counter() - started),
        )

    def _haystack(self, trainer: TrainerInterface, needed: int) -> Haystack:
        """At least `needed` tokens of text where there are as many."""
        from forgetting_transformer.evaluation import niah, texts

        if self.config.haystack is not None:
            return niah.Haystack.from_folder(self._model, Path(self.config.haystack).expanduser())
        trainer.data.eval_info()
        found, count = [], 0
        for batch in trainer.data.eval_loader(0, 1):  # alike on every rank
            ids = batch["labels"][batch["weight"] > 0].flatten().numpy()
            found.append(texts.without_bounds(self._model, ids))
            count += found[-1].size
            if count >= needed:
                break
        ids = np.concatenate(found)
        texts.check_ids(self._model, ids)
        return niah.Haystack.from_tokens(self._model, ids)

    def _describe(self, lengths: Sequence[int]) -> dict[str, Any]:
        """What every line says of the test, since a later start may change it."""
        from forgetting_transformer.evaluation.in_training import fingerprint

        depths = " ".join(f"{100 * depth:g}" for depth in sorted({*self.config.depths}))
        said: dict[str, Any] = {names.MODE: self.config.mode, names.DEPTHS: depths, names.PROMPTS: self.config.samples}
        said = prefixed(names.NEEDLE, said)
        for length in lengths:
            prompts = [prompt for cell, _, prompt in self._prompts if cell.length == length]
            said[names.name_of(_at(length), names.TEXTS)] = fingerprint(*prompts, self._answer)
        return said

    def _batches(self) -> list[list[int]]:
        """The prompts of this rank, in batches of one length: of every rank as many batches, the last perhaps empty."""
        rank, world_size, size = self._workers.rank, self._workers.world_size, self.config.batch_size
        of_length: dict[int, list[int]] = {}
        for n, (cell, _, _) in enumerate(self._prompts):
            of_length.setdefault(cell.length, []).append(n)
        found = []
        for rows in of_length.values():
            mine = rows[rank::world_size]
            most = -(-len(rows) // world_size)
            found += [mine[start : start + size] for start in range(0, most, size)]
        return found

    def _values(self, scores_N3: np.ndarray) -> dict[str, float]:
        """What needle.jsonl says; see the module docstring."""
        values: dict[str, float] = {}
        for length in dict.fromkeys(cell.length for cell, _, _ in self._prompts):

            def chosen(hidden: bool, depth: float | None = None, length: int = length) -> np.ndarray:
                rows = [
                    n
                    for n, (cell, inside, _) in enumerate(self._prompts)
                    if cell.length == length and inside == hidden and depth in (None, cell.depth)
                ]
                return scores_N3[rows]

            at = _at(length)
            values |= _means(at, _SCORES, chosen(hidden=True))
            values |= _means(at, (names.LOSS_WITHOUT_NEEDLE,), chosen(hidden=False))
            for depth in sorted({*self.config.depths}):
                means = chosen(True, depth).mean(0)
                for name, value in zip(_SCORES, means, strict=True):
                    values[names.name_of(at, f"depth_{100 * depth:g}", name)] = float(value)
        return values


def _at(length: int) -> str:
    """The beginning of the names of what was measured at this length."""
    return names.name_of(names.NEEDLE, f"{names.LENGTH}{length}")


def _means(at: str, scores: Sequence[str], scores_N3: np.ndarray) -> dict[str, float]:
    """Means over prompts, with their standard errors where there are several."""
    found = {}
    for name, scores_N in zip(scores, scores_N3.T, strict=False):
        found[names.name_of(at, name)] = float(scores_N.mean())
        if scores_N.size > 1:
            found[names.name_of(at, f"{name}{names.STANDARD_ERROR}")] = float(
                scores_N.std(ddof=1) / np.sqrt(scores_N.size)
            )
    return found
