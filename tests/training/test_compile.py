"""train.compile: what `auto` chooses, what a checkpoint records, every architecture, and nothing silently left out."""

import contextlib
import inspect
import json
import logging
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric import Fabric
from omegaconf import OmegaConf
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from forgetting_transformer.ops import backends, columns, compiling
from forgetting_transformer.ops.layers import cross_entropy
from forgetting_transformer.ops.selftest import Backend
from forgetting_transformer.train import keep_compiled_code
from forgetting_transformer.training import Config, ConfigError, parse, setup
from forgetting_transformer.training.execution import choice as execution
from forgetting_transformer.training.execution import compilation, hardware, inductor
from forgetting_transformer.training.execution.choice import Execution
from forgetting_transformer.training.execution.compilation import Compilation
from forgetting_transformer.training.parallel.sharding import shard, units
from tests.model.small_models import SMALL_FIELDS
from tests.tiny import VOCAB
from tests.training.conftest import STEP, assert_same_tensors, changed, lines, losses, train

INFO = SimpleNamespace(vocab_size=VOCAB, bos_token_id=0, eos_token_id=0)
ATTENTION = {"attention": Backend("triton", "Triton 3.6.0")}


def warnings(caplog) -> list[str]:
    """What this project warned of; torch.compile logs as well."""
    ours = (record for record in caplog.records if record.name.startswith("forgetting_transformer"))
    return [record.getMessage() for record in ours if record.levelno >= logging.WARNING]


@pytest.fixture(autouse=True)
def compiler_settings():
    """What a run sets in torch.compile is for its process, and must not stay for the tests that come after."""
    with torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit):
        yield


@pytest.fixture
def working_triton(monkeypatch):
    monkeypatch.setattr(execution, "_obstacle", lambda device: None)


# What `auto` comes to


def test_a_new_run_compiles_on_cuda_and_nowhere_else_and_one_that_continues_does_as_before(working_triton, caplog):
    for device, compiles in (("cuda", True), ("cpu", False), ("mps", False)):
        found = execution.choose("auto", torch.device(device), None, ATTENTION)
        assert found == Execution(compiles, device, {"attention": "triton"})
        before = Execution(not compiles, device, {"attention": "triton"})
        assert execution.choose("auto", torch.device(device), before, ATTENTION) == before
        assert execution.choose(not compiles, torch.device(device), before, ATTENTION) == before
    assert not warnings(caplog)


def test_another_choice_is_one_warning_that_names_all_that_changed(working_triton, caplog):
    before = Execution(False, "cuda", {"attention": "hopper", "gla": "fla", "an op that is gone": "fla"})
    now = ATTENTION | {"gla": Backend("fla", ""), "a new op": Backend("pytorch", "")}
    assert execution.choose(True, torch.device("cuda"), before, now).compile
    assert warnings(caplog) == [
        "not bitwise from here: attention was hopper and is triton now; train.compile was False and is True now"
    ]


def test_without_a_triton_that_works_auto_warns_and_true_is_refused(monkeypatch, caplog):
    monkeypatch.setattr(execution, "_obstacle", lambda device: "no Triton")
    assert not execution.choose("auto", torch.device("cuda"), None, {}).compile
    assert warnings(caplog) == ["train.compile=auto: nothing is compiled, which about halves the speed: no Triton"]
    with pytest.raises(ConfigError, match=r"train\.compile=true cannot work here: no Triton"):
        execution.choose(True, torch.device("cuda"), None, {})
    assert not execution.choose(False, torch.device("cuda"), None, {}).compile


# Every architecture


@pytest.fixture
def captured(monkeypatch, tmp_path):
    """torch.compile that captures graphs and runs them as they are; counters that begin at 0."""
    monkeypatch.setattr(
        compiling, "compiled", lambda function, **_: torch.compile(function, dynamic=False, backend="eager")
    )
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    cross_entropy._compiled_slice_loss.cache_clear()
    torch.compiler.reset()
    from torch._dynamo.utils import counters

    counters.clear()
    yield counters
    cross_entropy._compiled_slice_loss.cache_clear()
    torch.compiler.reset()
    counters.clear()


