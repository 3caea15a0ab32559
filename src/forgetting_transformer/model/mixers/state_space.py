"""Base of the mixers of Mamba and Mamba-2, with parameter names and config keys of the released checkpoints.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

from typing import Any, ClassVar

from torch import Tensor

from forgetting_transformer.model.arguments import check_silu
from forgetting_transformer.model.config import DecoderConfig
from forgetting_transformer.model.decoder import DecoderForCausalLM, DecoderModel
from forgetting_transformer.model.mixers.recurrent import RecurrentMixer, ShortConvolution, init_uniform, zero_padding


class StateSpaceMixer(RecurrentMixer):
    """A recurrent mixer with a short convolution `conv1d` and SiLU in front of its state space."""

    static_cache = True

    packs_documents = True
    conv1d: ShortConvolution

    def convolve(
        self,
        x_BTC: Tensor,
        padding_BT: Tensor | None,
        previous_BCW: Tensor | None,
        position_BT: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return `silu(conv(x))`, 0 in padding, and the last inputs of the convolution.

        Args:
            position_BT: of packed documents, the number of tokens before each in its own.
        """
        x_BTC, last_BCW = self.conv1d(zero_padding(x_BTC, padding_BT), previous_BCW, position_BT)
        # A second time, because the convolution adds its bias to padding too.
        return zero_padding(x_BTC, padding_BT), last_BCW


def of_first_document(state_BX: Tensor | None, position_BT: Tensor | None) -> Tensor | None:
    """The state before these tokens `(B, …)`, 0 for rows that begin a document."""
    if state_BX is None or position_BT is None:
        return state_BX
    return state_BX.masked_fill((position_BT[:, 0] == 0).view(-1, *[1] * (state_BX.ndim - 1)), 0)


class StateSpaceConfig(DecoderConfig):
    """The configuration of a model with state space mixers. Further fields: see the mixer.

    Fields:
        expand: inner width relative to hidden_size.
        hidden_act: "silu" (the same as "swish") is the one choice.
        initializer_range: standard deviation of the embedding at the start. All linear layers, the output layer too,
            start as PyTorch starts them.

    Accepted so that published config.json files load, without effect: fuse_cross_entropy, which chooses among the
    authors' kernels.
    """

    mixer_name: ClassVar[str] = "mixer"
    final_norm_name: ClassVar[str] = "norm_f"
    zero_padding_embedding: ClassVar[bool] = False

    pad_token_id: int | None = 0
    expand: float = 2
    conv_kernel: int = 4
    use_bias: bool = False
    use_conv_bias: bool = True
    hidden_act: str = "silu"
    time_step_rank: int | str = "auto"
    time_step_min: float = 1e-3
    time_step_max: float = 0.1
    time_step_floor: float = 1e-4
    fuse_cross_entropy: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        check_silu(self.hidden_act)
        super().__post_init__(**kwargs)


class StateSpaceModel(DecoderModel):
    """A model of state space mixers without its output layer."""

    base_model_prefix = "backbone"


class StateSpaceForCausalLM(DecoderForCausalLM):
    """A model of state space mixers as a language model, whose output layer starts from PyTorch's uniform law."""

    def init_own_weights(self) -> None:
        if not self.config.tie_word_embeddings:
            init_uniform(self.lm_head)
