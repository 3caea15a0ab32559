"""train.block_inputs_on_host: what it needs, that it reaches the blocks, and who is told of it."""

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from forgetting_transformer.model.block import DecoderBlock
from forgetting_transformer.training import setup
from forgetting_transformer.training.config.parsing import parse
from tests.training.conftest import changed


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
@pytest.mark.parametrize("wanted", [False, True])
def test_the_key_reaches_every_block(tiny, wanted):
    keys = {"train__gradient_checkpointing": True, "train__block_inputs_on_host": wanted}
    config = parse(OmegaConf.create(changed(tiny, **keys)))
    model = setup.build_model(config, SimpleNamespace(vocab_size=61, bos_token_id=0, eos_token_id=0))
    blocks = [module for module in model.modules() if isinstance(module, DecoderBlock)]
    assert blocks and all(block.inputs_on_host == wanted for block in blocks)
