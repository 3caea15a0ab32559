"""Two GPUs that share sequences compute what one computes on whole ones, and a run of theirs is continued bitwise."""

import shutil
import time
import traceback
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from forgetting_transformer.ops import context
from tests.model.test_context import LENGTH, MODELS, inputs_of, model_of
from tests.processes import server
from tests.training.conftest import STEP, changed, train
from tests.training.test_resume import assert_same_run
from tests.waiting import HANG, wait_until

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")


def measure(name: str, shared: context.Context | None, rank: int, bf16: bool) -> dict[str, torch.Tensor]:
    """Loss of every token here, and the gradients of their sum over all GPUs, of float32 weights with checkpointing."""
    model, inputs = model_of(name, True).float().cuda(rank), inputs_of(False)
    part = slice(None) if shared is None else shared.part(LENGTH)
    with context.sharing(shared), torch.autocast("cuda", torch.bfloat16, enabled=bf16):
        loss = model(**{key: x[:, part].contiguous().cuda(rank) for key, x in inputs.items()}).loss
        loss.sum().backward()
    gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    if shared is not None:
        for gradient in gradients.values():
            dist.all_reduce(gradient)
    return {"loss": loss.detach(), **gradients}


def distances(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> dict[str, float]:
    return {key: ((found[key] - x).norm() / x.norm().clamp(min=1e-6)).item() for key, x in exact.items()}


def _share(folder: Path, rank: int, size: int, bf16: bool) -> None:
    try:
        torch.cuda.set_device(rank)
        store = dist.FileStore(str(folder / "rendezvous"), size)
        options = {"rank": rank, "world_size": size, "timeout": timedelta(seconds=HANG)}
        dist.init_process_group("nccl", store=store, device_id=torch.device("cuda", rank), **options)
        shared, far = context.Context(rank, size), {}
        for name in MODELS:
            began = time.monotonic()
            exact = measure(name, None, rank, False)
            exact["loss"] = exact["loss"][:, shared.part(LENGTH)]
            far[name] = distances(measure(name, shared, rank, bf16), exact), {}
            if bf16:
                alone = measure(name, None, rank, True)
                alone["loss"] = alone["loss"][:, shared.part(LENGTH)]
                far[name] = far[name][0], distances(alone, exact)
            print(f"rank {rank}: {name}, {time.monotonic() - began:.0f} s", flush=True)
        torch.save(far, folder / f"{rank}.pt")
        dist.destroy_process_group()
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc())
        raise


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
def test_two_gpus_compute_what_one_does_for_every_architecture(tmp_path, bf16):
    processes = [server.Process(target=_share, args=(tmp_path, rank, 2, bf16)) for rank in range(2)]
    for process in processes:
        process.start()
    # A rank that fails leaves the other waiting for it.
    wait_until(lambda: any(tmp_path.glob("*.error")) or not any(process.is_alive() for process in processes))
    errors = "\n".join(file.read_text() for file in sorted(tmp_path.glob("*.error")))
    if errors:
        for process in processes:
            process.kill()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0], errors
    for rank in range(2):
        far = torch.load(tmp_path / f"{rank}.pt")
        assert far.keys() == MODELS.keys()
        for name, (shared, alone) in far.items():
            # In bf16 two GPUs may be off as far as one is, and not much farther: they add in another order.
            limits = {key: 3 * alone[key] + 1e-2 if bf16 else 1e-3 for key in shared}
            assert {key: (x, limits[key]) for key, x in shared.items() if not x < limits[key]} == {}, name


@pytest.mark.parametrize(
    ("strategy", "precision", "compiled"),
    [("ddp", "32-true", False), ("fsdp", "bf16-mixed", False), ("fsdp", "bf16-mixed", True)],
)
def test_a_run_of_gpus_that_share_sequences_is_continued_bitwise(tiny, tmp_path, strategy, precision, compiled):
    fabric = {"precision": precision, "accelerator": "cuda", "devices": 2}
    tiny = changed(tiny, strategy__name=strategy, strategy__context=2, fabric=fabric, model__config__num_heads=4)
    tiny = changed(tiny, train__gradient_checkpointing=True, train__compile=compiled)
    tiny = changed(tiny, model__config__log_pruning_tolerance=-10.0)
    straight, again = (changed(tiny, output_dir=str(tmp_path / name)) for name in ("straight", "again"))
    train(straight, 2, accelerator="cuda")
    shutil.copytree(straight["output_dir"], again["output_dir"])
    for step in (16, 20):
        shutil.rmtree(Path(again["output_dir"]) / f"checkpoints/step-{step * STEP:015d}")
    train(again, 2, accelerator="cuda")
    assert_same_run(straight["output_dir"], again["output_dir"])
