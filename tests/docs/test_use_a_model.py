"""The Python of docs/use_a_model.md, run line by line on a small model."""

import pytest
import torch

from tests.docs.commands import ROOT, blocks
from tests.evaluation.conftest import VOCABULARY, sentences
from tests.model.small_models import PRO, small_model


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_the_lines_of_the_page_train(tmp_path, monkeypatch):
    pytest.importorskip("accelerate", reason="Trainer needs accelerate: pip install -r requirements-dev.txt")
    peft = pytest.importorskip("peft", reason="LoRA is peft's: pip install -r requirements-dev.txt")
    from tests.evaluation.conftest import _tokenizer

    folder = tmp_path / "quickstart/hf"
    small_model(vocab_size=len(VOCABULARY), initializer_range=0.02, **PRO).save_pretrained(folder)
    tokenizer = _tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    (tmp_path / "notes.txt").write_text("\n\n".join(sentences(seed, 5 + seed) for seed in range(6)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")

    page, names = (ROOT / "docs/use_a_model.md").read_text(encoding="utf-8"), {}
    load, trainer, lora = blocks(page, "python")
    few_steps = "max_steps=100"
    assert trainer.count(few_steps) == lora.count(few_steps) == 1
    exec(load, names)
    assert len(names["texts"]) == 1
    exec(trainer.replace(few_steps, "max_steps=2"), names)
    assert names["trainer"].state.global_step == 2
    assert {"model.safetensors", "tokenizer.json"} <= {path.name for path in (tmp_path / "output/finetuned").iterdir()}
    exec(lora.replace(few_steps, "max_steps=2"), names)
    adapter = tmp_path / "output/lora"
    merged = peft.PeftModel.from_pretrained(
        names["model"].__class__.from_pretrained(folder), adapter
    ).merge_and_unload()
    ids = torch.arange(9)[None]
    torch.testing.assert_close(merged(input_ids=ids).logits, names["adapted"].eval()(input_ids=ids).logits)
