"""Data: the arrays on disk, the order in which training reads them, and the loaders that prefetch it.

Files of the default run, in the order of their use:

    corpus.py        interface of a corpus, and definition of a batch
    longcrawl64.py   the corpus of most runs: two arrays
    order.py         documents that a step reads
    token_array.py   an array of token ids, read chunk by chunk
    vocabulary.py    number of ids, and the ids that begin and end a text
    worker.py        the loader, which reads ahead in a process

Not used, or only passed through: packed.py (texts in a row kept apart), sparse.py (chunks missing on purpose),
mixture.py (several corpora), eval_batches.py (held-out documents), batch_checks.py (batches of a plug-in),
model_tokenizer.py (tokenizers of models), errors.py.
`storage/` has the files of an array, here or at a URL; `prepare/` turns text into arrays, `tools/` fetches and verifies
them. Nothing here imports a model or the training loop.
"""

from forgetting_transformer.data.corpus import DataInfo
from forgetting_transformer.data.longcrawl64 import LongCrawl64DataModule
from forgetting_transformer.data.order import ReadingOrder
from forgetting_transformer.data.token_array import DataError, TokenArray

__all__ = ["DataError", "DataInfo", "LongCrawl64DataModule", "ReadingOrder", "TokenArray"]
