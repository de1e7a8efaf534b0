"""Spans of real requests through the whole path in one process: the tree, its order, and what is absent."""

import asyncio
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import nvtx
import pytest

from configs import dialogues
from configs.engine import parse_config
from telemetry import spans
from tests.support.local_stack import Stack

CONFIG = {
    "model": {"max_model_len": 1024},
    "parallel": {"world_size": 1, "threads_per_rank": 1, "device": "cpu"},
    "kv_cache": {"num_blocks": 96},
}
CLIENT_TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CLIENT_SPAN = "00f067aa0ba902b7"
Spans = list[dict[str, Any]]


def ask_all(flag: str = "01") -> None:
    """Two turns of a conversation whose first brings two images; the client's headers go with the second."""
    stack = Stack(parse_config(CONFIG))
    talk = dialogues.conversation(
        np.random.default_rng(1), sizes=((64, 64), (128, 64)), images=2, turns=2, max_images=2
    )

    async def ask() -> None:
        for turn in range(2):
            body = {"model": "digits-vl", "messages": talk.messages(turn), "temperature": 0, "max_tokens": 6}
            headers = {"traceparent": f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-{flag}"} if turn else {}
            response = await stack.http.post("/v1/chat/completions", json=body, headers=headers)
            assert response.status_code == 200
        bad = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}]}]
        assert (await stack.http.post("/v1/chat/completions", json={"model": "digits-vl", "messages": bad})).is_error

    asyncio.run(ask())
    stack.engine.stop()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Spans:
    file = tmp_path_factory.mktemp("spans") / "spans.jsonl"
    spans.configure("all of it", str(file))
    try:
        ask_all()
    finally:
        spans.shutdown()
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def children(recorded: Spans) -> dict[str | None, Spans]:
    by_parent: dict[str | None, Spans] = defaultdict(list)
    for each in sorted(recorded, key=lambda span: span["start_time"]):
        by_parent[each["parent_id"]].append(each)
    return by_parent


def named(recorded: Spans, name: str) -> Spans:
    return [span for span in recorded if span["name"] == name]


def test_a_request_is_one_trace(recorded: Spans) -> None:
    first, second, bad = sorted(named(recorded, "request"), key=lambda span: span["start_time"])
    assert first["parent_id"] is None
    assert (second["trace_id"], second["parent_id"]) == (CLIENT_TRACE, CLIENT_SPAN)
    assert bad["status"] == "ERROR"
    assert bad["attributes"]["http.response.status_code"] == 400
    assert bad["attributes"]["error.type"]
    by_parent = children(recorded)
    names = [span["name"] for span in by_parent[first["span_id"]] if span["name"] != "step"]
    assert names[:2] == ["render: chat_template", "render: tokenize"]
    assert sorted(names[2:10]) == sorted(["mm: hash", "mm: cache_lookup", "mm: decode", "mm: hf_processor"] * 2)
    assert names[10:] == ["scheduler: queue", "scheduler: prefill", "scheduler: decode"]
    again = [span for span in by_parent[second["span_id"]] if span["name"].startswith("mm: ")]
    assert [span["attributes"].get("result") for span in again if "lookup" in span["name"]] == ["hit", "hit"]
    assert not [span for span in again if span["name"] in ("mm: decode", "mm: hf_processor")]
    assert first["attributes"]["gen_ai.usage.output_tokens"] > 0
    assert {span["trace_id"] for span in recorded} == {first["trace_id"], CLIENT_TRACE, bad["trace_id"]}


def test_every_step_has_its_stages(recorded: Spans) -> None:
    by_parent = children(recorded)
    steps = named(recorded, "step")
    assert len(steps) >= 4
    requests = {span["span_id"] for span in named(recorded, "request")}
    for step in steps:
        assert set(step["links"]) <= requests
        assert step["links"][0] == step["parent_id"]
        meta, *stages = by_parent[step["span_id"]]
        assert meta["start_time"] == meta["end_time"]
        counts = dict(part.split("=") for part in meta["name"].removeprefix("step_meta: ").split())
        assert int(counts["prefill"]) + int(counts["decode"]) == int(counts["total"]) > 0
        assert counts["reqs"] == "1"
        assert [stage["name"] for stage in stages] == ["preprocess", "forward", "sample"]


def test_the_encoder_is_absent_where_nothing_was_encoded(recorded: Spans) -> None:
    by_parent = children(recorded)
    encoded = [
        "vit_forward" in [child["name"] for child in by_parent[preprocess["span_id"]]]
        for preprocess in sorted(named(recorded, "preprocess"), key=lambda span: span["start_time"])
    ]
    assert encoded[0]
    assert sum(encoded) == 1


def test_children_of_preprocess_do_not_overlap(recorded: Spans) -> None:
    by_parent = children(recorded)
    seen = set()
    for preprocess in named(recorded, "preprocess"):
        siblings = by_parent[preprocess["span_id"]]
        seen |= {sibling["name"] for sibling in siblings}
        assert siblings[0]["start_time"] >= preprocess["start_time"]
        assert siblings[-1]["end_time"] <= preprocess["end_time"]
        for one, next_one in pairwise(siblings):
            assert one["end_time"] <= next_one["start_time"]
    assert seen == {"vit_forward", "gather_mm_embeddings", "prepare_mm_inputs"}


def test_a_trace_that_the_client_does_not_sample_is_not_recorded(tmp_path: Path) -> None:
    file = tmp_path / "spans.jsonl"
    spans.configure("all of it", str(file))
    try:
        ask_all(flag="00")
    finally:
        spans.shutdown()
    assert CLIENT_TRACE not in file.read_text()


def test_nvtx_ranges_have_the_same_names(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: dict[Any, str] = {}
    names: list[str] = []
    start, end, mark = nvtx.start_range, nvtx.end_range, nvtx.mark

    def start_range(name: str) -> Any:
        key = start(name) or object()  # without a profiler, nvtx gives None
        opened[key] = name
        return key

    def end_range(key: Any) -> None:
        names.append(opened.pop(key))
        if isinstance(key, tuple):
            end(key)

    monkeypatch.setattr(nvtx, "start_range", start_range)
    monkeypatch.setattr(nvtx, "end_range", end_range)
    monkeypatch.setattr(nvtx, "mark", lambda name: (names.append(name), mark(name)))
    spans.configure("all of it", None)
    try:
        assert not spans.recording()
        ask_all()
    finally:
        spans.shutdown()
    assert not opened
    kinds = {name.partition(": prefill=")[0] for name in names}
    assert kinds == {
        *("request", "render: chat_template", "render: tokenize", "mm: hash", "mm: cache_lookup", "mm: decode"),
        *("mm: hf_processor", "scheduler: queue", "scheduler: prefill", "scheduler: decode", "step", "step_meta"),
        *("preprocess", "vit_forward", "gather_mm_embeddings", "prepare_mm_inputs", "forward", "sample"),
    }


def test_off_costs_no_object() -> None:
    assert spans.span("forward", None) is spans.span("sample", None)
    assert spans.open_span("request", None) is None
