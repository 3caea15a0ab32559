"""Self-tests find kernels that are wrong, rule them out, and describe what is left; models say how they call ops.

Without a GPU the op's PyTorch path stands in for the kernels.
"""

import importlib.util
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

from forgetting_transformer.model import registry
from forgetting_transformer.ops import backends, recurrence, selftest
from forgetting_transformer.ops.backends import FLA, GLUON, PYTORCH, TRITON, OpUse
from tests.model.small_models import PRO, small
from tests.waiting import HANG

FOX = OpUse("attention", heads=3, key_dim=16, value_dim=16, is_gated=True, pruning="threshold")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_faults(monkeypatch):
    monkeypatch.setattr(backends, "_faults", {})


@pytest.fixture
def pretend_gpu(monkeypatch):
    """Every attention is served by the fastest backend that is not ruled out, every recurrence by FLA."""

    def attention(use, dtype, device):
        return next(
            name for name in backends.BACKENDS["attention"] if name == PYTORCH or backends.is_usable("attention", name)
        )

    def recurrence(use, dtype, device):
        return FLA if backends.is_usable(use.op, FLA) else PYTORCH

    monkeypatch.setattr(selftest, "_attention_of", attention)
    monkeypatch.setattr(selftest, "_recurrence_of", recurrence)
    monkeypatch.setattr(backends, "installed_version", lambda package: "9.9.9")


def choose(*uses, dtype=torch.float32, lengths=(512,)):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return selftest.choose_backends(uses, dtype, CPU, lengths)


def test_nothing_is_tested_without_a_gpu(monkeypatch):
    monkeypatch.setattr(selftest, "check_attention", None)
    assert choose(FOX, FOX, OpUse("selective_scan", 1, 4, 64)) == {
        "attention": (PYTORCH, "PyTorch"),
        "selective_scan": (PYTORCH, "PyTorch"),
    }


@pytest.mark.parametrize("pruning", [None, "threshold", "auto"])
@pytest.mark.parametrize("window, lengths", [(None, (384, 300)), (100, (384,)), (None, None), (64, None)])
def test_right_kernels_pass(pretend_gpu, pruning, window, lengths):
    plain = FOX._replace(is_gated=False, pruning=None, key_heads=1, window=window)
    for use in (FOX._replace(window=window, pruning=pruning), plain):
        found = choose(use, lengths=lengths)["attention"]
        assert found.name == GLUON
        assert found.text.startswith("Gluon for Hopper, Triton 9.9.9, self-test within ")
    assert not backends.faults()


@pytest.mark.parametrize("op", ["simple_gla", "gla", "delta_rule", "gated_delta_rule", "kda"])
def test_right_recurrences_pass(pretend_gpu, op):
    found = choose(OpUse(op, heads=3, key_dim=16, value_dim=32))[op]
    assert found.name == FLA and found.text.startswith("FLA 9.9.9, Triton 9.9.9, self-test within ")


@pytest.mark.parametrize("fault", [None, "skip", "step", "k"])
def test_heads_that_share_keys_are_tested_with_all_that_the_kernels_take(pretend_gpu, monkeypatch, fault):
    right = selftest.recurrence.recurrence

    def walk(q, k, v, **options):
        if q.dtype != torch.float64:  # which is the reference
            if fault == "k":
                k = k.roll(1, dims=2)
            elif fault is not None:
                options[fault] = 1.1 * options[fault]
        return right(q, k, v, **options)

    monkeypatch.setattr(selftest.recurrence, "recurrence", walk)
    monkeypatch.setattr(
        selftest, "_recurrence_of", lambda use, *_: TRITON if backends.is_usable(use.op, TRITON) else PYTORCH
    )
    found = choose(OpUse("simple_gla", heads=6, key_dim=16, value_dim=32, key_heads=2))["simple_gla"]
    assert found.name == (TRITON if fault is None else PYTORCH)
    if fault is not None:
        (message,) = backends.faults().values()
        assert "flash-linear-attention runs instead: it takes several times as long" in message