def architecture(tiny: dict, name: str, **train) -> dict:
    fields = {"hidden_size": 32, "num_hidden_layers": 2, **SMALL_FIELDS[name], "initializer_range": 0.02}
    if name == "forgetting_transformer":
        fields |= tiny["model"]["config"] | {"log_pruning_tolerance": -10.0}
    return changed(tiny, model={"name": name, "config": fields}, train=tiny["train"] | train)


@contextlib.contextmanager
def one_process_group(folder: Path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def build(config: Config) -> nn.Module:
    return setup.build_model(config, INFO)


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "checkpointing"), [("forgetting_transformer", True), ("hybrid", False)])
def test_blocks_of_a_kind_share_one_graph_per_shape(captured, tiny, tmp_path, caplog, name, checkpointing):
    """Without breaks, in training and in evaluations of another length; a hybrid has two kinds, and recurrences."""
    config = parse(OmegaConf.create(architecture(tiny, name, compile=True, gradient_checkpointing=checkpointing)))
    watch, ids = Compilation(config, torch.device("cpu")), tokens(2, 40)
    want = build(config).train()(input_ids=ids, labels=ids).loss
    with one_process_group(tmp_path):
        model = build(config)
        sharded = shard(model, init_device_mesh("cpu", (1,)), units(model))
        watch.compile(model)
        for _ in range(2):
            got = sharded.train()(input_ids=ids, labels=ids).loss
            got.sum().backward()
        with torch.no_grad():
            sharded.eval()(input_ids=ids[:1, :24], labels=ids[:1, :24])
    assert torch.equal(got, want)
    kinds = len({type(block.sequence_mixer) for block in model.decoder.layers})
    assert captured["stats"]["unique_graphs"] == 2 * (kinds + 1), "of each kind, and of the loss, for two shapes"
    assert captured["frames"]["total"] == captured["frames"]["ok"]
    watch.warn_of_uncompiled()
    assert not captured["graph_break"] and not warnings(caplog)


@pytest.mark.slow
def test_what_is_left_uncompiled_is_a_warning(captured, tiny, caplog):
    config = parse(OmegaConf.create(changed(tiny, train__compile=True)))
    watch, model = Compilation(config, torch.device("cpu")), build(config).train()
    forward = model.decoder.layers[0].mlp.forward

    def with_a_break(hidden_BTE):
        torch._dynamo.graph_break()
        return forward(hidden_BTE)

    model.decoder.layers[0].mlp.forward = with_a_break
    watch.compile(model)
    for length in (32, 48):
        ids = torch.ones(2, length, dtype=torch.long)
        model(input_ids=ids, labels=ids)
    for _ in range(2):
        watch.warn_of_uncompiled()
    (message,) = warnings(caplog)
    assert message.startswith("a part of the model runs uncompiled, which is slower: ")
    assert "graph_break" in message


def test_the_next_start_finds_blocks_whose_columns_are_split(tiny):
    """On a GPU, where compiled slices of columns have a gradient of their own."""
    from torch._functorch._aot_autograd import autograd_cache

    graphs: list = []
    split = torch.compile(
        lambda x: columns._Split.apply(x, (2, 2)), backend=lambda graph, _: graphs.append(graph) or graph
    )
    split(torch.ones(3, 4, requires_grad=True))
    Compilation(parse(OmegaConf.create(changed(tiny, train__compile=True))), torch.device("cpu"))
    autograd_cache.check_cacheable(graphs[0])


# The real compiler


def assert_same_bits(a: str, b: str, step: int) -> None:
    """Weights, moments, losses and norms of two runs without evaluations."""
    assert_same_tensors(a, b, step)
    assert losses(a) == losses(b) and lines(a, "norm") == lines(b, "norm")


