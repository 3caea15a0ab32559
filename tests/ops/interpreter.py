"""Runs snippets with Triton's interpreter, in which a kernel is Python: the same code that runs on a GPU, on this CPU.

The interpreter is chosen when Triton is imported, so snippets run in separate processes. These are forked from one
that has imported everything: the seconds of importing are spent once and not for every test.
"""

import functools
import json
import os
import subprocess
import sys
from importlib.metadata import version

import pytest
from packaging.version import Version

#: What every snippet finds there. Memory that is handed out unwritten holds NaN, or a large negative index.
PRELUDE = """
import dataclasses, math, types, torch
import torch.nn.functional as F
import triton.language as tl
from triton.runtime import interpreter
import forgetting_transformer.ops.forgetting_attention.triton as kernel
from forgetting_transformer.ops.forgetting_attention.reference import forgetting_attention_reference

def poisoned(original):
    def make(*args, **options):
        x = original(*args, **options)
        return x.fill_(math.nan if x.is_floating_point() else -(2 ** 30) if x.element_size() > 2 else 1)
    return make

for name in ("empty", "empty_like", "empty_strided"):
    setattr(torch, name, poisoned(getattr(torch, name)))
torch.manual_seed(0)

def attend(q, k, v, log_fgate, first_key, scale, threshold=None, bounded=False):
    bounds = kernel._bounds(q.detach(), k.detach(), first_key, scale) if bounded else (None, None, None)
    decay = kernel._decay(log_fgate.detach(), q.shape[2], threshold, *bounds, first_key)
    return kernel._forward(q, k, v, log_fgate, *decay, first_key, scale)

def reference(q, k, v, log_fgate, first_key, scale):
    seq_start = None
    if first_key is not None and (first_key == first_key[:, :1]).all():  # padding, which may hold anything
        seq_start, first_key = first_key[:, 0].long(), None
    return forgetting_attention_reference(q, k, v, log_fgate, seq_start, scale, first_key_BT=first_key)

def inputs(length, head_dim, dtype=torch.float32, shift=1.0, heads=2, groups=None, queries=None, batch=1):
    groups, queries = groups or heads, queries or length
    q, d_out = (torch.randn(batch, heads, queries, head_dim).to(dtype) for _ in range(2))
    k, v = (torch.randn(batch, groups, length, head_dim).to(dtype) for _ in range(2))
    return q, k, v, F.logsigmoid(torch.randn(batch, heads, length) + shift), d_out

def run(op, q, k, v, log_fgate, d_out, *rest):
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v, log_fgate)]
    out, log_normaliser = op(*leaves, *rest)
    sees = log_normaliser.isfinite()
    weight = torch.linspace(-1, 1, log_normaliser.numel(), dtype=log_normaliser.dtype).view_as(log_normaliser)
    torch.autograd.backward((out, log_normaliser), (d_out, weight * sees))
    return [out.detach(), log_normaliser.detach(), *(x.grad for x in leaves)]

def check(q, k, v, log_fgate, d_out, tolerance, first_key=None):
    scale = q.shape[-1] ** -0.5
    actual = run(attend, q, k, v, log_fgate, d_out, first_key, scale)
    doubles = [x.double() for x in (q, k, v, log_fgate, d_out)]
    expected = run(reference, *doubles, first_key, scale)
    assert torch.equal(actual[1].isneginf(), expected[1].isneginf())
    for name, a, e in zip(("out", "log_normaliser", "dq", "dk", "dv", "dlog_f"), actual, expected):
        finite = torch.isfinite(e)
        assert torch.isfinite(a[finite]).all(), name
        assert (a[finite & (e == 0)] == 0).all() or name == "dlog_f", name
        error = ((a.double() - e)[finite].norm() / e[finite].norm().clamp(min=1e-3)).item()
        assert error < tolerance, f"{name}: {error:.1e}"

# The interpreter patches Triton's language at every call of a function, which is half of its time. Once a launch does.
def patch_once(function, patch=interpreter._patch_lang):
    languages = [x for x in function.__globals__.values() if x is tl or x is tl.core]
    patched = not any(tl.core.is_builtin(language.load) for language in languages)
    return types.SimpleNamespace(restore=lambda: None) if patched else patch(function)

interpreter._patch_lang = patch_once

# Without the next lines a snippet takes twice as long. The interpreter computes each 32-bit sum in 64 bits too, for an
# assertion that only debug mode makes; `test_layouts_of_inputs.py` finds offsets that wrap. It also builds a table of
# all types at each lookup, and a new type object for each tensor.
builder = interpreter.interpreter_builder
builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

def find_once(dtype, find=interpreter._get_np_dtype, found={}):
    name = dtype.scalar.name
    if name not in found:
        found[name] = find(dtype.scalar)
    return found[name]

interpreter._get_np_dtype = find_once

def make_once(self, element_ty, shape, make=tl.block_type.__init__, made={}):
    key = element_ty.name, *shape
    if key not in made:
        make(self, element_ty, shape)
        made[key] = vars(self).copy()
    vars(self).update(made[key])

tl.block_type.__init__ = make_once

# The first call imports hundreds of modules, two seconds of every snippet if it were not made here.
with torch.no_grad():
    attend(*inputs(2, 16)[:4], None, 0.25)
torch.manual_seed(0)
"""

#: Forks for every snippet on its standard input, a line of JSON each, and answers with the traceback or "".
SERVER = """
import json, os, sys, tempfile, traceback
exec(json.loads(sys.stdin.readline()))
for line in sys.stdin:
    with tempfile.TemporaryFile("w+") as report:
        child = os.fork()
        if child == 0:
            try:
                exec(json.loads(line))
                code = 0
            except BaseException:
                traceback.print_exc(file=report)
                report.flush()
                code = 1
            os._exit(code)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        report.seek(0)
        print(json.dumps("" if status == 0 else report.read() or f"ended with {status}"), flush=True)
"""


@functools.cache
def _server() -> subprocess.Popen:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", SERVER]
    # It ends when its input does, with this process.
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True)
    server.stdin.write(json.dumps(PRELUDE) + "\n")
    return server


@functools.cache
def _unable() -> str:
    """Why no kernel can be interpreted here, or "". An older Triton makes numbers of arrays with one element each."""
    triton, numpy = Version(version("triton")), Version(version("numpy"))
    if triton < Version("3.7") and numpy >= Version("2.4"):
        return f"the interpreter of Triton {triton} does not run with NumPy {numpy}: pip install 'numpy<2.4'"
    return ""


def interpret(code: str) -> None:
    """Runs `code` after PRELUDE and expects it not to raise."""
    if _unable():
        pytest.skip(_unable())
    server = _server()
    server.stdin.write(json.dumps(code) + "\n")
    server.stdin.flush()
    error = json.loads(server.stdout.readline())
    assert not error, error
