"""Self-tests find kernels that are wrong, rule them out, and describe what is left; models say how they call ops.

Without a GPU the op's PyTorch path stands in for the kernels.
"""

import importlib.util
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch

from forgetting_transformer.model import registry
from forgetting_transformer.ops import backends, recurrence, selftest
from forgetting_transformer.ops.backends import BACKENDS, FLA, GLUON, PYTORCH, TRITON, OpUse
from tests.model.small_models import PRO, small
from tests.processes import run_command

FOX = OpUse("attention", heads=3, key_dim=16, value_dim=16, is_gated=True, pruning="threshold")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_faults(monkeypatch):
    monkeypatch.setattr(backends, "_faults", {})


def fastest(use, *_):
    order = BACKENDS.get(use.op, (PYTORCH,))
    return next(name for name in order if name == PYTORCH or backends.is_usable(use.op, name))


@pytest.fixture
def pretend_gpu(monkeypatch):
    """Every op is served by the fastest backend that is not ruled out."""
    monkeypatch.setattr(selftest, "find_backend", fastest)
    monkeypatch.setattr(selftest, "_LAYERS", ())
    short = selftest._OPS["path_attention"]._replace(length=lambda _: 70)
    monkeypatch.setitem(selftest._OPS, "path_attention", short)
    monkeypatch.setattr(backends, "installed_version", lambda package: "9.9.9")


def choose(*uses, dtype=torch.float32, lengths=(512,)):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return selftest.choose_backends(uses, dtype, CPU, lengths)


def test_nothing_is_tested_without_a_gpu(monkeypatch):
    monkeypatch.setattr(selftest, "check", None)
    assert choose(FOX, FOX, OpUse("selective_scan", 1, 4, 64), OpUse("swiglu", 1, 8, 8)) == {
        "attention": (PYTORCH, "PyTorch"),
        "selective_scan": (PYTORCH, "PyTorch"),
    }


@pytest.mark.parametrize(
    "pruning, window, lengths",
    [(None, None, (384, 300)), ("threshold", 100, (384,)), ("auto", None, None), ("threshold", 64, None)],
)
def test_right_kernels_of_attention_pass(pretend_gpu, pruning, window, lengths):
    plain = FOX._replace(is_gated=False, pruning=None, key_heads=1, window=window)
    for use in (FOX._replace(window=window, pruning=pruning), plain, plain._replace(packed=True)):
        found = choose(use, lengths=lengths)["attention"]
        assert found.name == GLUON
        assert found.text.startswith("Gluon for Hopper, Triton 9.9.9, self-test within ")
    assert not backends.faults()


def scaled(function):
    """The function, whose result is a tenth too large except in float64, which is the reference."""

    def wrong(x, *arguments, **options):
        result = function(x, *arguments, **options)
        if x.dtype == torch.float64:
            return result
        return (1.1 * result[0], *result[1:]) if isinstance(result, tuple) else 1.1 * result

    return wrong


def gates_are_off(function):
    return lambda q, k, v, w, beta, f, **options: function(
        q, k, v, w, beta, f if q.dtype == torch.float64 else 1.5 * f, **options
    )


def heads_are_shared_wrongly(fault):
    def wrap(function):
        def wrong(q, k, v, **options):
            if q.dtype != torch.float64:
                if fault == "k":
                    k = k.roll(1, dims=2)
                else:
                    options[fault] = 1.1 * options[fault]
            return function(q, k, v, **options)

        return wrong

    return wrap


