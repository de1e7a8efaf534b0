"""Draws the panels of `trn-vision-serve.json` with the values of a running Prometheus, into one PNG.

    python configs/grafana/draw.py --prometheus http://127.0.0.1:9090 --last 10m --out docs/images/board.png

It draws the board's panels but is not Grafana: it sends the dashboard's own queries, with the variables at their
defaults, and puts each panel where the JSON has it; collapsed rows are drawn open. It shows what the board would show
where no Grafana is at hand, as in CI or in documentation.
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from math import ceil
from pathlib import Path
from textwrap import wrap
from typing import Any

import httpx
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, DateFormatter
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

BOARD = Path(__file__).with_name("trn-vision-serve.json")
COLUMNS, COLUMN_INCHES, ROW_INCHES, DPI = 24, 0.9, 0.4, 90  # of the dashboard's grid
LEGEND_LINE_INCHES, LEGEND_SHARE = 0.15, 0.4  # of its panel's height, at most: Grafana scrolls, a picture can't
POINTS = 200  # of each series
DURATION = {"s": 1, "m": 60, "h": 3600, "d": 86400}

Json = dict[str, Any]


class PrometheusError(RuntimeError):
    """Prometheus does not answer, or refuses a query."""


@dataclass(frozen=True)
class Series:
    name: str
    times: list[float]
    """Unix time, in seconds."""
    values: list[float]


def seconds(text: str) -> int:
    """The seconds of a duration like 90s, 10m or 1h."""
    match = re.fullmatch(r"(\d+)([smhd])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a duration like 90s, 10m or 1h")
    return int(match[1]) * DURATION[match[2]]


def variable_values(board: Json, last: int) -> dict[str, str]:
    """What each template variable stands for at its default, over a time range of `last` seconds."""
    values = {}
    for variable in board["templating"]["list"]:
        values[variable["name"]] = variable.get("allValue") or variable["query"]
        if variable["type"] == "interval":
            values[variable["name"]] = f"{max(last // variable['auto_count'], seconds(variable['auto_min']))}s"
    return values


class Prometheus:
    def __init__(self, url: str, end: float, last: int, variables: dict[str, str]) -> None:
        self.start, self.end = end - last, end
        self._url, self._variables = url.rstrip("/"), variables
        self._range = {"start": self.start, "end": end, "step": max(last / POINTS, 1)}

    def series(self, target: Json) -> list[Series]:
        """A panel's query over the time range. Raises PrometheusError, and KeyError for an undefined variable."""
        expr = re.sub(r"\$(\w+)", lambda match: self._variables[match[1]], target["expr"])
        try:
            response = httpx.post(f"{self._url}/api/v1/query_range", data={"query": expr, **self._range}, timeout=30)
            answer = response.json()
        except (httpx.HTTPError, json.JSONDecodeError) as error:
            raise PrometheusError(f"no Prometheus answers at {self._url}: {error}") from error
        if answer.get("status") != "success":
            raise PrometheusError(f"Prometheus at {self._url} refused {expr!r}: {answer.get('error', answer)}")
        return sorted((self._named(found, target["legendFormat"]) for found in answer["data"]["result"]), key=_natural)

    @staticmethod
    def _named(found: Json, legend: str) -> Series:
        name = re.sub(r"\{\{(\w+)\}\}", lambda match: found["metric"].get(match[1], ""), legend)
        times, values = zip(*found["values"], strict=True)
        return Series(name.strip(), [float(at) for at in times], [float(value) for value in values])


def _natural(series: Series) -> list[tuple[int, str]]:
    """Sort key that puts rank 2 before rank 10."""
    return [(int(part) if part.isdigit() else -1, part) for part in re.split(r"(\d+)", series.name)]


@dataclass(frozen=True)
class Box:
    """A rectangle of the picture in inches, from its top left corner."""

    left: float
    top: float
    width: float
    height: float

    def inner(self, left: float, top: float, right: float = 0, bottom: float = 0) -> "Box":
        return Box(self.left + left, self.top + top, self.width - left - right, self.height - top - bottom)


class Picture:
    def __init__(self, rows: int, start: float, end: float) -> None:
        """`rows` of the grid; `start` and `end` of the time axes, in seconds of Unix time."""
        self._width, self._height = COLUMNS * COLUMN_INCHES + 0.2, rows * ROW_INCHES + 0.2
        self.figure = Figure(figsize=(self._width, self._height), dpi=DPI, facecolor="#f4f5f5")
        self.days = start / 86400, end / 86400

    def axes(self, box: Box) -> Axes:
        bottom = self._height - box.top - box.height
        sides = (box.left / self._width, bottom / self._height, box.width / self._width, box.height / self._height)
        return self.figure.add_axes(sides)

    def text(self, box: Box, text: str, size: float = 10, color: str = "#24292e", **style: Any) -> None:
        """Text that begins at the box's top left corner."""
        x, y = box.left / self._width, 1 - box.top / self._height
        self.figure.text(x, y, text, va="top", fontsize=size, color=color, **style)

    def card(self, box: Box, title: str) -> None:
        axes = self.axes(box.inner(0.04, 0.04, 0.04, 0.04))
        axes.set_axis_off()
        axes.add_patch(Rectangle((0, 0), 1, 1, transform=axes.transAxes, facecolor="white", edgecolor="#d8d9da"))
        self.text(box.inner(0.15, 0.13), title, weight="bold")


