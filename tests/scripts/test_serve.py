"""scripts/serve.py: transformers' own server takes an export, answers in OpenAI's protocol, and ends with Ctrl-C."""

import json
import os
import runpy
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from tests.evaluation.conftest import VOCABULARY, _tokenizer
from tests.model.small_models import PRO, small_model
from tests.processes import ROOT, free_port, shell_environment
from tests.waiting import HANG


def export(folder) -> None:
    model = small_model(vocab_size=len(VOCABULARY), initializer_range=0.02, **PRO)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)


@pytest.mark.slow
def test_an_export_is_served_and_ctrl_c_ends_it(tmp_path):
    for name in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(name, reason="the extra serve is not installed")
    export(tmp_path / "hf")
    port = free_port()
    environment = shell_environment() | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(ROOT / "scripts/serve.py"), "hf", "--port", str(port), "--device", "cpu"]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)

    def ask(path: str, **body) -> dict:
        data = json.dumps({"model": "hf", **body}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=HANG) as answer:
            return json.load(answer)

    try:
        deadline = time.monotonic() + HANG
        while "/v1 on cpu" not in (tmp_path / "log").read_text() and time.monotonic() < deadline:
            assert server.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.1)
        while True:  # it says where it will answer just before it does
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=HANG)
                break
            except urllib.error.URLError:
                assert server.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.1)
        asked = {"prompt": "w", "max_tokens": 8}
        likeliest = [ask("/v1/completions", temperature=0, **asked)["choices"][0]["text"] for _ in range(2)]
        assert likeliest[0] and likeliest[0] == likeliest[1]
        drawn = {ask("/v1/completions", temperature=1, seed=s, **asked)["choices"][0]["text"] for s in range(4)}
        assert len(drawn) > 1, "a temperature draws"
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask("/v1/completions", prompt="w", model="another/model")
        assert refused.value.code == 400
        assert "pinned to 'hf'; requested 'another/model'" in json.load(refused.value)["error"]["message"]
        for path, asked in (("/v1/chat/completions", {"messages": []}), ("/v1/responses", {"input": "w"})):
            with pytest.raises(urllib.error.HTTPError) as refused:
                ask(path, **asked)
            assert refused.value.code == 400
            assert "has no chat template" in json.load(refused.value)["error"]["message"]
        server.send_signal(signal.SIGINT)
        assert server.wait(HANG) == 0
    finally:
        server.kill()
        server.wait()
    assert "/v1/chat/completions does not" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("run", "holds no config.json; export a run with save_model.py"),
        ("no/such/folder", "there is no folder no/such/folder"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(tmp_path, monkeypatch, capsys, model, said):
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["serve.py", model])
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / "scripts/serve.py"), run_name="__main__")
    assert said in capsys.readouterr().err
