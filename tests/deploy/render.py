#!/usr/bin/python3
"""Draws every panel of every dashboard from the data of a scripted run, one PNG a dashboard, to look at.

  render.py BUILD_FOLDER OUTPUT_FOLDER
"""
import contextlib
import pathlib
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import FuncFormatter  # noqa: E402

import fleet  # noqa: E402

STEP_S = fleet.SCRAPE_MS / 1000
RATE_INTERVAL = "5s"
COLUMNS = 3


def prefixed(value, base, units, end=""):
    sign, value = ("-" if value < 0 else ""), abs(value)
    index = 0
    while value >= base and index < len(units) - 1:
        value, index = value / base, index + 1
    return f"{sign}{value:.3g} {units[index]}{end}".rstrip()


FORMATS = {
    "short": lambda v: prefixed(v, 1000, ["", "k", "M", "G"]),
    "bytes": lambda v: prefixed(v, 1024, ["B", "KiB", "MiB", "GiB"]),
    "Bps": lambda v: prefixed(v, 1000, ["B", "kB", "MB", "GB"], "/s"),
    "percentunit": lambda v: f"{100 * v:.3g} %",
    "s": lambda v: f"{v:.3g} s" if v >= 1 or v == 0 else f"{1000 * v:.3g} ms" if v >= 1e-3 else f"{1e6 * v:.3g} µs",
}


def draw_panel(axes, title, unit, lines, begun):
    stacked = "write every step" in lines
    if stacked:
        below = None
        for name, points in lines.items():
            if name == "write every step":
                continue
            times, values = [t - begun for t, _ in points], [v for _, v in points]
            top = [a + b for a, b in zip(below, values)] if below else values
            axes.fill_between(times, below or [0] * len(values), top, alpha=0.6, linewidth=0, label=name)
            below = top
        lines = {"write every step": lines["write every step"]}
    for name, points in lines.items():
        axes.plot([t - begun for t, _ in points], [v for _, v in points], label=name, linewidth=1.4,
                  color="black" if stacked else None)
    axes.set_title(title, fontsize=9, loc="left", fontweight="bold")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: FORMATS[unit](value)))
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if not title.startswith("Bytes saved"):
        axes.set_ylim(bottom=0)
        if axes.get_ylim()[1] < 1e-9 or all(v == 0 for p in lines.values() for _, v in p) and not stacked:
            axes.set_ylim(0, 1)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles, labels, fontsize=6.5, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncol=3, frameon=False,
                columnspacing=1.0, handlelength=1.2)


def draw(run, dashboard, panels, output):
    end = run.prometheus.last_scrape()
    aliases = {s.instance: f"server-{chr(ord('a') + i)}" for i, s in enumerate(run.servers)}  # ports differ from run to run
    rows = -(-len(panels) // COLUMNS)
    figure, grid = plt.subplots(rows, COLUMNS, figsize=(13, 2.75 * rows), constrained_layout=True, squeeze=False)
    cells = list(grid.flat)
    for axes, ((title, unit), targets) in zip(cells, panels.items()):
        lines = {}
        for legend, expression in targets:
            filled = fleet.fill_in(expression, RATE_INTERVAL)
            for labels, points in run.prometheus.query_range(filled, run.begun, end, STEP_S):
                name = fleet.render_legend(legend, labels)
                for instance, alias in aliases.items():
                    name = name.replace(instance, alias)
                lines[name] = [point for point in points if point[1] == point[1]]  # 0 / 0 at the start
        draw_panel(axes, title, unit, lines, run.begun)
        axes.set_xlim(0, end - run.begun)
    for axes in cells[len(panels):]:
        axes.set_visible(False)
    figure.suptitle(f"ssmd {dashboard}: a scripted run, seconds since its start", fontsize=11)
    figure.savefig(output / f"{dashboard}.png", dpi=70)
    plt.close(figure)


def main(build, output):
    output.mkdir(parents=True, exist_ok=True)
    dashboards = {}
    for dashboard, title, unit, legend, expression in fleet.panels():
        dashboards.setdefault(dashboard, {}).setdefault((title, unit), []).append((legend, expression))
    with contextlib.ExitStack() as stack:
        run = fleet.Run(stack, build, rounds=(24, 8))
        for dashboard, panels in dashboards.items():
            draw(run, dashboard, panels, output)
            print(output / f"{dashboard}.png")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
