"""`train.profile_steps`: a trace of a few steps on every rank, without effect on the weights."""

import gzip
import json
from pathlib import Path

import pytest

from tests.training.conftest import STEP, assert_same_run, changed, train


@pytest.mark.slow
def test_every_rank_traces_the_steps_and_the_weights_stay_the_same(tiny, finished):
    tiny = changed(tiny, train__max_tokens=12 * STEP)
    straight = finished(tiny, 2)
    train(changed(tiny, train__profile_steps=[2, 3]), 2)
    assert_same_run(straight, tiny["output_dir"])
    traces = sorted(Path(tiny["output_dir"]).glob("traces/*"))
    assert [trace.name for trace in traces] == [f"start-{0:015d}-rank-{k}.json.gz" for k in range(2)]
    for trace in traces:
        names = {event.get("name", "") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
        assert {name for name in names if name.startswith("ProfilerStep")} == {"ProfilerStep#1", "ProfilerStep#2"}
