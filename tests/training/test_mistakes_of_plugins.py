"""Mistakes that authors of corpora, callbacks, optimizers and mixers make are refused with the reason.

Each of them would train something else in silence, or fail far from its cause.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from forgetting_transformer.data.batch_checks import check_batch, check_tokens
from forgetting_transformer.data.corpus import shifted
from forgetting_transformer.data.errors import DataError
from forgetting_transformer.training.callbacks.base import Callback, Callbacks
from forgetting_transformer.training.errors import TrainingError
from tests.model.small_models import small
from tests.training.conftest import STEP, changed, refused

#: A corpus whose loaders give what `change` makes of the list of their batches.
LOADERS = """
from forgetting_transformer.data.longcrawl64 import LongCrawl64DataModule as Corpus
loader = Corpus.train_loader
Corpus.train_loader = lambda self, *arguments: (lambda batches: {change})(list(loader(self, *arguments)))
"""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("batches[:3]", "TrainingError: datamodule.name='longcrawl64' gave 3 batches instead of 6, from batch 0 on; "),
        ("[b | {'labels': b['input_ids']} for b in batches]", "gave a batch whose 'labels' are its 'input_ids'; "),
        ("[b | {'labels': b['labels'] + 64} for b in batches]", "in 'labels', and datamodule.vocab_size=64"),
    ],
)  # fmt: skip
def test_a_corpus_that_gives_other_batches_than_it_is_asked_for_is_named(tiny, change, message):
    tiny = changed(tiny, train__max_tokens=6 * STEP, datamodule__train_num_workers=0)
    assert message in refused(tiny, patch=LOADERS.format(change=change))


def test_a_batch_as_it_should_be_is_taken_and_what_is_none_is_refused():
    for wrong, message in (
        ((1, 2), r"tuple; it must be \{'input_ids'"),
        ({"input_ids": torch.zeros(2, 4, dtype=torch.int64)}, r"int64', 'labels': 'missing'\}; it must be"),
        ({"input_ids": [[1, 2]]}, "'input_ids': 'list', "),
        ({"input_ids": torch.tensor(1)}, r"'input_ids': '\(\) int64', .*must be \{'input_ids': '\(1, 4\) int64'"),
    ):
        with pytest.raises(DataError, match=f"^my corpus gave as a batch .*{message}"):
            check_batch(wrong, "my corpus", None, 4)
    batch = shifted(torch.tensor([[5, 5, 5], [7, 7, 7]]), 0)
    check_batch(batch, "mine", 2, 3)
    check_tokens(shifted(torch.zeros(2, 3), 0), "mine", 8)  # labels are inputs where there is but one token
    with pytest.raises(DataError, match="'weight': 'missing'"):
        check_batch(batch, "mine", None, 3, weighted=True)
    batch |= {"weight": torch.ones(2, dtype=torch.float64), "cu_seqlens": torch.zeros(2, 3, dtype=torch.int32)}
    with pytest.raises(DataError, match=r"'cu_seqlens': '\(2, 3\) int32'\}; .*'cu_seqlens': '\(2, 4\) int32'"):
        check_batch(batch, "mine", 2, 3, weighted=True)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda x: x, r"torch.float32 \(2, 8, 64\)"),
        (lambda x: (x[..., :1], None), r"a tuple of torch.float32 \(2, 8, 1\)"),
    ],
)
def test_a_mixer_that_returns_something_else_than_its_output_is_named(returned, message):
    class Mine(nn.Module):
        def forward(self, hidden_BTE, *arguments, **options):
            return returned(hidden_BTE)

    model = small("transformer", hidden_size=64, num_heads=2)
    model.model.layers[1].attn = Mine()
    with pytest.raises(TypeError, match=rf"^Mine.forward returned {message}. .* of its input's shape \(2, 8, 64\)"):
        model(torch.ones(2, 8, dtype=torch.int64), use_cache=False)
    with pytest.raises(TypeError, match=r"^Mine has no new_cache\(\), so nothing can be generated with a cache"):
        model.new_cache()


CALLBACK = """
import torch
from forgetting_transformer import plugins
from forgetting_transformer.training.callbacks import Callback
@plugins.CALLBACKS.register("mine")
class Mine(Callback):
    def on_interval(self, trainer, kind):
        trainer.report({report})
"""


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ("'mine', {'a': torch.ones(1)}", "TypeError: Object of type Tensor is not JSON"),
        (
            "'train', {'loss': 1.0}",
            "ValueError: a callback reports 'train', which callbacks.loss does too; use another",
        ),
    ],
)
def test_a_callback_that_breaks_what_a_run_writes_is_named(tiny, report, message):
    patch = CALLBACK.format(report=report)
    said = refused(changed(tiny, callbacks=["mine"], train__max_tokens=6 * STEP), patch=patch)
    assert message in said and "raised by on_interval of callbacks.mine" in said


def test_a_callback_that_evaluates_says_by_which_line_a_start_knows_that():
    class Mine(Callback):
        name, evaluates = "mine", True

    trainer = SimpleNamespace(fabric=SimpleNamespace(is_global_zero=True))
    with pytest.raises(TrainingError, match=r"callbacks\.mine evaluates, and has no kind"):
        Callbacks(trainer, [], [Mine()])
