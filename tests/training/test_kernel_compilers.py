"""Kernels compiled in processes: on a GPU's behalf, since compiling needs none."""

import os
import signal

import pytest

pytest.importorskip("triton")
import triton
from triton.compiler import ASTSource

from forgetting_transformer.ops.layers.residual_norm_triton import sum_kernel
from forgetting_transformer.training.execution import kernel_compilers
from forgetting_transformer.training.execution.kernel_compilers import KernelCompilers
from tests.ops.kernels import compile_kernel

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")


@pytest.fixture
def compiled_here(monkeypatch, tmp_path):
    """Names of kernels that this process has compiled. Triton's cache is empty."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    # As kernels do at their first launch.
    monkeypatch.setattr(triton, "compile", lambda *args, **options: triton.compiler.compile(*args, **options))
    make_ir, names = ASTSource.make_ir, []
    monkeypatch.setattr(ASTSource, "make_ir", lambda self, *args: names.append(self.name) or make_ir(self, *args))
    return names


def compile_sum(parts: int = 16) -> None:
    def type_of(name: str) -> str:
        return "*fp32" if name.endswith("_ptr") else "i32"

    assert compile_kernel(sum_kernel, 90, {"PARTS": parts, "BLOCK": 32}, type_of, bool, {"num_warps": 8}).asm["cubin"]


@pytest.mark.slow
def test_a_kernel_is_compiled_in_a_process_and_found_by_this_one(compiled_here):
    assert kernel_compilers.are_useful()
    with KernelCompilers(1).compiling():
        compile_sum()
    assert not compiled_here and not kernel_compilers.are_useful()


@pytest.mark.slow
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_after_processes_fail_or_hang_everything_is_compiled_here(compiled_here, monkeypatch, fault):
    monkeypatch.setattr(kernel_compilers, "_PATIENCE", 1)
    compilers, jobs = KernelCompilers(1), []
    submit = compilers._pool.submit
    monkeypatch.setattr(compilers._pool, "submit", lambda *job: jobs.append(job) or submit(*job))
    with compilers.compiling():
        for process in compilers._pool._processes:
            os.kill(process, fault)
        for parts in (16, 32):
            compile_sum(parts)
    assert compiled_here == ["sum_kernel"] * 2 and len(jobs) == 1
