"""Draw benchmarks/results as pictures, readable on light and on dark.

Each picture is an SVG of one or two results. Its colours of text and lines follow the reader's theme. The documentation
site draws its pictures when it is built. `make plots` draws the README's, which is a file in docs/pictures; its first
comment holds a digest of the results, so that a test notices a picture of an older run.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.result import RESULTS
from deploy.local.progress import say

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
COLOURS = ("#2f81c9", "#d0643f", "#3f9a55", "#9a6bb0", "#b58900", "#7a7f87", "#2aa198")
"""Of lines: told apart, and seen, on white and on black."""
_INK, _FAINT = "#010203", "#040506"
"""Stand for text and grid until the theme is known."""
_STYLE = (
    "<style>:root{--ink:#24292f;--faint:#d0d7de}"
    "@media(prefers-color-scheme:dark){:root{--ink:#d1d7e0;--faint:#3d444d}}</style>"
)
_FAULTS = {"kill": "kill -9", "stop": "process stopped", "link": "link cut or slow", "file": "file damaged"}

Points = Sequence[tuple[float, float]]
Result = dict[str, Any]


def main() -> None:
    """Draw the README's pictures, or the named ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *DRAWN], help="default: the README's")
    parser.add_argument("--out", type=Path, default=PICTURES, help="folder of the pictures")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names or README_SHOWS:
        file = options.out / f"{name}.svg"
        file.write_text(drawn(name))
        say(f"drawn: {file.name}")


def drawn(name: str) -> str:
    """Return a picture as SVG."""
    draw, sources = DRAWN[name]
    figure = draw(*(json.loads((RESULTS / f"{source}.json").read_text()) for source in sources))
    return _themed(figure, digest(name))


def digest(name: str) -> str:
    """Return what tells whether a picture is of the results as they are now."""
    sources = DRAWN[name][1]
    return hashlib.sha256(b"".join((RESULTS / f"{source}.json").read_bytes() for source in sources)).hexdigest()[:16]


def first_token(ours: Result, peers: Result) -> Any:
    """Draw the time to the first token against length: each way of ours, and others' in the run beside them."""
    names = {"cold": "computed", "hit": "engine's prefix cache", "memory": "memory", "disk": "disk, after kill -9"}
    figure, (left, right) = _figure(2, "tokens of the context")
    for way, name in names.items():
        _line(left, name, [(row["size"], row["ttft_ms_median"]) for row in ours["ttft"] if row["way"] == way])
    systems = {"ours": "ours", "lmcache": "LMCache", "tiering": "vLLM's tiering"}
    for (way, dash), (system, name) in (
        (way, one) for way in (("memory", "-"), ("disk", ":")) for one in systems.items()
    ):
        rows = [row for row in peers["ttft"] if (row["way"], row["system"]) == (way, system)]
        points = [(row["size"], row["ttft_ms_median"]) for row in rows]
        _line(right, f"{name}, {way}", points, style=dash, colour=COLOURS[list(systems).index(system)])
    for axes, title in ((left, "Time to first token"), (right, "The same, beside others in one run")):
        axes.set(xscale="log", yscale="log", title=title)
        lowest, highest = axes.get_ylim()
        shown = [ms for ms in (100, 200, 500, 1000, 2000, 5000) if lowest <= ms <= highest]
        axes.set_yticks(shown, [f"{ms} ms" if ms < 1000 else f"{ms // 1000} s" for ms in shown])
        _ticks(axes, sorted({row["size"] for row in ours["ttft"]}))
    return figure


