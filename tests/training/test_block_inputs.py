"""train.block_inputs_on_host: what it needs, that it reaches the blocks, and who is told of it."""

from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from forgetting_transformer.model.block import DecoderBlock
from forgetting_transformer.training import setup
from forgetting_transformer.training.config import ConfigError
from forgetting_transformer.training.config.parsing import parse
from forgetting_transformer.training.faults.failures import out_of_memory
from tests.training.conftest import changed


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
@pytest.mark.parametrize("wanted", [False, True])
def test_the_key_reaches_every_block(tiny, wanted):
    keys = {"train__gradient_checkpointing": True, "train__block_inputs_on_host": wanted}
    config = parse(OmegaConf.create(changed(tiny, **keys)))
    model = setup.build_model(config, SimpleNamespace(vocab_size=61, bos_token_id=0, eos_token_id=0))
    blocks = [module for module in model.modules() if isinstance(module, DecoderBlock)]
    assert blocks and all(block.inputs_on_host == wanted for block in blocks)


def test_without_activation_checkpointing_it_is_refused(tiny):
    with pytest.raises(
        ConfigError, match=r"train.block_inputs_on_host=true moves .*; set train.gradient_checkpointing"
    ):
        parse(OmegaConf.create(changed(tiny, train__block_inputs_on_host=True)))


def test_a_full_memory_is_told_of_it_where_one_sequence_at_a_time_is_the_least(tiny):
    keys = {"train__gradient_checkpointing": True, "train__grad_acc_tokens": 32}
    config = parse(OmegaConf.create(changed(tiny, **keys)))
    error = torch.OutOfMemoryError("Tried to allocate 2.50 GiB")
    assert "again with train.block_inputs_on_host=true or " in out_of_memory(error, config, "training")
    config.train.block_inputs_on_host = True
    assert "block_inputs_on_host" not in out_of_memory(error, config, "training")
