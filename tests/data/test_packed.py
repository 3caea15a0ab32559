"""Packed documents: the tokens of a corpus in its order, and where the texts in each row begin."""

import numpy as np
import pytest
import torch

from forgetting_transformer.data.corpus import cu_seqlens_of, lengths_of, model_inputs
from tests.data.test_mixture import mixture
from tests.data.test_reading import module, write_array

BOS, EOS = 0, 1


@pytest.fixture
def corpus(tmp_path):
    """Rows of 96 tokens in which a text begins every few tokens."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(1, 1000, size=(20, 96)).astype(np.uint16)
    tokens[generator.random(tokens.shape) < 0.1] = BOS
    for split in ("train", "heldout"):
        write_array(tmp_path / "longcrawl64" / f"{split}.zarr", tokens, chunks=(8, 24))
    return tmp_path


def test_tokens_are_those_of_the_corpus_and_documents_begin_at_bos(corpus):
    plain, packed = module(corpus), module(corpus, packed=True)
    assert packed.train_info() == plain.train_info() and packed.eval_info() == plain.eval_info()
    for ours, theirs in (
        (packed.train_loader(0, 5, 0, 1), plain.train_loader(0, 5, 0, 1)),
        (packed.eval_loader(0, 1), plain.eval_loader(0, 1)),
    ):
        for batch, expected in zip(ours, theirs, strict=True):
            assert all(torch.equal(batch[key], expected[key]) for key in expected)
            for inputs, bounds in zip(batch["input_ids"], batch["cu_seqlens"], strict=True):
                begins = [0, *(position for position in range(1, 32) if inputs[position] == BOS)]
                assert bounds.tolist() == begins + [32] * (33 - len(begins))


def test_the_model_gets_the_boundaries_of_some_rows_as_one_sequence():
    input_ids = torch.tensor([[BOS, 5, BOS, 6], [7, 8, 9, 4], [BOS, BOS, 3, 2]])
    batch = {"input_ids": input_ids, "labels": input_ids, "cu_seqlens": cu_seqlens_of(input_ids, BOS)}
    assert batch["cu_seqlens"].tolist() == [[0, 2, 4, 4, 4], [0, 4, 4, 4, 4], [0, 1, 4, 4, 4]]
    inputs = model_inputs(batch, slice(1, 3))
    assert inputs["cu_seqlens"].tolist() == [0, 4, 4, 4, 4, 4, 5, 8, 8, 8]
    assert torch.equal(inputs["labels"], input_ids[1:])
    assert set(model_inputs({"input_ids": input_ids, "labels": input_ids})) == {"input_ids", "labels"}
    assert lengths_of(batch["cu_seqlens"]) == pytest.approx({1: 1 / 12, 2: 4 / 12, 3: 3 / 12, 4: 4 / 12})


def test_lengths_that_flops_are_counted_with_are_those_of_the_documents(corpus):
    assert module(corpus).train_lengths() == {32: 1.0}
    lengths = module(corpus, packed=True).train_lengths()
    assert sum(lengths.values()) == pytest.approx(1) and max(lengths) < 32
    assert lengths == module(corpus, packed=True).train_lengths()


def four_rows(folder, eos: int, begin: tuple[int, ...] = ()) -> None:
    """A corpus whose four rows hold the same six texts, one after another: two begin inside of a row."""
    texts = [[*begin, *range(5 + n, 5 + n + length), eos] for n, length in enumerate((15, 7, 7, 7, 7, 15))]
    stream = np.concatenate([*texts, begin]).astype(np.uint16)
    stream = np.concatenate([stream, np.full(-len(stream) % 16, 3, dtype=np.uint16)])
    for split in ("train", "heldout"):
        write_array(folder / f"{split}.zarr", stream.reshape(-1, 16), chunks=(2, 8))
    (folder / "manifest.json").write_text(f'{{"vocab_size": 1000, "bos_token_id": {BOS}, "eos_token_id": {eos}}}')


def test_documents_begin_at_the_same_places_whether_bos_and_eos_are_one_token_or_two(tmp_path):
    four_rows(tmp_path / "one", eos=BOS)
    four_rows(tmp_path / "two", eos=EOS)
    options = {"vocab_size": None, "bos_token_id": None, "train_batch_len": 16, "eval_batch_len": 16}
    one, two = (module(tmp_path, dataset=name, packed=True, **options) for name in ("one", "two"))
    mixed = mixture(tmp_path, {"two": 1}, **options | {"packed": True, "train_batch_size": 4})
    assert (two.vocabulary.eos_token_id, one.vocabulary.eos_token_id) == (EOS, BOS)
    [expected] = one.train_loader(0, 1, 0, 1)
    for loader in (two.train_loader(0, 1, 0, 1), two.eval_loader(0, 1), mixed.train_loader(0, 1, 0, 1)):
        [batch] = loader
        assert torch.equal(batch["cu_seqlens"], expected["cu_seqlens"])
        assert ((batch["cu_seqlens"] > 0) & (batch["cu_seqlens"] < 16)).sum() == 2
        assert torch.equal(batch["input_ids"], expected["input_ids"]), "a text begins with BOS, as a prompt does"
        assert torch.equal(batch["labels"] == EOS, expected["labels"] == BOS), "and ends with EOS"
    assert two.train_lengths() == mixed.train_lengths() == one.train_lengths() == {8: 0.5, 16: 0.5}


def test_an_array_with_bos_before_each_text_and_eos_behind_it_has_one_boundary_between_two(tmp_path):
    four_rows(tmp_path / "longcrawl64", eos=EOS, begin=(BOS,))
    data = module(tmp_path, packed=True, train_batch_len=16, eval_batch_len=16)
    plain = module(tmp_path, train_batch_len=16, eval_batch_len=16)
    for batch, stored in zip(data.eval_loader(0, 1), plain.eval_loader(0, 1), strict=True):
        assert torch.equal(batch["input_ids"], stored["input_ids"])
        for ids, bounds in zip(batch["input_ids"].tolist(), batch["cu_seqlens"].tolist(), strict=True):
            assert [bound for bound in bounds if 0 < bound < 16] == [n for n in range(1, 16) if ids[n] == BOS]
