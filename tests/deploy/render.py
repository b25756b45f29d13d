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
from matplotlib.ticker import FuncFormatter, MultipleLocator  # noqa: E402

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


def limit_values(axes, title, unit, highest):
    if not title.startswith("Bytes saved"):
        axes.set_ylim(0, 1.05 * highest if highest > 0 else 1)
    elif unit == "percentunit":
        axes.set_ylim(min(0, axes.get_ylim()[0]), 1)
    if unit == "bytes" and highest > 0:  # ticks at round numbers of KiB, MiB, ...
        step = 1024 ** max(0, (int(highest).bit_length() - 1) // 10)
        step *= next(nice for nice in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500) if highest / (step * nice) <= 7)
        axes.yaxis.set_major_locator(MultipleLocator(step))


def draw_panel(axes, title, unit, lines, begun):
    baseline = "write every step"
    below = None
    for name, points in lines.items() if baseline in lines else ():  # stacked, all but the baseline
        if name != baseline:
            times, values = [t - begun for t, _ in points], [v for _, v in points]
            top = [a + b for a, b in zip(below, values)] if below else values
            axes.fill_between(times, below or [0] * len(values), top, alpha=0.6, linewidth=0, label=name)
            below = top
    plain = {baseline: lines[baseline]} if baseline in lines else lines
    for i, (name, points) in enumerate(plain.items()):  # dashes: lines that lie on one another stay visible
        axes.plot([t - begun for t, _ in points], [v for _, v in points], label=name, linewidth=1.6,
                  linestyle="-" if i == 0 else (1.5 * i, (4, 2 + i % 3)), color="black" if below else None)
    axes.set_title(title, fontsize=9, loc="left", fontweight="bold")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: FORMATS[unit](value)))
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    limit_values(axes, title, unit, max((v for points in plain.values() for _, v in points), default=0))
    axes.legend(fontsize=6.5, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncol=4 if len(plain) > 9 else 3, frameon=False,
                columnspacing=1.0, handlelength=1.6)


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
        axes.set_xlim(run.scraped - run.begun, end - run.begun)
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