GROUPED = OpUse("simple_gla", 6, 16, 32, key_heads=2)
RECURRENCE = (selftest.recurrence, "recurrence")
CONVOLUTION = (selftest.short_convolution, "short_convolution")
# A use, the function that stands in for its kernel, and faults of it.
OPS = [
    (OpUse("kda", 3, 16, 32), *RECURRENCE, scaled),
    *((GROUPED, *RECURRENCE, heads_are_shared_wrongly(fault)) for fault in ("skip", "step", "k")),
    (GROUPED._replace(packed=True), *RECURRENCE, scaled),
    *((OpUse("short_convolution", heads, 4, 48), *CONVOLUTION, scaled) for heads in (0, 3)),
    *((use, selftest.norm, "gated_rms_norm", scaled) for use in (
        OpUse("gated_norm", 3, 1, 48, is_gated=True), OpUse("gated_norm", 1, 0, 48))),
    (OpUse("selective_scan", 1, 4, 48), selftest.recurrence, "selective_scan", scaled),
    (OpUse("path_attention", 3, 16, 16), selftest.path_attention, "path_attention", gates_are_off),
    (OpUse("swiglu", 1, 24, 24), selftest.swiglu, "swiglu", scaled),
    (OpUse("residual_norm", 1, 24, 24), selftest.residual_norm, "add_rms_norm", scaled),
    *((OpUse("shift_norm", 3, width, 24), selftest.shift_norm, "shift_norm", scaled) for width in (0, 24)),
]  # fmt: skip


@pytest.mark.parametrize("use, module, name, fault", OPS, ids=lambda x: x.op if isinstance(x, OpUse) else "")
def test_right_kernels_pass_and_wrong_ones_are_ruled_out(pretend_gpu, monkeypatch, use, module, name, fault):
    first = BACKENDS[use.op][0]
    title = {TRITON: "Triton 9.9.9", FLA: "FLA 9.9.9, Triton 9.9.9"}[first]
    dtype = torch.bfloat16 if use.op == "path_attention" else torch.float32
    for lengths in (None, (100, 512)):
        found = choose(use, dtype=dtype, lengths=lengths)[use.op]
        assert found.name == first and found.text.startswith(f"{title}, self-test within "), backends.faults()
    monkeypatch.setattr(module, name, fault(getattr(module, name)))
    assert choose(use, dtype=dtype)[use.op].name == PYTORCH
    assert [*backends.faults()] == [(use.op, backend) for backend in BACKENDS[use.op][:-1]]
    for message in backends.faults().values():
        assert f"{use.op}: " in message and "its self-test found the " in message


WRONG = {
    "one row": lambda out: torch.cat((out[:, :-1], out[:, -1:] + 1), dim=1),
    "NaN": lambda out: out.masked_fill(torch.arange(out.shape[1])[None, :, None, None] == 150, torch.nan),
    "a gradient": lambda out: 2 * out - out.detach(),
}


@pytest.mark.parametrize("how", WRONG)
def test_a_wrong_kernel_is_replaced_by_the_next(pretend_gpu, monkeypatch, how):
    right = selftest.forgetting_attention

    def attention(*args, **options):
        out = right(*args, **options)
        return WRONG[how](out) if backends.is_usable("attention", GLUON) else out

    monkeypatch.setattr(selftest, "forgetting_attention", attention)
    found = choose(FOX)["attention"]
    assert found.name == TRITON and found.text.startswith("Triton 9.9.9, self-test within ")
    (message,) = backends.faults().values()
    assert "Gluon for Hopper is not used: with Triton 9.9.9 its self-test found the " in message
    assert "Triton runs instead: attention takes 1.3 to 1.5 times as long. To mend it, install a Triton" in message


def test_a_wrong_kernel_of_decoding_is_found(pretend_gpu, monkeypatch):
    right = selftest.forgetting_attention_decode
    monkeypatch.setattr(selftest, "forgetting_attention_decode", lambda *args: 1.02 * right(*args))
    assert choose(FOX)["attention"].name == GLUON
    assert choose(FOX, lengths=None)["attention"].name == PYTORCH
    assert all("found the output of decoding off by 2.0e-02" in message for message in backends.faults().values())


def test_kernels_that_do_not_compile_leave_pytorch_and_full_memory_is_no_fault_of_theirs(pretend_gpu, monkeypatch):
    errors = [torch.OutOfMemoryError("full"), RuntimeError("PTXAS error: no kernel image\nlots of assembly")]

    def broken(*args, **options):
        raise errors[0]

    monkeypatch.setattr(selftest, "forgetting_attention", broken)
    with pytest.raises(torch.OutOfMemoryError):
        choose(FOX)
    assert not backends.faults()
    errors.pop(0)
    assert choose(FOX)["attention"] == (PYTORCH, "PyTorch")
    first, second = backends.faults().values()
    assert (
        "Gluon for Hopper is not used" in first and "RuntimeError: PTXAS error: no kernel image. Triton runs" in first
    )
    assert "Triton is not used" in second and "PyTorch runs instead" in second and "lots of assembly" not in second


