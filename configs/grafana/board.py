"""Builds the Grafana dashboard `trn-vision-serve.json`, beside this file, with grafana-foundation-sdk.

    python configs/grafana/board.py            write it
    python configs/grafana/board.py --check    exit 1 if the file on disk differs

Two sources feed it: the application's `/metrics` (names with colons, the ranks' gauges summed) and Ray's own endpoints
(prefix `ray_` and underscores, one series per rank). The `*_rows.py` say what is shown, `panels.py` how.
"""

import argparse
import json
import sys
from itertools import count
from pathlib import Path

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

from configs.grafana import cache_rows, serving_rows
from configs.grafana.panels import SOURCE, Row

OUTPUT = Path(__file__).with_name("trn-vision-serve.json")


def rows() -> list[Row]:
    """From what a client notices down to the device."""
    return [
        serving_rows.overview(),
        serving_rows.latency(),
        cache_rows.cache_layers(),
        cache_rows.device_encoder_cache(),
        cache_rows.kv_cache(),
        serving_rows.engine(),
        cache_rows.connector(),
    ]


def add_variables(board: dashboard.Dashboard) -> None:
    board.with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    board.with_variable(
        dashboard.QueryVariable("model_name")
        .label("Model")
        .datasource(SOURCE)
        .query("label_values(vllm:num_requests_running, model_name)")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(VariableOption(selected=True, text=["All"], value=["$__all"]))
    )
    board.with_variable(
        dashboard.IntervalVariable("rate_interval")
        .label("Rate interval")
        .description("Window of every rate. auto grows with the time range, from six scrapes of 10 s upwards.")
        .values("1m,5m,10m,30m,1h")
        .auto(True)
        .min_interval("1m")
        .step_count(30)
        .current(VariableOption(selected=True, text="auto", value="$__auto_interval_rate_interval"))
    )
    board.with_variable(
        dashboard.TextBoxVariable("encoder_block_size")
        .label("Encoder block size")
        .description("The engine's encoder_cache.block_size, in embeddings: padding waste is computed from it.")
        .default_value("64")
    )


def build() -> dashboard.Dashboard:
    board = (
        dashboard.Dashboard("trn-vision-serve")
        .uid("trn-vision-serve")
        .description("Vision-language serving: requests, latency, and every cache layer down to the device.")
        .tags(["trn-vision-serve", "vllm", "ray"])
        .time("now-30m", "now")
        .refresh("10s")
        .tooltip(DashboardCursorSync.CROSSHAIR)
    )
    add_variables(board)
    identity = count(1)
    for row in rows():
        header = dashboard.Row(row.title).id(next(identity)).collapsed(row.collapsed)
        panels = [panel.id(next(identity)) for panel in row.panels]
        if row.collapsed:
            for panel in panels:
                header.with_panel(panel)
            board.with_row(header)
        else:
            board.with_row(header)
            for panel in panels:
                board.with_panel(panel)
    return board


def text() -> str:
    """The dashboard's JSON, as it is checked in."""
    return json.dumps(build().build(), cls=JSONEncoder, indent=2, ensure_ascii=False) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the Grafana dashboard.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the file on disk differs")
    if not parser.parse_args().check:
        OUTPUT.write_text(text())
    elif not OUTPUT.exists() or OUTPUT.read_text() != text():
        print(f"{OUTPUT.name} differs from what board.py builds: run `python configs/grafana/board.py`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