def conversation(result: Result) -> Any:
    """Draw the seconds that a client waits in a conversation: with and without the prefix in the engine.

    The context was measured with its KV evicted before every turn. Its line is the same in both panels, so it shows
    the worst case where the engine still has the prefix.
    """
    figure, panels = _figure(2, "turns")
    ways = {
        "Engine still has the prefix": {"context": ("context", 0), "prefix cache": ("vLLM alone", 1)},
        "After eviction or restart": {"stateless": ("vLLM alone", 1), "context": ("context", 0)},
    }
    most_s = max(row["seconds"] for row in result["rows"])
    for axes, (title, shown) in zip(panels, ways.items(), strict=True):
        axes.set(title=title, xlim=(0, result["turns"] * 1.43), ylim=(0, most_s * 1.05))
        lines = {}
        for way, (name, colour) in shown.items():
            points = [(row["turn"], row["seconds"]) for row in result["rows"] if row["way"] == way]
            lines[f"{name}, {points[-1][1]:.0f} s"] = (points, COLOURS[colour])
        _labelled(axes, lines)
        axes.set_yticks(range(0, int(most_s) + 1, 10), [f"{second} s" for second in range(0, int(most_s) + 1, 10)])
        _ticks(axes, range(0, result["turns"] + 1, 5))
    panels[0].set_ylabel("time waited, all turns so far")
    return figure


def trace(result: Result) -> Any:
    """Draw recorded sessions of coding agents on each system: tokens computed again, and time waited, so far."""
    figure, panels = _figure(2, "requests of recorded sessions")
    systems = {"plain": "vLLM alone", "lmcache": "LMCache", "tiering": "vLLM's tiering", "ours": "context-cache"}
    told = (
        ("Prompt tokens computed again, so far", 1, "{:,.0f}"),
        ("Time waited for first tokens, so far", 1000, "{:,.0f} s"),
    )
    phases = result["phases"]
    for axes, (number, (title, unit, form)) in zip(panels, enumerate(told), strict=True):
        sums = {name: list(accumulate(one[number] / unit for one in result["series"][name])) for name in systems}
        most = max(one[-1] for one in sums.values())
        axes.set(title=title, xlim=(0, len(phases) * 1.5), ylim=(0, most * 1.08))
        for phase, fault in {"killed": "kill -9", "lost": "pod lost"}.items():
            axes.axvline(phases.index(phase), color=_FAINT, linewidth=1, linestyle="--")
            axes.annotate(
                fault, (phases.index(phase), most * 1.08), (-3, -3), textcoords="offset points", va="top", ha="right"
            )
        _labelled(
            axes,
            {
                f"{systems[name]}, {form.format(one[-1]).replace(',', ' ')}": (
                    list(enumerate(one, 1)),
                    COLOURS[("ours", "plain", "tiering", "lmcache").index(name)],
                )
                for name, one in sums.items()
            },
        )
        _ticks(axes, range(0, len(phases) + 1, 20))
    panels[0].yaxis.set_major_formatter(lambda count, _: f"{count:,.0f}".replace(",", " "))
    panels[1].yaxis.set_major_formatter(lambda seconds, _: f"{seconds:,.0f} s".replace(",", " "))
    return figure


def faults(result: Result) -> Any:
    """Draw how much longer than computing a turn took that met a fault, by kind: each case is a dot."""
    figure, (axes,) = _figure(1, "seconds beyond computing the turn again")
    names = []
    cases = [case for run in result["runs"] for case in run["tables"]["cases"]]
    for number, (kind, name) in enumerate(_FAULTS.items()):
        beyond_s = sorted(
            float(case["beyond s"]) for case in cases if case["case"].startswith(kind) and case["beyond s"]
        )
        spread = [number + 0.6 * (place / max(1, len(beyond_s) - 1) - 0.5) for place in range(len(beyond_s))]
        axes.plot(beyond_s, spread, ".", markersize=4, color=COLOURS[number])
        names.append(f"{name} ({len(beyond_s)})")
    axes.set_yticks(range(len(names)), names)
    axes.set_title("Delay of a turn that met a fault")
    return figure


def managers(result: Result) -> Any:
    """Draw what a manager does with a thousand to a million contexts."""
    figure, (left, right) = _figure(2, "contexts")
    for row in result["rows"]:
        if row["what"] == "turns a second":
            _line(left, row["what"], _medians(row))
        elif row["what"].endswith(", p50") and not row["what"].startswith("turn of many"):
            _line(right, row["what"].removesuffix(", p50"), _medians(row))
    left.set(xscale="log", title="Turns a second, one manager", ylim=(0, None))
    right.set(xscale="log", title="Median of a call, ms", ylim=(0, None))
    return figure