def test_a_self_test_works_inside_inference_and_uses_no_global_random_numbers(pretend_gpu):
    before = torch.get_rng_state()
    with torch.inference_mode():
        assert choose(FOX, OpUse("gla", 2, 16, 16), lengths=None)["attention"].name == GLUON
    assert torch.equal(torch.get_rng_state(), before)


def test_short_lengths_stand_for_long_ones():
    lengths = {16384: 2048, 2176: 384, 1000: 360, 300: 300, 64: 64}
    assert {length: selftest.problem_length(length) for length in lengths} == lengths


def test_the_log_says_the_error_and_what_is_not_reproducible(pretend_gpu, monkeypatch):
    use = OpUse("path_attention", 3, 16, 16)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for error, text in ((2.31e-3, "2.3e-03"), (0.0, "0.0e")):
        monkeypatch.setattr(selftest, "check", lambda *args: (error, "the output"))  # noqa: B023
        found = selftest.choose_backends([use], torch.bfloat16, torch.device("cuda", 0), [64])["path_attention"].text
        assert f"self-test within {text}" in found and found.endswith(", gradients not bitwise reproducible")


def test_what_fla_serves_is_tested_by_one_thread_at_a_time(pretend_gpu, monkeypatch):
    """Its kernels keep state of the whole process; those of others are tested side by side."""
    running, most = [], {"fla": 0, "all": 0}
    everyone = threading.Barrier(2)  # one recurrence, one other

    def chosen(op, *_):
        running.append(op)
        most["all"] = max(most["all"], len(running))
        most["fla"] = max(most["fla"], sum(name in ("kda", "gla") for name in running))
        if op != "gla":
            everyone.wait(60)
        running.remove(op)
        return selftest.Backend(PYTORCH, "PyTorch")

    monkeypatch.setattr(selftest, "_choose", chosen)
    choose(OpUse("kda", 2, 16, 16), OpUse("gla", 2, 16, 16), OpUse("swiglu", 1, 8, 8))
    assert most == {"fla": 1, "all": 2}


def test_threads_of_the_self_test_take_the_gpu_of_the_caller(pretend_gpu, monkeypatch):
    """They begin with the first."""
    devices = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(selftest, "check", lambda *args: (0.0, "the output"))
    selftest.choose_backends([FOX], torch.bfloat16, torch.device("cuda"), [64])
    assert devices == [torch.device("cuda", 3)]


# What models say of their calls is what they do.


def recorded_uses(model, dtype, monkeypatch) -> list[tuple]:
    """(op, query heads, key channels, value channels, dtype, options) of every call in a forward pass."""
    from forgetting_transformer.model import attention

    calls = []

    def record(module, name, op, heads_axis=2):
        original = getattr(module, name)

        def recorded(*args, op=op, **options):
            q, k, v = args[:3]
            if op == "recurrence":
                op = recurrence.Gates(options.get("beta"), options.get("log_decay")).op
            calls.append(
                (
                    op,
                    (v if op == "simple_gla" else q).shape[heads_axis],
                    k.shape[heads_axis],
                    q.shape[-1],
                    v.shape[-1],
                    {x.dtype for x in (q, k, v)},
                    options,
                )
            )
            return original(*args, **options)

        monkeypatch.setattr(module, name, recorded)

    record(attention, "forgetting_attention", "attention", heads_axis=1)
    record(attention, "causal_attention", "attention")
    for architecture in ("mamba2", "hgrn2", "delta_net"):
        module = importlib.import_module(f"forgetting_transformer.model.mixers.{architecture}")
        record(module, "recurrence", "recurrence")
    record(importlib.import_module("forgetting_transformer.model.mixers.path_fox"), "path_attention", "path_attention")
    with torch.no_grad(), torch.autocast("cpu", dtype):
        model.train()(input_ids=torch.randint(1, 61, (1, 8)))
    return calls


