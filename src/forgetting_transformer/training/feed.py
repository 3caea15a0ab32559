"""Batches for the loop, checked."""

import itertools
from collections.abc import Iterator

from forgetting_transformer.data.batch_checks import check_batch, check_tokens
from forgetting_transformer.data.corpus import Batch
from forgetting_transformer.training.errors import TrainingError
from forgetting_transformer.training.faults.readers import restarted
from forgetting_transformer.training.interface import TrainerInterface


def batches(trainer: TrainerInterface, count: int) -> Iterator[Batch]:
    """Yields this rank's shares of the next `count` global batches.

    Raises:
        DataError: the corpus yields something else than a batch. TrainingError: it yields fewer.
    """
    first, data = trainer.counters.batch_count, trainer.config.datamodule
    corpus = f"datamodule.name={data.name!r}"
    rank, size = trainer.ranks.data_rank, trainer.ranks.data_size
    loader = restarted(
        lambda done: trainer.data.train_loader(first + done, first + count, rank, size),
        lambda: trainer.watchdog.reading(corpus),
    )
    given = 0
    for given, batch in enumerate(itertools.islice(loader, count), 1):
        check_batch(batch, corpus, data.train_batch_size // size, data.train_batch_len)
        if given == 1:
            check_tokens(batch, corpus, trainer.data_info.vocab_size)
        yield batch
    if given < count:
        raise TrainingError(
            f"{corpus} gave {given} batches instead of {count}, from batch {first:,} on; "
            f"{trainer.last_good_checkpoint}. Its train_loader must yield every batch of its range"
        )
