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
from forgetting_transformer.ops.backends import BACKENDS, FLA, HOPPER, PYTORCH, TRITON, OpUse
from tests.model.small_models import small

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
        assert found.name == HOPPER
        assert found.text.startswith("Hopper kernels, Triton 9.9.9, self-test within ")
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


GROUPED = OpUse("simple_gla", 6, 16, 32, key_heads=2)
RECURRENCE = (selftest.recurrence, "recurrence")
CONVOLUTION = (selftest.short_convolution, "short_convolution")
# A use, the function that stands in for its kernel, and faults of it.
OPS = [
    (OpUse("kda", 3, 16, 32), *RECURRENCE, scaled),
    *((GROUPED._replace(packed=packed), *RECURRENCE, scaled) for packed in (False, True)),
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
        return WRONG[how](out) if backends.is_usable("attention", HOPPER) else out

    monkeypatch.setattr(selftest, "forgetting_attention", attention)
    found = choose(FOX)["attention"]
    assert found.name == TRITON and found.text.startswith("Triton 9.9.9, self-test within ")
    (message,) = backends.faults().values()
    assert "Hopper kernels cannot be used: with Triton 9.9.9 its self-test found the " in message
    assert "Triton runs instead: attention takes 1.3 to 1.5 times as long. To mend it, install a Triton" in message


def test_a_wrong_kernel_of_decoding_is_found(pretend_gpu, monkeypatch):
    right = selftest.forgetting_attention_decode
    monkeypatch.setattr(selftest, "forgetting_attention_decode", lambda *args: 1.02 * right(*args))
    assert choose(FOX)["attention"].name == HOPPER
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
        "Hopper kernels cannot be used" in first and "RuntimeError: PTXAS error: no kernel image. Triton runs" in first
    )
    assert "Triton cannot be used" in second and "PyTorch runs instead" in second and "lots of assembly" not in second


def test_a_self_test_works_inside_inference_and_uses_no_global_random_numbers(pretend_gpu):
    before = torch.get_rng_state()
    with torch.inference_mode():
        assert choose(FOX, OpUse("gla", 2, 16, 16), lengths=None)["attention"].name == HOPPER
    assert torch.equal(torch.get_rng_state(), before)


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


def recorded_uses(model, monkeypatch) -> list[OpUse]:
    """The use that tensors and options of each call show, in a forward pass under autocast."""
    from forgetting_transformer.model import attention

    calls = []

    def record(module, name, op=None, heads_axis=2):
        original = getattr(module, name)

        def recorded(q, k, v, *args, **options):
            found = op or recurrence.Gates(options.get("beta"), options.get("log_decay")).op
            heads, key_heads = (x.shape[heads_axis] for x in (v if found == "simple_gla" else q, k))
            threshold, window = options.get("adaptive_threshold"), options.get("window_size")
            pruning = "auto" if isinstance(threshold, str) else None if threshold is None else "threshold"
            assert {x.dtype for x in (q, k, v)} == {torch.bfloat16}
            calls.append(OpUse(found, heads, q.shape[-1], v.shape[-1], key_heads, window=window, pruning=pruning))
            return original(q, k, v, *args, **options)

        monkeypatch.setattr(module, name, recorded)

    record(attention, "forgetting_attention", "attention", heads_axis=1)
    record(attention, "causal_attention", "attention")
    for mixer, name, op in (
        *((mixer, "recurrence", None) for mixer in ("mamba2", "hgrn2", "delta_net")),
        ("path_fox", "path_attention", "path_attention"),
    ):
        record(importlib.import_module(f"forgetting_transformer.model.mixers.{mixer}"), name, op)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
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
def test_models_say_how_they_call_ops(name, fields, monkeypatch):
    model = small(name, **fields)
    elsewhere = ("selective_scan", "short_convolution", "gated_norm", "swiglu", "residual_norm", "shift_norm")
    said = [use for use in model.op_uses() if use.op not in elsewhere]
    done = recorded_uses(model, monkeypatch)
    assert said or name == "samba"
    for use, call in zip(said, done, strict=True):
        assert use._replace(key_heads=use.key_heads or call.key_heads, is_gated=False) == call