CASES = [(name, {}) for name in registry.model_names()] + [
    ("forgetting_transformer", {"fgate_type": "none", "use_rope": True}),
    ("forgetting_transformer", {"log_pruning_tolerance": -10.0}),
    ("forgetting_transformer", {"log_pruning_tolerance": -10.0, "qk_norm": True, "use_k_shift": True}),
    ("transformer", {"num_kv_heads": 1, "window_size": 4}),
    ("forgetting_transformer", {"num_kv_heads": 1, "window_size": 4, "log_pruning_tolerance": -10.0}),
]


@pytest.mark.parametrize("name, fields", CASES, ids=lambda x: x if isinstance(x, str) else "-".join(x) or "default")
def test_models_say_how_they_call_ops(name, fields, monkeypatch, dtype=torch.bfloat16):
    model = small(name, **fields)
    elsewhere = ("selective_scan", "short_convolution", "gated_norm", "swiglu", "residual_norm", "shift_norm")
    said = [use for use in model.op_uses() if use.op not in elsewhere]
    done = recorded_uses(model, dtype, monkeypatch)
    assert said or name == "samba"
    assert len(said) == len(done)
    for use, (op, heads, key_heads, key_dim, value_dim, dtypes, options) in zip(said, done, strict=True):
        assert (use.op, use.heads, use.key_dim, use.value_dim) == (op, heads, key_dim, value_dim)
        assert use.key_heads in (None, key_heads)
        assert dtypes == {dtype}
        if op == "attention":
            assert use.window == options.get("window_size")
            threshold = options.get("adaptive_threshold")
            assert use.pruning == ("auto" if isinstance(threshold, str) else None if threshold is None else "threshold")