WRONG = {
    "an output": lambda out: out * 1.02,
    "one row": lambda out: torch.cat((out[:, :-1], out[:, -1:] + 1), dim=1),
    "NaN": lambda out: out.masked_fill(torch.arange(out.shape[1])[None, :, None, None] == 150, torch.nan),
    "the last head": lambda out: torch.cat((out[:, :, :-1], 0.9 * out[:, :, -1:]), dim=2),
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
    assert "Triton runs instead: attention takes 1.1 to 1.2 times as long. To mend it, install a Triton" in message


def test_kernels_that_do_not_compile_leave_pytorch(pretend_gpu, monkeypatch):
    def broken(*args, **options):
        raise RuntimeError("PTXAS error: no kernel image\nlots of assembly")

    monkeypatch.setattr(selftest, "forgetting_attention", broken)
    assert choose(FOX)["attention"] == (PYTORCH, "PyTorch")
    first, second = backends.faults().values()
    assert (
        "Gluon for Hopper is not used" in first and "RuntimeError: PTXAS error: no kernel image. Triton runs" in first
    )
    assert "Triton is not used" in second and "PyTorch runs instead" in second and "lots of assembly" not in second


def test_a_wrong_recurrence_leaves_pytorch(pretend_gpu, monkeypatch):
    right = selftest.recurrence.recurrence
    monkeypatch.setattr(selftest.recurrence, "recurrence", lambda *x, **o: (right(*x, **o)[0] * 1.1, None))
    assert choose(OpUse("gla", 2, 16, 16))["gla"].name == PYTORCH
    assert ("gla", FLA) in backends.faults() and backends.is_usable("delta_rule", FLA)


def test_running_out_of_memory_is_no_fault_of_a_kernel(pretend_gpu, monkeypatch):
    def full(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(selftest, "forgetting_attention", full)
    with pytest.raises(torch.OutOfMemoryError):
        choose(FOX)
    assert not backends.faults()


def test_no_global_random_numbers_are_used(pretend_gpu):
    before = torch.get_rng_state()
    choose(FOX, OpUse("gla", 2, 16, 16), lengths=None)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_self_test_works_inside_inference(pretend_gpu):
    with torch.inference_mode():
        assert choose(FOX)["attention"].name == GLUON


@pytest.mark.parametrize(
    "length, short", [(16384, 2048), (4096, 2048), (2048, 2048), (2176, 384), (1000, 360), (300, 300), (64, 64)]
)
def test_short_lengths_stand_for_long_ones(length, short):
    assert selftest.problem_length(length) == short


@pytest.mark.parametrize(
    "error, text", [(2.31e-3, "3e-3"), (2e-3, "2e-3"), (9.2e-4, "1e-3"), (0.0, "0e-16"), (1.0e-5, "1e-5")]
)
def test_errors_are_rounded_up(error, text):
    assert selftest._rounded_up(error) == text


# What models say of their calls is what they do.


def recorded_uses(model, dtype, monkeypatch) -> list[tuple]:
    """(op, query heads, key channels, value channels, dtype, options) of every call in a forward pass."""
    import forgetting_transformer.model.mixers.forgetting_attention as fox
    import forgetting_transformer.model.mixers.transformer as transformer

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

    record(fox, "forgetting_attention", "attention", heads_axis=1)
    record(fox, "causal_attention", "attention")
    record(transformer, "causal_attention", "attention")
    for architecture in ("mamba2", "hgrn2", "delta_net", "gated_delta_net", "kda"):
        module = importlib.import_module(f"forgetting_transformer.model.mixers.{architecture}")
        record(module, "recurrence", "recurrence")
    record(importlib.import_module("forgetting_transformer.model.mixers.path_fox"), "path_attention", "path_attention")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        model.train()(input_ids=torch.randint(1, 61, (1, 8)))
    return calls


CASES = [(name, {}) for name in registry.model_names()] + [
    ("forgetting_transformer", {"fgate_type": "none", "use_rope": True}),
    ("forgetting_transformer", {"log_pruning_tolerance": -10.0}),
    ("forgetting_transformer", {"log_pruning_tolerance": -10.0, "qk_norm": True, "use_k_shift": True}),
    ("transformer", {"num_kv_heads": 1, "window_size": 4}),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name, fields", CASES, ids=lambda x: x if isinstance(x, str) else "-".join(x) or "default")
def test_models_say_how_they_call_ops(name, fields, dtype, monkeypatch):
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


def test_models_say_how_they_call_short_convolutions():
    model = small("gated_delta_net")
    said = [use for use in model.op_uses() if use.op == "short_convolution"]
    heads, key_size, value_size = model.config.num_heads, model.config.key_size, model.config.value_size
    uses = [OpUse("short_convolution", *of) for of in ((heads, 4, key_size), (heads, 4, key_size), (0, 4, value_size))]
    assert said == uses * model.config.num_hidden_layers


@pytest.mark.parametrize("heads", [0, 3])
def test_short_convolutions_are_tested_and_ruled_out_where_wrong(heads, monkeypatch):
    use = OpUse("short_convolution", heads, 4, 48)
    monkeypatch.setattr(
        selftest,
        "_convolution_of",
        lambda use, dtype, device: TRITON if backends.is_usable("short_convolution", TRITON) else PYTORCH,
    )
    monkeypatch.setattr(backends, "installed_version", lambda package: "9.9.9")
    for lengths in (None, (4096,), (100, 512)):
        name, text = choose(use, lengths=lengths)["short_convolution"]
        assert name == TRITON and text.startswith("Triton 9.9.9, self-test within ")
    right = selftest.short_convolution.short_convolution

    def wrong(x, *args, **options):
        y, last = right(x, *args, **options)
        return (y if x.dtype == torch.float64 else y * 1.01), last

    monkeypatch.setattr(selftest.short_convolution, "short_convolution", wrong)
    assert choose(use)["short_convolution"].name == PYTORCH
    assert "short_convolution: Triton is not used" in backends.faults()["short_convolution", TRITON]


def test_models_say_how_they_call_gated_norms():
    said = {
        name: {use for use in small(name).op_uses() if use.op == "gated_norm"}
        for name in ("delta_net", "gated_delta_net", "kda", "mamba2")
    }
    sizes = {name: small(name).config for name in said}
    delta, gated, kda, mamba = (sizes[name] for name in said)
    assert said == {
        "delta_net": {OpUse("gated_norm", 1, 0, delta.value_size // delta.num_heads, is_gated=delta.use_gate)},
        "gated_delta_net": {OpUse("gated_norm", 1, 0, gated.value_size // gated.num_heads, is_gated=True)},
        "kda": {OpUse("gated_norm", 1, 0, kda.value_size // kda.num_heads, is_gated=True, activation="sigmoid")},
        "mamba2": {OpUse("gated_norm", mamba.n_groups, 1, mamba.num_heads * mamba.head_dim, is_gated=True)},
    }


@pytest.mark.parametrize("use", [OpUse("gated_norm", 3, 1, 48, is_gated=True), OpUse("gated_norm", 1, 0, 48)])
def test_gated_norms_are_tested_and_ruled_out_where_wrong(use, monkeypatch):
    monkeypatch.setattr(
        selftest, "_norm_of", lambda *_: TRITON if backends.is_usable("gated_norm", TRITON) else PYTORCH
    )
    monkeypatch.setattr(backends, "installed_version", lambda package: "9.9.9")
    for lengths in (None, (4096,), (100, 512)):
        name, text = choose(use, lengths=lengths)["gated_norm"]
        assert name == TRITON and text.startswith("Triton 9.9.9, self-test within ")
    right = selftest.norm.gated_rms_norm
    monkeypatch.setattr(
        selftest.norm,
        "gated_rms_norm",
        lambda x, *args, **options: right(x, *args, **options) * (1 if x.dtype == torch.float64 else 1.01),
    )
    assert choose(use)["gated_norm"].name == PYTORCH


def test_models_say_how_they_call_layers():
    model = small("forgetting_transformer", num_hidden_layers=1, **PRO)
    width, mlp = model.config.hidden_size, model.config.mlp_width
    heads = model.config.num_heads
    said = {use for use in model.op_uses() if use.op != "attention"}
    assert said == {
        OpUse("residual_norm", 1, width, width),
        OpUse("swiglu", 1, mlp, mlp),
        OpUse("shift_norm", heads, 0, width),
        OpUse("shift_norm", heads, width, width),
        OpUse("gated_norm", heads, 0, width, is_gated=True, activation="sigmoid"),
    }
    assert not {"swiglu", "residual_norm", "shift_norm"} & choose(*said).keys()


@pytest.mark.parametrize("wrong", [False, True])
def test_path_attention_is_tested_and_ruled_out_where_wrong(wrong, monkeypatch):
    use = OpUse("path_attention", 3, 16, 16)
    monkeypatch.setattr(selftest, "_PATH_LENGTH", 70)
    monkeypatch.setattr(
        selftest,
        "_path_attention_of",
        lambda use, dtype, device: FLA if backends.is_usable("path_attention", FLA) else PYTORCH,
    )
    monkeypatch.setattr(backends, "installed_version", lambda package: "9.9.9")
    right = selftest.path_attention.path_attention

    def gates_are_off(q, k, v, w, beta, log_fgate, **options):
        return right(q, k, v, w, beta, log_fgate if q.dtype == torch.float64 else 1.5 * log_fgate, **options)

    if wrong:
        monkeypatch.setattr(selftest.path_attention, "path_attention", gates_are_off)
    name, text = choose(use, dtype=torch.bfloat16)["path_attention"]
    assert name == (PYTORCH if wrong else FLA)
    assert wrong or text.startswith("FLA 9.9.9, Triton 9.9.9, self-test within ")
    assert [*backends.faults()] == [("path_attention", FLA)] * wrong


def test_the_log_says_which_kernels_are_not_reproducible(monkeypatch):
    monkeypatch.setattr(selftest, "_path_attention_of", lambda *args: FLA)
    monkeypatch.setattr(selftest, "check_path_attention", lambda *args: (1e-3, "the output"))
    use = OpUse("path_attention", 3, 16, 16)
    found = selftest.choose_backends([use], torch.bfloat16, torch.device("cuda", 0), [64])
    assert found["path_attention"].text.endswith("self-test within 1e-3, gradients not bitwise reproducible")


def test_samba_says_how_it_calls_the_scan():
    config = small("samba").config
    said = [use for use in small("samba").op_uses() if use.op == "selective_scan"]
    layers = sum(not config.has_attention(i) for i in range(config.num_hidden_layers))
    assert said == [OpUse("selective_scan", 1, config.state_size, config.inner_size)] * layers


def test_selective_scans_are_tested_and_ruled_out_where_wrong(monkeypatch):
    use = OpUse("selective_scan", 1, 4, 48)
    monkeypatch.setattr(
        selftest, "_scan_of", lambda *_: TRITON if backends.is_usable("selective_scan", TRITON) else PYTORCH
    )
    monkeypatch.setattr(backends, "installed_version", lambda package: "9.9.9")
    for lengths in (None, (4096,)):
        name, text = choose(use, lengths=lengths)["selective_scan"]
        assert name == TRITON and text.startswith("Triton 9.9.9, self-test within ")
    right = selftest.recurrence.selective_scan

    def wrong(x, *args, **options):
        y, state = right(x, *args, **options)
        return (y if x.dtype == torch.float64 else y * 1.01), state

    monkeypatch.setattr(selftest.recurrence, "selective_scan", wrong)
    assert choose(use)["selective_scan"].name == PYTORCH
    assert "selective_scan: Triton is not used" in backends.faults()["selective_scan", TRITON]


# A Triton that is not there, is broken, or is a stranger.


BARE = """
import sys, types, importlib.metadata, importlib.util, warnings
import torch
from forgetting_transformer.ops.forgetting_attention import dispatch
torch.cuda.get_device_capability = lambda index: (9, 0)
{fake}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    print(dispatch._load_kernel(0), dispatch._load_kernel(0))
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


def bare(fake: str) -> str:
    command = [sys.executable, "-c", BARE.format(fake=fake)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=HANG).stdout


@pytest.mark.slow
def test_without_triton_one_warning_says_what_to_install():
    said = bare(MISSING)
    assert said.count("attention:") == 1 and said.startswith("False False")
    assert "Triton is not used: it is not installed. PyTorch runs instead" in said
    assert "To mend it, pip install triton" in said


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_a_broken_triton_has_a_message_of_its_own():
    said = bare(BROKEN)
    assert said.count("attention:") == 1 and said.startswith("False False")
    assert "Triton 3.9.0 is installed but broken, ModuleNotFoundError: No module named 'triton.backends.amd'" in said
    assert "pip install --force-reinstall --no-deps triton==3.9.0" in said


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize(
    "fake, cause",
    [
        ("", None),
        ("import triton; triton.__version__ = '4.2.0'", None),
        (
            "import triton.experimental.gluon.language.nvidia.hopper as hopper; del hopper.warpgroup_mma",
            "cannot import name 'warpgroup_mma'",
        ),
    ],
    ids=["as installed", "an unknown version", "a missing name"],
)
def test_names_decide_whether_gluon_runs_and_not_versions(fake, cause):
    code = """
import warnings
import torch
import importlib
torch.cuda.get_device_capability = lambda index: (9, 0)
{fake}
launcher = importlib.import_module("forgetting_transformer.ops.forgetting_attention.triton")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    print(launcher.has_gluon(0, 64), launcher.has_gluon(0, 64), launcher.has_gluon(0, 80))
print(*(str(w.message) for w in caught), sep="\\n")
"""
    command = [sys.executable, "-c", code.format(fake=fake)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=HANG).stdout
    if cause is None:
        assert said.split() == ["True", "True", "False"]
    else:
        assert said.startswith("False False False\n") and cause in said and said.count("attention:") == 1
        assert "Triton runs instead: attention takes 1.1 to 1.2 times as long" in said


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize(
    "error",
    [AttributeError("module 'gl' has no attribute 'NVMMASharedLayout'"), RuntimeError("PassManager::run failed")],
)
def test_a_gluon_kernel_that_does_not_compile_falls_back_to_triton(monkeypatch, error):
    launcher = importlib.import_module("forgetting_transformer.ops.forgetting_attention.triton")
    calls = []

    def fails(*args):
        calls.append(args)
        raise error

    monkeypatch.setattr(launcher, "_hopper", lambda kernel: SimpleNamespace(forward=fails))
    inputs = SimpleNamespace(gluon={"forward"})
    with pytest.warns(RuntimeWarning, match=f"forward kernel does not run with Triton .*{error.args[0][:20]}"):
        assert launcher._on_hopper("forward", inputs, torch.zeros(1)) is None
    assert launcher._on_hopper("forward", inputs, torch.zeros(1)) is None
    assert len(calls) == 1


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), RuntimeError("Triton Error [CUDA]: illegal access")])
def test_a_gpu_that_fails_is_no_fault_of_the_compiler(monkeypatch, error):
    launcher = importlib.import_module("forgetting_transformer.ops.forgetting_attention.triton")

    def fails(*args):
        raise error

    monkeypatch.setattr(launcher, "_hopper", lambda kernel: SimpleNamespace(forward=fails))
    with pytest.raises(type(error)):
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
