"""Whether there are GPUs here, and if not, what is probably wrong."""

import os


def too_few(asked: str, largest: int, here: int) -> str | None:
    """What to say where GPU number `largest` is asked for and there are `here`; None if it is there.

    Args:
        asked: the setting as it was written, such as `fabric.devices=4`.
    """
    if largest < here:
        return None
    return (
        f"{asked}, but this machine has {here} GPU{'s' * (here != 1)}: ask for as many, or look "
        f"at CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')}"
    )


def missing() -> str | None:
    """Why PyTorch finds no GPU, and what to do about it; None if it finds one."""
    import torch

    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None and torch.version.hip is None:
        return (
            f"PyTorch {torch.__version__} is a build for CPUs: install one for CUDA (https://pytorch.org/get-started)"
        )
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU: unset it, or name some"
    return (
        f"PyTorch {torch.__version__} is built for GPUs and finds none: look whether `nvidia-smi` lists them, and "
        "whether the driver is recent enough"
    )