# Packages that are not there, are broken, or are strangers.


@pytest.mark.parametrize(
    ("op", "version", "missing", "message"),
    [
        ("attention", None, "triton", "it is not installed. PyTorch runs instead.* pip install triton"),
        (
            "attention", "3.9.0", "triton.backends.amd", "Triton 3.9.0 is installed but broken, ModuleNotFoundError: "
            "No module named 'triton.backends.amd'.* pip install --force-reinstall --no-deps triton==3.9.0",
        ),
        ("kda", "0.6.0", "einops", "fla-core 0.6.0 needs einops, which is not installed.* pip install einops"),
        ("kda", "0.6.0", "fla.layers", "needs flash-linear-attention, which is not installed.* pip install -e "),
    ],
)  # fmt: skip
def test_a_package_that_cannot_be_used_is_one_warning(op, version, missing, message, monkeypatch):
    def fails(module):
        raise ModuleNotFoundError(f"No module named '{missing}'", name=missing)

    monkeypatch.setattr(backends, "installed_version", lambda package: version)
    monkeypatch.setattr(backends.importlib, "import_module", fails)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    backends._loads_triton.cache_clear()
    with pytest.warns(RuntimeWarning, match=f"{op}: .*{message}") as caught:
        for _ in range(2):
            found = (
                backends.has_triton(op, "kernels", 0) if op == "attention" else backends.load_fla(op, {"": ("", "")})
            )
            assert not found
    assert len(caught) == 1
    backends._loads_triton.cache_clear()


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


@needs_triton
def test_names_decide_whether_hopper_kernels_run_and_not_versions(monkeypatch):
    def missing(kernel="forward"):
        raise ImportError("cannot import name 'warpgroup_mma'")

    launcher = importlib.import_module("forgetting_transformer.ops.forgetting_attention.triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(launcher.triton, "__version__", "4.2.0")
    launcher._loads_hopper.cache_clear()
    assert launcher.has_hopper_kernels(0, 64) and not launcher.has_hopper_kernels(0, 80)
    monkeypatch.setattr(launcher, "_hopper", missing)
    launcher._loads_hopper.cache_clear()
    message = "cannot import name 'warpgroup_mma'.* Triton runs instead: attention takes 1.3 to 1.5 times as long"
    with pytest.warns(RuntimeWarning, match=message) as caught:
        assert not launcher.has_hopper_kernels(0, 64) and not launcher.has_hopper_kernels(0, 128)
    assert len(caught) == 1
    launcher._loads_hopper.cache_clear()


@needs_triton
def test_a_hopper_kernel_that_does_not_compile_falls_back_and_a_gpu_that_fails_does_not(monkeypatch):
    launcher = importlib.import_module("forgetting_transformer.ops.forgetting_attention.triton")
    errors, calls = [RuntimeError("PassManager::run failed"), RuntimeError("Triton Error [CUDA]: illegal access")], []

    def fails(*args):
        calls.append(args)
        raise errors[0]

    monkeypatch.setattr(launcher, "_hopper", lambda kernel: SimpleNamespace(forward=fails))
    inputs = SimpleNamespace(hopper={"forward"})
    with pytest.warns(RuntimeWarning, match="forward kernel does not run with Triton .*PassManager::run"):
        assert launcher._on_hopper("forward", inputs, torch.zeros(1)) is None
    assert launcher._on_hopper("forward", inputs, torch.zeros(1)) is None
    assert len(calls) == 1
    backends._faults.clear()
    with pytest.raises(RuntimeError, match="illegal access"):
        errors.pop(0)
        launcher._on_hopper("forward", SimpleNamespace(hopper={"forward"}), torch.zeros(1))
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