@pytest.mark.slow
def test_two_starts_with_empty_caches_are_bitwise_one_run(tiny, tmp_path):
    """Compiled and with checkpointed activations; the losses are those of an eager run."""
    config = changed(tiny, train__gradient_checkpointing=True, train__max_tokens=6 * STEP, train__grad_acc_tokens=STEP)
    # The architecture with the fewest kernels to compile; those of rotary embeddings are three more.
    config |= {"skip_eval": True, "checkpoint_interval": 3 * STEP}
    config["model"] = {"name": "transformer", "config": {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2}}
    config["model"]["config"]["use_rope"] = False

    def run(name: str, caches: str, **changes) -> dict:
        job_config = changed(config, output_dir=str(tmp_path / name), **changes)
        patch = f"""
import os
import torch._inductor.config
os.environ["TORCHINDUCTOR_CACHE_DIR"] = {str(tmp_path / caches)!r}
# Without vector instructions its programs are compiled faster.
torch._inductor.config.cpp.simdlen = 0
"""
        train(job_config, patch=patch)
        return job_config

    straight = run("straight", "first", train__compile=True)
    shutil.copytree(tmp_path / "straight", tmp_path / "stopped")
    shutil.rmtree(tmp_path / f"stopped/checkpoints/step-{6 * STEP:015d}")
    assert list((tmp_path / "first").rglob("*.so")) and not (tmp_path / "second").exists()
    stopped = run("stopped", "second")
    assert list((tmp_path / "second").rglob("*.so")), "auto did not compile"
    assert_same_bits(straight["output_dir"], stopped["output_dir"], 6 * STEP)
    state = json.loads((tmp_path / f"stopped/checkpoints/step-{6 * STEP:015d}/trainer.json").read_text())
    assert state["execution"]["compile"] and state["config"]["train"]["compile"] == "auto"
    eager = run("eager", "none", train__compile=False)
    assert not (tmp_path / "none").exists()
    ours, theirs = losses(stopped["output_dir"]), losses(eager["output_dir"])
    assert len(ours) == 6 and max(abs(ours[step] - theirs[step]) for step in ours) < 1e-4


# What blocks are told


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
def test_every_block_is_told_where_its_inputs_are_kept(tiny):
    for wanted in (False, True):
        keys = {"train__gradient_checkpointing": True, "train__block_inputs_on_host": wanted}
        model = build(parse(OmegaConf.create(changed(tiny, **keys))))
        assert {block.inputs_on_host for block in model.decoder.layers} == {wanted}


# Where compiled code is kept