def readable(value: float, unit: str) -> str:
    """A value in one of the dashboard's units."""
    if unit == "percentunit":
        return f"{100 * value:.4g} %"
    if unit == "s":
        return f"{value:.4g} s" if value >= 1 or value == 0 else f"{1000 * value:.3g} ms"
    if unit in ("bytes", "Bps"):
        power = min((int(value).bit_length() - 1) // 10, 4) if value >= 1 else 0
        return f"{value / 1024**power:.3g} {('', 'Ki', 'Mi', 'Gi', 'Ti')[power]}B{'/s' if unit == 'Bps' else ''}"
    suffix = {"short": "", "reqps": "req/s"}.get(unit, unit.removeprefix("suffix:"))
    return f"{value:.4g} {suffix}".strip()


def draw_lines(picture: Picture, panel: Json, box: Box, series: list[Series]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    columns = max(1, int(box.width / (0.055 * max(len(one.name) for one in series) + 0.4)))
    named = min(len(series), columns * int(LEGEND_SHARE * box.height / LEGEND_LINE_INCHES))
    axes = picture.axes(box.inner(0.95, 0.4, 0.2, 0.35 + LEGEND_LINE_INCHES * ceil(named / columns)))
    stacked = defaults["custom"].get("stacking", {}).get("mode") == "normal"
    palette = colormaps["tab10" if len(series) <= 10 else "tab20"]
    tops: dict[float, float] = {}
    for index, one in enumerate(series):
        color, days, values = palette(index % palette.N), [at / 86400 for at in one.times], one.values
        if stacked:
            below = [tops.get(at, 0.0) for at in one.times]
            values = [low + value for low, value in zip(below, values, strict=True)]
            tops |= dict(zip(one.times, values, strict=True))
            axes.fill_between(days, below, values, color=color, alpha=0.3, linewidth=0)
        more = f", and {len(series) - named} more" if index == named - 1 < len(series) - 1 else ""
        axes.plot(days, values, color=color, linewidth=1.3, label=one.name + more if index < named else None)
    axes.margins(y=0.08)
    axes.set_xlim(*picture.days)
    axes.set_ylim(bottom=defaults.get("min"), top=defaults.get("max"))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: readable(value, defaults["unit"])))
    axes.xaxis.set_major_locator(AutoDateLocator(maxticks=6))
    axes.xaxis.set_major_formatter(DateFormatter("%H:%M:%S"))
    axes.tick_params(labelsize=7, length=2)
    axes.grid(color="#e4e4e7", linewidth=0.6)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.09), ncols=columns, fontsize=7, frameon=False)


def draw_bars(picture: Picture, panel: Json, box: Box, series: list[Series]) -> None:
    unit = panel["fieldConfig"]["defaults"]["unit"]
    axes = picture.axes(box.inner(0.075 * max(len(one.name) for one in series) + 0.2, 0.4, 0.8, 0.2))
    bars = axes.barh([one.name for one in series], [one.values[-1] for one in series], color="tab:blue")
    axes.bar_label(bars, [readable(one.values[-1], unit) for one in series], fontsize=7, padding=3)
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.tick_params(labelsize=7, length=0)
    axes.spines[:].set_visible(False)


def draw_stat(picture: Picture, panel: Json, box: Box, series: list[Series]) -> None:
    unit = panel["fieldConfig"]["defaults"]["unit"]
    place = box.inner(0.2, 0.5, 0.2, 0.2)
    for one in series:
        name = wrap(one.name, int(place.width / 0.095))
        picture.text(place, "\n".join(name))
        place = place.inner(0, 0.2 * len(name))
        if panel["options"]["textMode"] != "name":
            picture.text(place, readable(one.values[-1], unit), 20, "#2a7e43")
            place = place.inner(0, 0.45)


KINDS = {"timeseries": draw_lines, "bargauge": draw_bars, "stat": draw_stat}


def panels(board: Json) -> Iterator[Json]:
    """Rows and panels from top to bottom, those of collapsed rows among them."""
    for panel in board["panels"]:
        yield panel
        yield from panel.get("panels", ())


def draw(board: Json, prometheus: Prometheus) -> Figure:
    """The whole board. Raises PrometheusError."""
    bottom = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels(board))
    picture = Picture(bottom + 1, prometheus.start, prometheus.end)
    heading = f"{board['title']}   until {datetime.fromtimestamp(prometheus.end, UTC):%Y-%m-%d %H:%M:%S} UTC"
    picture.text(Box(0.2, 0.12, 0, 0), heading, 13, weight="bold")
    for panel in panels(board):
        at = panel["gridPos"]
        left, top = at["x"] * COLUMN_INCHES + 0.1, (at["y"] + 1) * ROW_INCHES + 0.1
        box = Box(left, top, at["w"] * COLUMN_INCHES, at["h"] * ROW_INCHES)
        if panel["type"] == "row":
            picture.text(box.inner(0.1, 0.08), panel["title"], 12, weight="bold")
            continue
        picture.card(box, panel["title"])
        series = [one for target in panel["targets"] for one in prometheus.series(target)]
        if series:
            KINDS[panel["type"]](picture, panel, box, series)
        else:
            picture.text(box.inner(box.width / 2, box.height / 2), "No data", ha="center", color="#8e8e8e")
    return picture.figure


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the dashboard's panels with the values of a Prometheus.")
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", metavar="URL")
    parser.add_argument("--last", type=seconds, default=seconds("10m"), metavar="DURATION", help="90s, 10m, 1h, ...")
    parser.add_argument("--out", type=Path, required=True, metavar="PNG")
    options = parser.parse_args()
    board: Json = json.loads(BOARD.read_text())
    prometheus = Prometheus(options.prometheus, time.time(), options.last, variable_values(board, options.last))
    try:
        figure = draw(board, prometheus)
    except PrometheusError as error:
        sys.exit(str(error))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out)
    print(f"{options.out}: {sum(panel['type'] != 'row' for panel in panels(board))} panels")


if __name__ == "__main__":
    main()
