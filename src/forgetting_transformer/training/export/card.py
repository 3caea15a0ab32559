"""The card of a model, README.md: what it is and how to load it. Its publisher adds the rest, such as a licence."""

from collections.abc import Sequence

CARD = "README.md"
_TEXT = """---
library_name: transformers
pipeline_tag: text-generation
tags: [forgetting-transformer]
---

# {title}

{about}

## How to load it

Install the Python package `forgetting-transformer`, which has the model classes, from a clone of its repository. Then:

```python
{snippet}```

## Licence

{licence}
"""
_NO_LICENCE = (
    "None has been chosen while the lines above name none (`license: …`); until then nobody else may assume a right to "
    "use this model. Its publisher may choose one, with regard to the corpus and the tokenizer."
)


def text(
    title: str,
    about: str,
    has_tokenizer: bool,
    dataset: str | None = None,
    plugins: Sequence[str] = (),
    licence: str = _NO_LICENCE,
) -> str:
    """The text of a card, with Python code that loads the model and, with a tokenizer, lets it write.

    Args:
        dataset: name of the corpus. LongCrawl64 needs this package's tokenizer class.
        plugins: that the model needs.
    """
    lines = ["import forgetting_transformer.model  # registers the model classes"]
    if dataset == "longcrawl64":
        lines.append("import forgetting_transformer.tokenizer  # registers LongCrawl64's tokenizer")
    lines += [f"import {name}  # a plug-in that the model needs" for name in plugins]
    lines += [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model_id = "."  # the folder of this file',
        "model = AutoModelForCausalLM.from_pretrained(model_id)",
    ]
    if has_tokenizer:
        lines += [
            "tokenizer = AutoTokenizer.from_pretrained(model_id)",
            'prompt = tokenizer("One day", return_tensors="pt")',
            "output_ids = model.generate(**prompt, max_new_tokens=32)",
            "print(tokenizer.decode(output_ids[0], skip_special_tokens=True))",
        ]
    else:
        lines.append("# There is no tokenizer here: the model takes token ids.")
    return _TEXT.format(title=title, about=about, snippet="\n".join([*lines, ""]), licence=licence)