def test_compiled_code_is_kept_in_the_users_cache_unless_the_user_says_where(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == f"{tmp_path}/forgetting_transformer/inductor"
    assert os.environ["TRITON_CACHE_DIR"] == "mine"


# The start of the compiler


@pytest.mark.slow
def test_a_run_that_may_compile_for_a_gpu_begins_to_hash_the_compiler_beside_its_imports(tiny, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(inductor, "_hashing", [])
    for device, compiles, begins in (("cpu", "auto", False), ("cuda", False, False), ("cuda", "auto", True)):
        monkeypatch.setattr(hardware, "expected_device", lambda _, device=device: torch.device(device))
        inductor.hash_beside_imports(parse(OmegaConf.create(changed(tiny, train__compile=compiles))))
        assert bool(inductor._hashing) == begins
    monkeypatch.setattr(inspect, "modulesbyfile", {})
    monkeypatch.setattr(inspect, "_filesbymodname", {})
    inductor._look_up_files()
    assert inspect.modulesbyfile[os.path.abspath(torch.__file__)] == "torch"
    for thread in inductor._hashing:
        thread.join()


@pytest.mark.slow
def test_processes_that_compile_start_after_the_only_hash(monkeypatch):
    pytest.importorskip("triton")
    events = []
    monkeypatch.setattr(inductor, "_hashing", [])
    monkeypatch.setattr("torch._inductor.codecache.torch_key", lambda: (time.sleep(0.2), events.append("torch")))
    monkeypatch.setattr("torch._inductor.async_compile.maybe_warm_pool", lambda: events.append("processes"))
    inductor._start_hashing()
    threads = inductor.start()
    assert len(threads) == 3
    for thread in threads:
        thread.join()
    assert events == ["torch", "processes"]


def test_a_compiler_that_cannot_start_early_is_left_to_the_first_step(monkeypatch, caplog):
    caplog.set_level(logging.DEBUG, "forgetting_transformer")
    monkeypatch.setattr(inductor, "_hashing", [])

    def broken():
        raise RuntimeError("no files")

    monkeypatch.setattr("torch._inductor.codecache.torch_key", broken)
    monkeypatch.setattr("torch._inductor.async_compile.maybe_warm_pool", broken)
    for thread in inductor.start():
        thread.join()
    assert "the compiler did not start early: no files" in caplog.text


# Compiling for the first step while kernels are tested: what that step finds, and what must not stay.


def test_the_first_step_compiles_nothing_again(captured, tiny):
    config = parse(OmegaConf.create(architecture(tiny, "hybrid", compile=True, gradient_checkpointing=True)))
    empty = setup.build_model(config, INFO, initialise=False, device="meta")
    compilation.compile_blocks(empty, torch.device("cpu"), 2, 40)
    before = captured["stats"]["unique_graphs"]
    assert before
    model = build(config).train()
    model.run_compiled()
    ids = tokens(2, 40)
    model(input_ids=ids, labels=ids).loss.mean().backward()
    assert captured["stats"]["unique_graphs"] == before


@pytest.fixture
def config(tiny, monkeypatch):
    """A configuration whose blocks are compiled early."""
    monkeypatch.setattr(compilation, "_serves", lambda *_: True)
    return parse(OmegaConf.create(architecture(tiny, "forgetting_transformer", compile=True)))


def test_compiled_code_goes_with_a_kernel_that_is_ruled_out(captured, config, monkeypatch):
    fabric, empty = (
        Fabric(accelerator="cpu", devices=1),
        setup.build_model(config, INFO, initialise=False, device="meta"),
    )
    resets, faults = [], {}
    monkeypatch.setattr(torch._dynamo, "reset", lambda: resets.append(True))
    monkeypatch.setattr(backends, "_faults", faults)
    with compilation.compiling(config, fabric, empty, packed=False):
        pass
    assert not resets and captured["stats"]["unique_graphs"]
    with compilation.compiling(config, fabric, empty, packed=False):
        faults["attention", backends.TRITON] = "its self-test found it wrong"
    assert resets == [True]


def test_an_error_is_left_to_the_first_step_and_hides_none_of_the_body(config, monkeypatch, caplog):
    def broken(*_):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(compilation, "compile_blocks", broken)
    caplog.set_level(logging.DEBUG, "forgetting_transformer")
    fabric, empty = (
        Fabric(accelerator="cpu", devices=1),
        setup.build_model(config, INFO, initialise=False, device="meta"),
    )
    with compilation.compiling(config, fabric, empty, packed=False):
        pass
    assert "nothing was compiled early: no compiler" in caplog.text
    with pytest.raises(ValueError, match="a kernel"), compilation.compiling(config, fabric, empty, packed=False):
        raise ValueError("a kernel")


def test_nothing_is_compiled_early_beside_the_test_of_kernels_of_fla(tiny, monkeypatch):
    """They keep state of the whole process: two threads at once have ruled out kernels that were right."""
    gpu = SimpleNamespace(device=torch.device("cuda", 0), world_size=1)
    monkeypatch.setattr(compilation.graphs, "choose", lambda *_: False)
    monkeypatch.setattr(
        compilation, "find_backend", lambda use, *_: backends.FLA if use.op == "kda" else backends.TRITON
    )
    for name, served in (("forgetting_transformer", True), ("mamba2", True), ("kda", False)):
        config = parse(OmegaConf.create(architecture(tiny, name, compile=True)))
        assert (
            compilation._serves(config, gpu, setup.build_model(config, INFO, initialise=False, device="meta")) == served
        )