def test_models_say_how_they_call_layers():
    def said(op, name, **fields):
        model = small(name, **fields)
        return model.config, {use for use in model.op_uses() if use.op == op}

    config, found = said("short_convolution", "gated_delta_net")
    assert found == {
        OpUse("short_convolution", config.num_heads, 4, config.key_size),
        OpUse("short_convolution", 0, 4, config.value_size),
    }
    gates = {"delta_net": {}, "gated_delta_net": {"is_gated": True}, "kda": {"is_gated": True, "activation": "sigmoid"}}
    for name, gate in gates.items():
        config, found = said("gated_norm", name)
        gate = gate or {"is_gated": config.use_gate}
        assert found == {OpUse("gated_norm", 1, 0, config.value_size // config.num_heads, **gate)}
    config, found = said("gated_norm", "mamba2")
    assert found == {OpUse("gated_norm", config.n_groups, 1, config.num_heads * config.head_dim, is_gated=True)}
    config, found = said("selective_scan", "samba")
    assert found == {OpUse("selective_scan", 1, config.state_size, config.inner_size)}

    model = small("forgetting_transformer", num_hidden_layers=1, **PRO)
    width, mlp, heads = model.config.hidden_size, model.config.mlp_width, model.config.num_heads
    assert {use for use in model.op_uses() if use.op != "attention"} == {
        OpUse("residual_norm", 1, width, width),
        OpUse("swiglu", 1, mlp, mlp),
        OpUse("shift_norm", heads, 0, width),
        OpUse("shift_norm", heads, width, width),
        OpUse("gated_norm", heads, 0, width, is_gated=True, activation="sigmoid"),
    }


# A Triton that is not there, is broken, or is a stranger.


BARE = """
import sys, types, importlib.metadata, importlib.util, warnings
import torch
from forgetting_transformer.ops import backends
from forgetting_transformer.ops.forgetting_attention import dispatch
torch.cuda.get_device_capability = lambda index: (9, 0)
{fake}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    print(*(backends.has_triton("attention", dispatch._KERNELS, 0) for _ in range(2)))
print(*(str(w.message) for w in caught), sep="\\n")
"""
MISSING = """
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")
sys.meta_path.insert(0, Hidden())
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else find(name, *rest)
version = importlib.metadata.version
def no_version(name):
    if name == "triton":
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.metadata.version = no_version
"""
BROKEN = """
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "triton.runtime":
            raise ModuleNotFoundError("No module named 'triton.backends.amd'", name="triton.backends.amd")
sys.meta_path.insert(0, Broken())
for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
    del sys.modules[name]
importlib.metadata.version = lambda name: "3.9.0"
"""


def run_python(code: str, fake: str) -> str:
    done = run_command("-c", code.format(fake=fake))
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize(
    "fake, cause, cure",
    [
        (MISSING, "it is not installed. PyTorch runs instead", "pip install triton"),
        (
            BROKEN,
            "Triton 3.9.0 is installed but broken, ModuleNotFoundError: No module named 'triton.backends.amd'",
            "pip install --force-reinstall --no-deps triton==3.9.0",
        ),
    ],
    ids=["missing", "broken"],
)
def test_a_triton_that_cannot_be_used_is_one_warning(fake, cause, cure):
    said = run_python(BARE, fake)
    assert said.startswith("False False") and said.count("attention:") == 1 and cause in said and cure in said


GLUON_IS_THERE = """
import importlib, warnings, torch
torch.cuda.get_device_capability = lambda index: (9, 0)
{fake}
launcher = importlib.import_module("forgetting_transformer.ops.forgetting_attention.triton")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    print(launcher.has_gluon(0, 64), launcher.has_gluon(0, 64), launcher.has_gluon(0, 80))
print(*(str(w.message) for w in caught), sep="\\n")
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_names_decide_whether_gluon_runs_and_not_versions():
    assert run_python(GLUON_IS_THERE, "import triton; triton.__version__ = '4.2.0'").split() == [
        "True",
        "True",
        "False",
    ]
    missing = "import triton.experimental.gluon.language.nvidia.hopper as hopper; del hopper.warpgroup_mma"
    said = run_python(GLUON_IS_THERE, missing)
    assert said.startswith("False False False\n") and said.count("attention:") == 1
    assert "cannot import name 'warpgroup_mma'" in said
    assert "Triton runs instead: attention takes 1.3 to 1.5 times as long" in said


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_a_gluon_kernel_that_does_not_compile_falls_back_and_a_gpu_that_fails_does_not(monkeypatch):
    launcher = importlib.import_module("forgetting_transformer.ops.forgetting_attention.triton")
    errors, calls = [RuntimeError("PassManager::run failed"), RuntimeError("Triton Error [CUDA]: illegal access")], []

    def fails(*args):
        calls.append(args)
        raise errors[0]

    monkeypatch.setattr(launcher, "_hopper", lambda kernel: SimpleNamespace(forward=fails))
    inputs = SimpleNamespace(gluon={"forward"})
    with pytest.warns(RuntimeWarning, match="forward kernel does not run with Triton .*PassManager::run"):
        assert launcher._on_hopper("forward", inputs, torch.zeros(1)) is None
    assert launcher._on_hopper("forward", inputs, torch.zeros(1)) is None
    assert len(calls) == 1
    backends._faults.clear()
    with pytest.raises(RuntimeError, match="illegal access"):
        errors.pop(0)
        launcher._on_hopper("forward", SimpleNamespace(gluon={"forward"}), torch.zeros(1))
    assert not backends.faults()


def test_a_recurrence_whose_kernel_does_not_compile_runs_in_pytorch(monkeypatch):
    """As where the package is there and the compiler is not: the error comes from inside of Triton."""
    from forgetting_transformer.ops.recurrence import Gates, chunked, fla, fla_on_hopper

    monkeypatch.setattr(fla_on_hopper, "is_hopper", lambda device_index: False)

    def no_compiler(**tensors):
        exec("raise OSError('no C compiler ' + 400 * 'x' + ' at all')", {"__name__": "triton.runtime.build"})

    q, k, v = torch.randn(3, 1, 70, 2, 16).unbind()
    beta, log_decay = torch.rand(1, 70, 2), -torch.rand(1, 70, 2)
    arguments = (q, k, v, Gates(beta, log_decay), 1.0, None)
    monkeypatch.setitem(fla._loaded, "gated_delta_rule", no_compiler)
    with pytest.warns(
        RuntimeWarning, match=r"gated_delta_rule: .* OSError: no C compiler x+ … x+ at all\. PyTorch runs instead"
    ):
        out, _ = fla.linear_recurrence(*arguments)
    assert torch.equal(out, chunked.linear_recurrence(*arguments)[0])
    assert not backends.is_usable("gated_delta_rule", FLA)
    assert (
        "To mend it, look whether a C compiler and Python's headers are installed"
        in backends.faults()["gated_delta_rule", FLA]
    )
