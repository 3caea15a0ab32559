"""The card of a model loads it, whatever the model is."""

import yaml

from forgetting_transformer.training.export.card import text


def code(card: str) -> str:
    python = card.split("```python\n")[1].split("```")[0]
    compile(python, "card", "exec")
    return python


def test_the_example_is_python_for_every_model():
    longcrawl64 = text("fox", "A model.", True, "longcrawl64", ["my_lab.models"])
    assert "import forgetting_transformer.tokenizer" in code(longcrawl64)
    assert "import my_lab.models" in code(longcrawl64)
    assert "token ids" in code(text("fox", "A model.", False))
    assert "license" not in yaml.safe_load(longcrawl64.split("---\n")[1]) and "None has been chosen" in longcrawl64
