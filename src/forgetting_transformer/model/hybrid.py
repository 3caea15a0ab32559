"""A hybrid: blocks with mixers of several architectures in a repeating pattern, each followed by the same SwiGLU MLP.

Most layers recurrent and a few with attention keep the quality of attention at a fraction of its cache: Lieber et al.,
"Jamba: A Hybrid Transformer-Mamba Language Model", 2024; Waleffe et al., "An Empirical Study of Mamba-based Language
Models", 2024.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

import difflib
from typing import Any, ClassVar

from torch import nn

from forgetting_transformer.model import registry
from forgetting_transformer.model.config import DecoderConfig, SwiGLUDecoderConfig
from forgetting_transformer.model.decoder import model_classes

#: Fields that the blocks of a hybrid have in common. A mixer's own configuration takes these from the hybrid's.
_SHARED = ("hidden_size", "num_hidden_layers", "initializer_range", "vocab_size", "pad_token_id")


#: Fields of a whole model, which an entry of `mixers` must not have.
_OF_THE_MODEL = registry.fields_of(SwiGLUDecoderConfig) - {"norm_eps"}


def _architectures() -> list[str]:
    return [name for name in registry.model_names() if name != "hybrid"]


class HybridConfig(SwiGLUDecoderConfig):
    """Configuration of a hybrid. Fields of the MLP: see `SwiGLUDecoderConfig`.

    Fields:
        pattern: names of the mixers of blocks 0, 1, 2, …; it is repeated, and may end in the middle at the last block.
        mixers: name in the pattern -> `architecture`, a registered one, whose mixer the block gets, and that
            architecture's own fields. Its sizes of the whole model are the hybrid's; its MLP is not used. Entries that
            are not in the pattern are ignored. A name that is not here is an architecture with the defaults of its
            class, whose number of heads does not depend on hidden_size.
    """

    model_type = "hybrid-project_fox"
    mixer_norm_name: ClassVar[str] = "mixer_norm"
    mixer_name: ClassVar[str] = "mixer"

    pattern: list[str] | tuple[str, ...] = (*3 * ("gated_delta_net",), "forgetting_transformer")
    mixers: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        pattern, mixers = self.pattern, {} if self.mixers is None else self.mixers
        if not isinstance(pattern, list | tuple) or not pattern or not all(isinstance(name, str) for name in pattern):
            raise ValueError(
                f"pattern is {pattern!r}; it must list the mixers of blocks 0, 1, 2, …, as in "
                "[gated_delta_net,gated_delta_net,gated_delta_net,forgetting_transformer]"
            )
        if not isinstance(mixers, dict):
            raise ValueError(f"mixers is {mixers!r}; for each name it must have architecture and that one's fields")
        if unknown := next((name for name in pattern if name not in {*mixers, *_architectures()}), None):
            known = ", ".join(mixers) or "no entries"
            close = difflib.get_close_matches(unknown, {*mixers, *_architectures()}, n=1)
            raise ValueError(
                f"pattern has {unknown!r}, which is neither in mixers ({known}) nor an architecture "
                f"({', '.join(_architectures())})" + (f"; did you mean {close[0]!r}?" if close else "")
            )
        if len(pattern) > self.num_hidden_layers:
            raise ValueError(
                f"pattern has {len(pattern)} mixers and the model {self.num_hidden_layers} blocks, so some have none; "
                "shorten it, or raise num_hidden_layers"
            )
        # A YAML file may have mixers that no block has, for other patterns to choose from.
        for name, fields in ((name, mixers[name]) for name in pattern if name in mixers):
            if not isinstance(fields, dict) or "architecture" not in fields:
                raise ValueError(
                    f"mixers.{name} is {fields!r}; it must have architecture, one of {', '.join(_architectures())}, "
                    "and that one's fields"
                )
        self.mixers = {name: dict(mixers.get(name, {"architecture": name})) for name in dict.fromkeys(pattern)}
        self.pattern = list(pattern)
        super().__post_init__(**kwargs)
        for name in self.mixers:
            self._mixer_config(name)

    @classmethod
    def fields_in_use(cls, fields: dict[str, Any]) -> dict[str, Any]:
        pattern, mixers = fields.get("pattern") or (), fields.get("mixers") or {}
        return fields | {"mixers": {name: mixers[name] for name in sorted({*pattern} & {*mixers})}}

    @property
    def mixer_architectures(self) -> list[str]:
        return sorted({fields["architecture"] for fields in (self.mixers or {}).values()})

    def _mixer_config(self, name: str) -> DecoderConfig:
        """The configuration that builds the mixers called `name`.

        Raises:
            ValueError: naming the mixer, the field, its value and the fix.
        """
        assert self.mixers is not None  # at construction
        fields = dict(self.mixers[name])
        architecture = fields.pop("architecture", None)
        if architecture not in _architectures():
            raise ValueError(
                f"mixers.{name}.architecture is {architecture!r}; it must be one of {', '.join(_architectures())}"
            )
        if own := [key for key in fields if key in _OF_THE_MODEL]:
            raise ValueError(f"mixers.{name} has {own[0]!r}; set it for the whole model")
        shared = {key: getattr(self, key) for key in _SHARED}
        try:
            return registry.build_config(architecture, **shared, **fields)
        except ValueError as error:
            raise ValueError(f"mixers.{name}: {error}") from error

    def mixer_config(self, layer_idx: int) -> DecoderConfig:
        return self._mixer_config(self.pattern[layer_idx % len(self.pattern)])

    def _names(self, blocks: int) -> list[str]:
        """Names of the mixers of the first blocks."""
        return [self.pattern[block % len(self.pattern)] for block in range(blocks)]

    def _number(self, layer_idx: int) -> int:
        """Number of blocks below with the same mixer: layers of an architecture may differ by it."""
        names = self._names(layer_idx + 1)
        return names.count(names[-1]) - 1

    def build_mixer(self, layer_idx: int) -> nn.Module:
        return self.mixer_config(layer_idx).build_mixer(self._number(layer_idx))

    def mixer_flops_per_token(self, layer_idx: int, seq_len: int) -> float:
        return self.mixer_config(layer_idx).mixer_flops_per_token(self._number(layer_idx), seq_len)


HybridModel, HybridForCausalLM = model_classes(HybridConfig)
