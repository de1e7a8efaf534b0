"""The spans of a step link to each of its requests once."""

import json
from pathlib import Path

from actors.messages import SchedulerOutput
from actors.stages import Stages
from telemetry import spans

TRACE, OTHER = "4bf92f3577b34da6a3ce929d0e0e4736", "0af7651916cd43dd8448eb211c80319c"
SPAN, OTHER_SPAN = "00f067aa0ba902b7", "b7ad6b7169203331"


def test_choices_of_one_request_are_one_link(tmp_path: Path) -> None:
    file = tmp_path / "spans.jsonl"
    spans.configure("rank 0", str(file))
    try:
        one, other = f"00-{TRACE}-{SPAN}-01", f"00-{OTHER}-{OTHER_SPAN}-01"
        links = [None, *(spans.link_to({"traceparent": header}) for header in (one, one, other, one))]
        with Stages(reports=True).step(SchedulerOutput(step_id=1, clock=0.0, phase="decode"), links):
            pass
    finally:
        spans.shutdown()
    recorded = {span["name"].partition(":")[0]: span for span in map(json.loads, file.read_text().splitlines())}
    assert recorded["step"]["links"] == [SPAN, OTHER_SPAN]
    assert recorded["step"]["trace_id"] == TRACE
    assert recorded["step_meta"]["attributes"]["reqs"] == 5