def placement(result: Result) -> Any:
    """Draw what the simulation shows against the number of pods."""
    figure, axes = _figure(3, "pods")
    rows, control = result["rows"], result["control"]
    for when in dict.fromkeys(row["when"] for row in rows):
        _line(axes[0], when, [(row["pods"], row["hit_rate"]) for row in rows if row["when"] == when])
        _line(axes[1], when, [(row["pods"], row["served_skew"]) for row in rows if row["when"] == when])
    for part in ("gateways", "manager cores", "Redis cores", "core that a gateway probes with"):
        _line(axes[2], part, [(row["pods"], row[part]) for row in control if row[part]])
    titles = ("Tokens not computed, share", "Requests of a pod, largest / mean", "Control plane")
    for one, title in zip(axes, titles, strict=True):
        one.set(xscale="log", ylim=(0, None), title=title)
        _ticks(one, sorted({row["pods"] for row in rows}))
    return figure


DRAWN: Mapping[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "first-token": (first_token, ("bench_ttft", "bench_beside")),
    "trace": (trace, ("bench_trace",)),
    "conversation": (conversation, ("bench_conversation",)),
    "faults": (faults, ("torture_matrix",)),
    "managers": (managers, ("bench_manager",)),
    "placement": (placement, ("bench_simulate",)),
}
"""How each picture is drawn, and of which results."""
README_SHOWS = ("trace", "conversation")


def _figure(panels: int, along: str) -> tuple[Any, Sequence[Any]]:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams |= {
        "svg.fonttype": "none",
        "svg.hashsalt": "context-cache",
        "font.size": 9,
        "axes.ymargin": 0.1,
        "text.color": _INK,
    }
    mpl.rcParams |= dict.fromkeys(("axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK)
    figure = Figure(figsize=(4.4 * max(panels, 1.6), 3.1), layout="constrained")
    found = figure.subplots(1, panels, squeeze=False)[0]
    for axes in found:
        axes.set_facecolor("none")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(visible=True, color=_FAINT, linewidth=0.6)
        axes.set_xlabel(along)
        axes.set_prop_cycle(color=COLOURS)
    return figure, found


def _line(axes: Any, name: str, points: Points, *, style: str = "-", colour: str | None = None) -> None:
    if points:
        xs, ys = zip(*sorted(points), strict=True)
        axes.plot(xs, ys, style, marker="o", markersize=3, label=name, **({} if colour is None else {"color": colour}))


def _labelled(axes: Any, lines: Mapping[str, tuple[Points, str]]) -> None:
    """Draw lines by their label, each with its points and colour. Labels stand at the ends and do not overlap."""
    lowest, highest = axes.get_ylim()
    above = -float("inf")
    for label, (points, colour) in sorted(lines.items(), key=lambda line: line[1][0][-1][1]):
        axes.plot(*zip(*points, strict=True), color=colour, linewidth=2)
        x, y = points[-1]
        above = max(y, lowest + (highest - lowest) * 0.04, above + (highest - lowest) * 0.075)
        axes.annotate(label, (x, above), (5, 0), textcoords="offset points", va="center", color=colour)


def _medians(row: Mapping[str, Any]) -> Points:
    return [(float(size), median) for size, median in row["medians"].items()]


def _ticks(axes: Any, places: Iterable[float]) -> None:
    axes.set_xticks(list(places), [f"{place:,.0f}".replace(",", " ") for place in places])
    axes.minorticks_off()


def _themed(figure: Any, of: str) -> str:
    for axes in figure.axes:
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=8)
    written = io.StringIO()
    figure.savefig(written, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    head, _, body = written.getvalue().partition("<defs>")
    text = f"{head}{_STYLE}<defs>{body}".replace(_INK, "var(--ink)").replace(_FAINT, "var(--faint)")
    _, _, svg = text.partition("<svg")
    return f"<!-- results {of} -->\n<svg{svg}"


if __name__ == "__main__":
    main()
