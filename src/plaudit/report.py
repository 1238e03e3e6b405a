"""The report: one self-contained HTML file that says what a run gained, what it paid, and whether to believe it.

It reads a run folder's JSON files and nothing else; the only figures computed here are counted from the texts and
numbers in them. An unfinished run is reported as far as it has come. Left out: measuring a model (see evaluation), and
whatever would need a network or a script to be looked at.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import random
import re
import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plaudit.errors import RunError

Record = dict[str, Any]
Points = list[tuple[float, float]]

#: stage -> what it is called in a heading, in the order in which the quickstart runs them
STAGES = {
    "sft": "Supervised fine-tuning",
    "collect": "Collecting answers",
    "label": "Labelling",
    "reward": "Reward model",
    "ppo": "PPO",
    "evaluate": "Evaluation",
}
#: those that have a run folder of their own only
APART = {"dpo": "DPO"}

SHOWN_PROMPTS = 20
LONGEST_TEXT = 1500
MOST_POINTS = 400
MOST_DOTS = 1200
MOST_SOURCES = 12
MOST_EVENTS = 20

WIDE = (3.9, 2.7)

# Charts are drawn in these stand-ins, which become CSS variables, so that one drawing serves light and dark pages.
INK, GRID, MAIN, SECOND, THIRD, FOURTH, PANEL = (f"#{i:02d}{i:02d}{i:02d}" for i in range(1, 8))
CSS_NAMES = {INK: "ink", GRID: "grid", MAIN: "c1", SECOND: "c2", THIRD: "c3", FOURTH: "c4", PANEL: "panel"}
# Early and late iterations: of middling lightness, so that they stand out from a white and from a dark ground.
EARLY, LATE = (0x3D, 0x7F, 0xD6), (0xD9, 0x5F, 0x1E)


def write_report(folder: str | Path) -> Path:
    """Makes ``report.html`` in a run folder, of any command, finished or not, and returns its path.

    Raises:
        RunError: the folder is missing or no run folder, a file in it cannot be read, or the report cannot be written.
    """
    folder = Path(folder)
    top, stages = read_stages(folder)
    page = _page(top, [*_sections(stages), *_rounds(top), _settings(top, stages)])
    target, scratch = folder / "report.html", folder / ".report.html.tmp"
    try:
        # A text may hold half a surrogate pair, which UTF-8 cannot.
        scratch.write_bytes(page.encode("utf-8", "replace"))
        scratch.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)
        raise RunError(
            f"{target}: cannot be written ({error.strerror}); free space or make the folder writable"
        ) from None
    return target


# --- what a run folder holds ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """A stage's run folder as read; a file that is absent is empty."""

    command: str
    folder: Path
    config: Record = field(default_factory=dict)
    environment: Record = field(default_factory=dict)
    summary: Record = field(default_factory=dict)
    metrics: list[Record] = field(default_factory=list)
    samples: list[Record] = field(default_factory=list)
    events: list[Record] = field(default_factory=list)

    @property
    def title(self) -> str:
        return (STAGES | APART).get(self.command, "Quickstart")

    @property
    def state(self) -> str:
        if self.summary:
            return "finished"
        return "not finished" if self.config else "not begun"

    @property
    def figures(self) -> Record:
        """The summary; before there is one, the last metrics."""
        return self.summary or (self.metrics[-1] if self.metrics else {})


def read_stages(folder: Path) -> tuple[Stage, dict[str, Stage]]:
    """A run folder and its stages by name: the six of a quickstart, or the run itself.

    Raises:
        RunError: the folder is missing, is no run folder, or holds a file that cannot be read.
    """
    if not os.path.isdir(folder):
        raise RunError(f"{folder}: no such folder; give the run folder that a command wrote (its out=…)")
    top = _stage(folder)
    if top is None:
        raise RunError(f"{folder}: is no run folder; it has no config.json, which every command writes to its out=…")
    if top.command == "quickstart":
        from plaudit.runs import newest_round

        here = newest_round(folder)
        places = {name: here / name for name in STAGES} | {"sft": folder / "sft"}
        return top, {name: _stage(place, name) or Stage(name, place) for name, place in places.items()}
    if top.command not in STAGES | APART:
        raise RunError(f"{folder}: is no run folder; its config.json names no command of plaudit")
    return top, {top.command: top}


def _stage(folder: Path, command: str = "") -> Stage | None:
    # torch comes with it, and takes seconds.
    from plaudit.runs import read_json

    config = read_json(folder / "config.json")
    if config is None:
        return None
    return Stage(
        command or str(config.get("command", "")),
        folder,
        config,
        read_json(folder / "environment.json") or {},
        read_json(folder / "summary.json") or {},
        _lines(folder / "metrics.jsonl"),
        _lines(folder / "samples.jsonl"),
        _lines(folder / "events.jsonl"),
    )


def _lines(path: Path) -> list[Record]:
    from plaudit.runs import read_jsonl

    try:
        return read_jsonl(path)
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror}); move it away to report on the rest") from None


# --- numbers and texts ------------------------------------------------------------------------------------------------


def _number(value: Any) -> float | None:
    """The value if it is a finite number: a diverged run logs NaN, which has no place on an axis."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _column(rows: Sequence[Record], *keys: str) -> list[tuple[float, ...]]:
    """The rows' values under ``keys``, of the rows that have a number under every one."""
    found = [tuple(_number(row.get(key)) for key in keys) for row in rows]
    return [values for values in found if None not in values]  # type: ignore[misc]


def _points(rows: Sequence[Record], x: str, y: str) -> Points:
    return [(pair[0], pair[1]) for pair in _column(rows, x, y)]


def _thin(points: Points, most: int = MOST_POINTS) -> Points:
    """At most ``most`` points, each the mean of neighbours, so that a long run's report stays small."""
    size = math.ceil(len(points) / most) or 1
    blocks = (points[i : i + size] for i in range(0, len(points), size))
    return [(statistics.fmean(x for x, _ in block), statistics.fmean(y for _, y in block)) for block in blocks]


def _smooth(points: Points, window: int) -> Points:
    """Running means over ``window`` neighbours; fewer at the ends."""
    half = window // 2
    means = [statistics.fmean(y for _, y in points[max(0, i - half) : i + half + 1]) for i in range(len(points))]
    return [(x, mean) for (x, _), mean in zip(points, means, strict=True)]


def _ends(points: Points) -> tuple[float, float, int]:
    """The mean of the first and of the last few values, and how many that is."""
    few = max(1, min(5, len(points) // 4))
    return statistics.fmean(y for _, y in points[:few]), statistics.fmean(y for _, y in points[-few:]), few


def _mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean with its normal 95 % interval."""
    mean = statistics.fmean(values)
    error = 1.96 * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return mean, mean - error, mean + error


def _correlation(points: Points) -> float | None:
    try:
        return statistics.correlation([x for x, _ in points], [y for _, y in points])
    except statistics.StatisticsError:
        return None  # fewer than two points, or all the same


def _plain(value: Any, digits: int = 2) -> str:
    number = _number(value)
    return "–" if number is None else f"{number:.{digits}f}".replace("-", "−")


def _percent(value: Any) -> str:
    number = _number(value)
    return "–" if number is None else f"{number:.0%}"


def _signed(value: float, digits: int = 2) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def _duration(seconds: Any) -> str:
    number = _number(seconds)
    if number is None:
        return "–"
    minutes, rest = divmod(round(number), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _text(value: Any, most: int = LONGEST_TEXT) -> str:
    """A value as text, cut where it is very long."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= most else f"{text[:most]} … (cut; {len(text)} characters in all)"


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as dotted names and values."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, _text(value, 500)


# --- charts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chart:
    """A drawing with its figures in words; the template has what it means and what would be a bad sign, by ``key``."""

    key: str
    title: str
    svg: Any
    values: str = ""
    wide: bool = False


def _style() -> Record:
    return {
        "svg.fonttype": "none",
        "svg.hashsalt": "plaudit",
        "font.family": "DejaVu Sans",
        "font.size": 8,
        # Names of judges and annotators are the user's, and may hold dollar signs.
        "text.parse_math": False,
        "text.color": INK,
        "axes.edgecolor": GRID,
        "axes.labelcolor": INK,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": GRID,
        "grid.linewidth": 0.5,
        "xtick.color": GRID,
        "ytick.color": GRID,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
        "legend.frameon": False,
        "legend.fontsize": 7.5,
        "lines.linewidth": 1.6,
    }


def _draw(name: str, label: str, paint: Callable[[Any], None], size: tuple[float, float] = (2.8, 1.9)) -> Any:
    """An inline SVG of what ``paint`` puts on the axes; ``label`` tells a screen reader what it shows."""
    from markupsafe import Markup, escape
    from matplotlib import style
    from matplotlib.figure import Figure

    buffer = io.StringIO()
    # The style holds inside this block alone, and without pyplot no figure outlives it.
    with style.context(["default", _style()]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of glyphs that the measuring font lacks; the reader's fonts have them
        figure = Figure(figsize=size, layout="constrained")
        paint(figure.add_subplot())
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    return Markup(_inline(buffer.getvalue(), name, str(escape(label))))


def _inline(svg: str, name: str, label: str) -> str:
    """A drawing of matplotlib's, made fit to stand in a page: own ids, the page's colours and width, no addresses."""
    svg = re.sub(r"<style.*?</style>|<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    box = re.search(r'viewBox="[^"]*"', svg)
    head = f'<svg {box[0] if box else ""} role="img" aria-label="{label}">'
    svg = re.sub(r"<svg[^>]*>", lambda _: head, svg, count=1)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(?:xlink:)?href="#', f'href="#{name}-', svg).replace("url(#", f"url(#{name}-")
    for colour, variable in CSS_NAMES.items():
        svg = svg.replace(f": {colour}", f": var(--{variable})")
    return re.sub(r'(?<= d=")[^"]*', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), svg)


def _blend(share: float) -> str:
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(EARLY, LATE, strict=True))


def _percents(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%".replace("-", "−"))


def _whole(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10], integer=True))


@dataclass(frozen=True)
class Curve:
    """A metric worth a chart, under the key that it is logged by."""

    key: str
    title: str
    percent: bool = False


def _curve_chart(curve: Curve, rows: Sequence[Record], name: str, unit: str = "iteration") -> Chart | None:
    """A metric over the steps of a run, each step and its running mean; None where the metric was not logged."""
    raw = _points(rows, "step", curve.key)
    if not raw:
        return None
    show = _percent if curve.percent else _shown(raw)
    first, last, _ = _ends(raw)
    points = _thin(raw)
    window = len(points) // 10 * 2 + 1 if len(points) >= 10 else 1

    def paint(axes: Any) -> None:
        marker = "o" if len(points) < 3 else ""
        axes.plot(*zip(*points, strict=True), color=MAIN, marker=marker, alpha=0.4 if window > 1 else 1, linewidth=1)
        if window > 1:
            axes.plot(*zip(*_smooth(points, window), strict=True), color=MAIN)
        axes.set_xlabel(unit)
        _whole(axes.xaxis)
        if curve.percent:
            _percents(axes.yaxis)

    label = f"{curve.title} over {len(raw)} {unit}s, from {show(first)} to {show(last)}"
    return Chart(curve.key, curve.title, _draw(name, label, paint), f"{show(first)} → {show(last)}")


def _shown(points: Points) -> Callable[[float], str]:
    """How to print values of this size: three digits that count, or a power of ten."""
    largest = max(abs(y) for _, y in points)
    if 0 < largest < 0.001:
        return lambda value: f"{value:.1e}".replace("-", "−")
    return lambda value: _plain(value, 0 if largest >= 1000 else 1 if largest >= 10 else 2 if largest >= 0.1 else 4)


def _path_chart(key: str, title: str, rows: Sequence[Record], x: Curve, y: Curve) -> Chart | None:
    """One metric against another, a dot an iteration, from the early ones' colour to the late ones'."""
    points = _points(rows, x.key, y.key)
    if len(points) < 2:
        return None
    dots = _thin(points)
    correlation = _correlation(points)
    values = "" if correlation is None else f"correlation over the iterations {_signed(correlation)}"

    def paint(axes: Any) -> None:
        axes.plot(*zip(*dots, strict=True), color=GRID, linewidth=0.8)
        for i, (across, up) in enumerate(dots):
            axes.plot([across], [up], "o", markersize=4.5, color=_blend(i / (len(dots) - 1)))
        ground = {"facecolor": PANEL, "edgecolor": "none", "alpha": 0.75, "pad": 1}
        for i, word, where, side in ((0, "first", (-7, -9), "right"), (-1, "last", (7, 6), "left")):
            axes.annotate(word, dots[i], where, textcoords="offset points", ha=side, weight="bold", bbox=ground)
        axes.margins(0.15)
        axes.set_xlabel(x.title)
        axes.set_ylabel(y.title)
        for curve, axis in ((x, axes.xaxis), (y, axes.yaxis)):
            if curve.percent:
                _percents(axis)

    label = f"{title}: {y.title} against {x.title}, a dot an iteration. {values}"
    return Chart(key, title, _draw(key, label, paint, WIDE), values, wide=True)


def _cloud_chart(
    key: str, title: str, clouds: Mapping[str, Points], titles: Sequence[str], values: str
) -> Chart | None:
    """Clouds of dots, each in a colour of its own; a random part of them where they are very many."""
    clouds = {name: points for name, points in clouds.items() if points}
    if not clouds:
        return None
    drawn = {name: _some(points, MOST_DOTS // len(clouds)) for name, points in clouds.items()}

    def paint(axes: Any) -> None:
        for (name, points), colour in zip(drawn.items(), (MAIN, SECOND, THIRD, FOURTH), strict=False):
            axes.plot(
                *zip(*points, strict=True), "o", markersize=3, alpha=0.55, markeredgewidth=0, color=colour, label=name
            )
        axes.set_xlabel(titles[0])
        axes.set_ylabel(titles[1])
        if len(drawn) > 1:
            axes.figure.legend(loc="outside upper left", ncols=len(drawn), markerscale=2)

    label = f"{title}: {titles[1]} against {titles[0]}, a dot a text. {values}"
    return Chart(key, title, _draw(key, label, paint, WIDE), values, wide=True)


def _some(points: Points, most: int) -> Points:
    return points if len(points) <= most else random.Random(0).sample(points, most)


@dataclass(frozen=True)
class Dot:
    """A share to be drawn with its interval, if it has one."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None


def _dot_chart(key: str, title: str, groups: Mapping[str, Sequence[Dot]], axis_title: str) -> Chart:
    """Shares as dots in rows, with intervals, beside the line of chance; a row a group, a colour a name."""
    names = list(dict.fromkeys(dot.name for dots in groups.values() for dot in dots))
    look = dict(zip(names, zip((MAIN, SECOND, THIRD, FOURTH), "osD^", strict=True), strict=False))
    heights = {group: len(groups) - 1 - i for i, group in enumerate(groups)}

    def paint(axes: Any) -> None:
        axes.axvline(0.5, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        for group, dots in groups.items():
            for i, dot in enumerate(dots):
                _paint_dot(axes, dot, heights[group] + 0.22 * ((len(dots) - 1) / 2 - i), *look[dot.name])
        axes.set_yticks([heights[g] for g in groups], [g if len(g) <= 24 else f"{g[:23]}…" for g in groups])
        axes.set_ylim(-0.6, len(groups) - 0.4)
        axes.set_xlim(min(0.4, *_extremes(groups)) - 0.03, min(1.02, max(0.6, *_extremes(groups)) + 0.05))
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(axis_title)
        _percents(axes.xaxis)
        if len(names) > 1:
            handles = [axes.plot([], [], look[n][1], color=look[n][0], markersize=6, label=n)[0] for n in names]
            axes.figure.legend(handles=handles, loc="outside upper left", ncols=len(names), handletextpad=0.2)

    label = f"{title}: " + "; ".join(f"{g}: {d.name} {_interval(d)}" for g, dots in groups.items() for d in dots)
    return Chart(key, title, _draw(key, label, paint, (WIDE[0], 1.1 + 0.55 * len(groups))), wide=True)


def _paint_dot(axes: Any, dot: Dot, height: float, colour: str, marker: str) -> None:
    if dot.low is not None and dot.high is not None:
        axes.plot([dot.low, dot.high], [height, height], color=colour, linewidth=2.2, alpha=0.6)
    axes.plot([dot.value], [height], marker, color=colour, markersize=6)


def _extremes(groups: Mapping[str, Sequence[Dot]]) -> list[float]:
    return [v for dots in groups.values() for d in dots for v in (d.low, d.value, d.high) if v is not None]


def _interval(dot: Dot) -> str:
    """A share with its interval, in words."""
    if dot.low is None or dot.high is None:
        return _percent(dot.value)
    return f"{_percent(dot.value)} (95% interval {_percent(dot.low)} to {_percent(dot.high)})"


# --- what a section is made of ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A part of a section; ``kind`` is the template's name for how ``content`` is laid out."""

    kind: str
    content: Any
    title: str = ""


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it; the template has the explanation, by ``id``."""

    id: str
    title: str
    blocks: list[Block]


@dataclass(frozen=True)
class Card:
    """A big number, with what it is and how sure."""

    label: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of cells under their heads; the first cell heads its row. ``watched`` rows are marked."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    watched: Sequence[int] = ()


def _note(text: str) -> Block:
    return Block("note", text)


def _table(caption: str, heads: Sequence[str], rows: Sequence[Sequence[str]], watched: Sequence[int] = ()) -> Block:
    return Block("table", Table(caption, heads, rows, watched))


def _charts(charts: Sequence[Chart | None], title: str = "") -> list[Block]:
    drawn = [chart for chart in charts if chart is not None]
    return [Block("charts", drawn, title)] if drawn else []


def _awaited(stage: Stage, what: str) -> Block:
    """The note that stands where a stage has not come far enough."""
    reason = {"finished": "this run did not record it", "not begun": "this stage has not begun"}
    return _note(f"Not there yet: {what} ({stage.title}: {reason.get(stage.state, 'this stage is not finished')}).")


Stages = Mapping[str, Stage]


def _sections(stages: Stages) -> list[Section]:
    """The sections that concern a run of these stages, in reading order."""
    plan: list[tuple[Callable[[Stages], Section], Sequence[str]]] = [
        (_headline, [*STAGES, *APART]),
        (_ppo_curves, ["ppo"]),
        (_proxy_and_truth, ["ppo"]),
        (_reward_model, ["reward"]),
        (_win_rate, ["evaluate"]),
        (_side_by_side, ["evaluate"]),
        (_hacking_check, ["evaluate"]),
        (_over_training, ["ppo"]),
        (_preferred, ["dpo"]),
        (_fine_tuning, ["sft"]),
        (_collected, ["collect"]),
        (_labelled, ["label"]),
        (_course, [*STAGES, *APART]),
    ]
    return [build(stages) for build, needs in plan if any(name in stages for name in needs)]


# --- the headline -----------------------------------------------------------------------------------------------------


def _headline(stages: Stages) -> Section:
    """The few numbers that say what a run came to, of the latest stage that has any."""
    evaluated, rewarded = stages.get("evaluate"), stages.get("reward")
    outcome = _cards("Gained", _gains(evaluated)) + _cards("Paid", _costs(evaluated)) if evaluated else []
    blocks = outcome or _interim(stages)
    if rewarded:
        blocks += _cards("What the reward model knows", _reward_cards(rewarded))
    awaited = ", ".join(f"{stage.title} ({stage.state})" for stage in stages.values() if not stage.summary)
    if awaited:
        blocks.append(_note(f"This run is not finished; this is what there is so far. Missing: {awaited}."))
    return Section("improved", "What improved", blocks) if outcome else Section("short", "In short", blocks)


def _interim(stages: Stages) -> list[Block]:
    """The numbers of the latest stage before an evaluation."""
    makers = {"ppo": _ppo_cards, "dpo": _dpo_cards, "sft": _sft_cards, "collect": _count_cards, "label": _count_cards}
    for name, cards in makers.items():
        if name in stages and (made := cards(stages[name])):
            return _cards(stages[name].title, made)
    return []


def _cards(title: str, cards: Sequence[Card]) -> list[Block]:
    return [Block("cards", cards, title)] if cards else []


def _judges(stage: Stage, figures: Record) -> list[str]:
    """The judges of an evaluation that left figures, the one that decides the win rate first."""
    names = [str(name) for name in _list(stage.config.get("judges"))] or ["gold", "vader"]
    return [n for n in names if f"{n}_before" in figures and f"{n}_after" in figures]


def _judge_title(name: str) -> str:
    return {"gold": "the gold judge", "vader": "VADER", "score": "the reward model"}.get(name, name)


def _judge_level(name: str, value: Any) -> str:
    return _percent(value) if name == "gold" else _plain(value)


def _gains(stage: Stage) -> list[Card]:
    figures = stage.figures
    judges = _judges(stage, figures)
    cards = [_judge_card(stage, name) for name in judges]
    if (rate := _number(figures.get("win_rate"))) is not None:
        low, high = figures.get("win_rate_low"), figures.get("win_rate_high")
        judge = _judge_title(judges[0]) if judges else "the first judge"
        detail = f"95% interval {_percent(low)} to {_percent(high)}; 50% would be a draw"
        cards.append(Card(f"Answers preferred to those before, by {judge}", _percent(rate), detail))
    return cards


def _judge_card(stage: Stage, name: str) -> Card:
    """A judge's level before and after, with the interval of the paired difference where the answers are at hand."""
    what = {"gold": "Favourable answers, by the gold judge", "vader": "Mean sentiment, by VADER (−1 to 1)"}
    levels = [_judge_level(name, stage.figures.get(f"{name}_{when}")) for when in ("before", "after")]
    pairs = _points(stage.samples, f"{name}_before", f"{name}_after")
    detail = ""
    if len(pairs) > 1:
        gold = name == "gold"
        changes = [100 * ((b > 0.5) - (a > 0.5)) if gold else b - a for a, b in pairs]
        mean, low, high = (_signed(value, 0 if gold else 2) for value in _mean_interval(changes))
        detail = f"{mean}{' points' if gold else ''}, 95% interval {low} to {high}; {len(pairs)} prompts"
    return Card(what.get(name, f"Mean by {name}"), " → ".join(levels), detail)


def _costs(stage: Stage) -> list[Card]:
    figures = stage.figures
    cards = []
    if (kl := _number(figures.get("kl"))) is not None:
        error = 1.96 * (_number(figures.get("kl_stderr")) or 0.0)
        detail = f"nats an answer, 95% interval {_plain(kl - error, 1)} to {_plain(kl + error, 1)}; 0 is no distance"
        cards.append(Card("Distance from the old model (KL)", _plain(kl, 1), detail))
    for key, title, detail, show in (
        ("distinct2", "Different word pairs (distinct-2)", "a fall is a loss of variety", _percent),
        ("ended", "Answers that end by themselves", "the others ran into the length limit", _percent),
        ("words", "Words an answer", "a large change is a warning", lambda value: _plain(value, 1)),
    ):
        before, after = figures.get(f"{key}_before"), figures.get(f"{key}_after", figures.get(key))
        if _number(after) is not None:
            cards.append(Card(title, f"{show(before)} → {show(after)}", detail))
    return cards


def _reward_cards(stage: Stage) -> list[Card]:
    figures = stage.figures
    if _number(figures.get("reward_model_accuracy")) is None:
        return []
    accuracy, low, high = (_percent(figures.get(f"reward_model_accuracy{end}")) for end in ("", "_low", "_high"))
    return [
        Card("Held-out pairs ordered as the annotators did", accuracy, f"95% interval {low} to {high}"),
        Card("The same by bag-of-words", _percent(figures.get("bag_of_words")), "what word counts alone can do"),
        Card("The same by “the longer wins”", _percent(figures.get("longer_wins")), "what length alone can do"),
    ]


def _ppo_cards(stage: Stage) -> list[Card]:
    cards = []
    for key, title in (("score", "Reward score"), ("kl", "KL an answer, in nats"), ("ended", "Answers that end")):
        if points := _points(stage.metrics, "step", key):
            first, last, few = _ends(points)
            shown = [_percent(v) if key == "ended" else _plain(v, 2 if key == "score" else 1) for v in (first, last)]
            cards.append(Card(title, " → ".join(shown), f"means of the first and last {few} of {len(points)}"))
    return cards


def _dpo_cards(stage: Stage) -> list[Card]:
    accuracy, pairs = stage.summary.get("accuracy"), stage.summary.get("held_out_pairs", 0)
    if accuracy is None:
        return []
    detail = f"of {pairs:,} pairs it has not seen the preferred answer gained more over the reference"
    return [Card("Held-out pairs in the right order", _percent(accuracy), detail)]


def _sft_cards(stage: Stage) -> list[Card]:
    points = _points(stage.metrics, "step", "nll_nats_per_token")
    if not points:
        return []
    first, last, few = _ends(points)
    detail = f"means of the first and last {few} of {len(points)} steps"
    cards = [Card("Loss a token (nats)", f"{first:.2f} → {last:.2f}", detail)]
    if isinstance(rows := stage.summary.get("rows"), int):
        cut, dropped = stage.summary.get("cut", 0), stage.summary.get("dropped", 0)
        cards.append(Card("Demonstrations", f"{rows:,}", f"{cut} cut to length, {dropped} dropped"))
    return cards


COUNTS = {
    "comparisons": "Comparisons sampled",
    "answers": "Answers sampled",
    "human_comparisons": "Human comparisons added",
    "labelled": "Comparisons labelled",
}


def _count_cards(stage: Stage) -> list[Card]:
    found = {title: stage.summary.get(key) for key, title in COUNTS.items()}
    return [Card(title, f"{value:,}") for title, value in found.items() if isinstance(value, int)]


# --- PPO --------------------------------------------------------------------------------------------------------------

SCORE, KL = Curve("score", "Reward score"), Curve("kl", "KL per response (nats)")
GOLD, VADER = Curve("gold", "Gold judge", percent=True), Curve("vader", "VADER sentiment")
PPO_CURVES = (
    Curve("response_tokens", "Response length (tokens)"),
    Curve("actor/entropy_nats_per_token", "Entropy (nats a token)"),
    Curve("ended", "Answers that end", percent=True),
    Curve("actor/clip_fraction", "Clip fraction", percent=True),
    Curve("explained_variance", "Explained variance"),
    Curve("distinct2", "Distinct-2", percent=True),
)


def _monitors(stage: Stage) -> list[Curve]:
    """The judges that watched the training, gold first."""
    known = {"gold": GOLD, "vader": VADER}
    names = [str(name) for name in _list(stage.config.get("monitors"))]
    curves = [known.get(name) or Curve(name, name) for name in names]
    return sorted(curves, key=lambda c: c.key != "gold")


def _ppo_curves(stages: Stages) -> Section:
    stage = stages["ppo"]
    curves = [SCORE, *_monitors(stage), KL, *PPO_CURVES]
    if len({row.get("kl_coef") for row in stage.metrics}) > 1:
        curves.append(Curve("kl_coef", "KL coefficient"))
    charts = [_curve_chart(curve, stage.metrics, f"ppo-{i}") for i, curve in enumerate(curves)]
    blocks = _charts(charts) + _bookkeeping(stage) + _time_spent(stage)
    return Section("curves", "PPO, iteration by iteration", blocks or [_awaited(stage, "the curves of PPO")])


def _bookkeeping(stage: Stage) -> list[Block]:
    """Checks of the machinery itself, as opposed to its results."""
    checks = (
        (
            "first_log_ratio_max",
            "Largest |log ratio| at an iteration's first minibatch",
            max,
            "above 0.0001: a mismatch",
        ),
        ("engine_gap_nats_per_token", "Largest gap between sampling and training log-probabilities", max, "above 0.01"),
        (
            "actor/approx_kl_k2_nats_per_token",
            "Mean KL of one iteration's updates",
            statistics.fmean,
            "above 0.1: steps too large",
        ),
        ("actor/grad_norm", "Largest gradient norm of the actor", max, "many times the usual"),
        ("seconds", "Mean seconds an iteration", statistics.fmean, ""),
    )
    rows = []
    for key, title, summarise, bad in checks:
        if values := [value for (value,) in _column(stage.metrics, key)]:
            rows.append([title, f"{summarise(values):.2g}".replace("-", "−"), bad])
    return [_table("Checks of the machinery", ["Check", "Value", "Bad sign"], rows)] if rows else []


PHASES = {
    "generate": "Generate answers",
    "read": "Read actor, reference and critic",
    "judge": "Judge",
    "improve": "Improve",
    "publish": "Publish",
    "trace": "Trace answers (in iterations that are traced)",
    "probe": "Answer the same prompts again (in iterations that do)",
}


def _time_spent(stage: Stage) -> list[Block]:
    """Where an iteration's time goes, medians over iterations; its rates, where a profile was asked for."""
    kinds = {"seconds": ("Seconds", "{:.2f}")}
    if any(key.startswith("share_of_limit/") for line in stage.metrics for key in line):
        kinds["tokens_per_second"] = ("Answer tokens a second", "{:,.0f}")
        kinds["share_of_limit"] = ("Of the rate of float32 products alone", "{:.0%}")
    rows = []
    for phase, title in PHASES.items():
        cells = [title]
        for kind, (_, form) in kinds.items():
            values = [value for (value,) in _column(stage.metrics, f"{kind}/{phase}")]
            cells.append(form.format(statistics.median(values)) if values else "–")
        if cells[1] != "–":
            rows.append(cells)
    heads = ["Phase", *(head for head, _ in kinds.values())]
    return [_table("Where an iteration's time goes", heads, rows)] if rows else []


def _proxy_and_truth(stages: Stages) -> Section:
    """Score against gold, score against KL, and the same answer by answer where an evaluation has both."""
    stage = stages["ppo"]
    truth = (_monitors(stage) or [GOLD])[0]
    charts = [
        _path_chart("truth-score", f"{truth.title} against score", stage.metrics, SCORE, truth),
        _path_chart("score-kl", "Score gained against KL spent", stage.metrics, KL, SCORE),
        _answers_chart(stages.get("evaluate")),
    ]
    return Section("proxy", "Does the proxy part from the truth?", _charts(charts) + _parting(stage, truth))


def _parting(stage: Stage, truth: Curve) -> list[Block]:
    if not stage.metrics:
        return [_awaited(stage, "score and judges by iteration")]
    if not _points(stage.metrics, "step", truth.key):
        return [_note('No judge watched this training, so there is no truth to compare with; set monitors=["gold"].')]
    return []


def _answers_chart(stage: Stage | None) -> Chart | None:
    if stage is None:
        return None
    clouds = {when: _points(stage.samples, f"score_{when}", f"gold_{when}") for when in ("before", "after")}
    correlation = _correlation(clouds["after"])
    values = "" if correlation is None else f"correlation after training {_signed(correlation)}"
    titles = ("reward score", "gold judge's probability")
    return _cloud_chart("answers-scatter", "Held-out answers one by one", clouds, titles, values)


def _over_training(stages: Stages) -> Section:
    stage = stages["ppo"]
    steps = sorted({int(step) for (step,) in _column(stage.samples, "step")})
    chosen = sorted({steps[0], steps[len(steps) // 2], steps[-1]}) if steps else []
    blocks = [
        Block("samples", [_sample(s) for s in stage.samples if s.get("step") == step][:4], f"Iteration {step}")
        for step in chosen
    ]
    return Section("samples", "Samples over the course of training", blocks or [_awaited(stage, "samples")])


def _sample(row: Record) -> Record:
    """A prompt with its answer and what was measured of it."""
    facts = []
    if (score := _number(row.get("score"))) is not None:
        facts.append(f"score {_plain(score)}")
    if (gold := _number(row.get("gold"))) is not None:
        facts.append(f"gold {_percent(gold)}")
    if (vader := _number(row.get("vader"))) is not None:
        facts.append(f"VADER {_plain(vader)}")
    if (kl := _number(row.get("kl"))) is not None:
        facts.append(f"KL {_plain(kl, 1)}")
    if row.get("ended") is False:
        facts.append("ran into the length limit")
    return {"prompt": _text(row.get("prompt", "")), "response": _text(row.get("response", "")), "facts": facts}


# --- reward model -----------------------------------------------------------------------------------------------------


def _reward_model(stages: Stages) -> Section:
    stage = stages["reward"]
    sources = _sources(stage)
    charts = [_accuracy_chart(sources), _calibration_chart(sources), _length_chart(stage)]
    blocks = _charts(charts)
    if sources:
        blocks.append(_source_table(sources))
        if (hidden := len(stage.summary["sources"]) - len(sources)) > 0:
            blocks.append(_note(f"{hidden} more annotators with fewer pairs are left out."))
    else:
        blocks.append(_awaited(stage, "accuracy on held-out comparisons"))
    curves = [Curve("accuracy", "Training accuracy", percent=True), Curve("loss", "Training loss")]
    drawn = [_curve_chart(curve, stage.metrics, f"reward-{curve.key}", "step") for curve in curves]
    return Section("reward", "Reward model", blocks + _charts(drawn, "While it trained"))


def _sources(stage: Stage) -> dict[str, Record]:
    """What was measured by annotator, the most-measured first."""
    given = stage.summary.get("sources")
    sources = {str(k): v for k, v in given.items() if isinstance(v, dict)} if isinstance(given, dict) else {}
    ranked = sorted(sources.items(), key=lambda item: -(_number(item[1].get("pairs")) or 0))
    return dict(ranked[:MOST_SOURCES])


def _accuracy_chart(sources: Mapping[str, Record]) -> Chart | None:
    groups: dict[str, list[Dot]] = {}
    for name, source in sources.items():
        dots = []
        for key, title in (
            ("accuracy", "reward model"),
            ("bag_of_words", "bag-of-words"),
            ("longer_wins", "longer wins"),
        ):
            if (value := _number(source.get(key))) is not None:
                ends = (_number(source.get("low")), _number(source.get("high"))) if key == "accuracy" else (None, None)
                dots.append(Dot(title, value, *ends))
        if dots:
            groups[name] = dots
    if not groups:
        return None
    return _dot_chart("baselines", "Accuracy and baselines", groups, "held-out pairs ordered as the annotator did")


def _calibration_chart(sources: Mapping[str, Record]) -> Chart | None:
    """Reliability diagram: how often it is right when it says it is this sure."""
    curves: dict[str, Points] = {}
    for name, source in list(sources.items())[:4]:
        bins = [b for b in _list(source.get("calibration")) if isinstance(b, dict)]
        if points := _points(bins, "confidence", "accuracy"):
            curves[name] = points
    if not curves:
        return None

    def paint(axes: Any) -> None:
        axes.plot([0.5, 1], [0.5, 1], color=INK, linewidth=1, linestyle=(0, (4, 3)))
        for (name, points), colour, marker in zip(curves.items(), (MAIN, SECOND, THIRD, FOURTH), "osD^", strict=False):
            axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=4, label=name)
        axes.set_xlim(0.48, 1.02)
        axes.set_xlabel("confidence in the preferred text")
        axes.set_ylabel("right")
        _percents(axes.xaxis)
        _percents(axes.yaxis)
        axes.figure.legend(loc="outside upper left", ncols=len(curves))

    values = "; ".join(f"ECE {_percent(sources[name].get('ece'))} ({name})" for name in curves)
    label = f"Reliability diagram: accuracy against confidence. {values}"
    return Chart("calibration", "Calibration", _draw("calibration", label, paint, WIDE), values, wide=True)


def _length_chart(stage: Stage) -> Chart | None:
    rows = [row | {"length": len(row["response"])} for row in stage.samples if isinstance(row.get("response"), str)]
    points = _points(rows, "length", "score")
    correlation = _correlation(points)
    values = "" if correlation is None else f"correlation {_signed(correlation)} over {len(points)} texts"
    return _cloud_chart("length", "Score against length", {"texts": points}, ("characters", "score"), values)


def _source_table(sources: Mapping[str, Record]) -> Block:
    rows = [
        [
            name,
            _percent(s.get("accuracy")),
            f"{_percent(s.get('low'))} to {_percent(s.get('high'))}",
            _percent(s.get("bag_of_words")),
            _percent(s.get("longer_wins")),
            _percent(s.get("ece")),
            _plain(s.get("pairs"), 0),
            _plain(s.get("comparisons"), 0),
        ]
        for name, s in sources.items()
    ]
    heads = ["Annotator", "Accuracy", "95% interval", "Bag-of-words", "Longer wins", "ECE", "Pairs", "Comparisons"]
    return _table("By annotator", heads, rows)


# --- evaluation -------------------------------------------------------------------------------------------------------


def _win_rate(stages: Stages) -> Section:
    stage = stages["evaluate"]
    figures = stage.figures
    judges = _judges(stage, figures)
    results = {
        name: pairs
        for name in [*judges, "score"]
        if (pairs := _points(stage.samples, f"{name}_before", f"{name}_after"))
    }
    if not results:
        return Section("wins", "Win rate", [_awaited(stage, "the comparison of both models")])
    groups = {f"by {_judge_title(name)}": [_rate(pairs)] for name, pairs in results.items()}
    chart = _dot_chart("win-rate", "Wins against the reference", groups, "win rate")
    return Section("wins", "Win rate", [*_charts([chart]), _win_table(results)])


def _rate(pairs: Points) -> Dot:
    from plaudit.evaluation.compare import win_rate

    return Dot("win rate", *win_rate([after for _, after in pairs], [before for before, _ in pairs]))


def _win_table(results: Mapping[str, Points]) -> Block:
    rows = []
    for name, pairs in results.items():
        counted = Counter((after > before) - (after < before) for before, after in pairs)
        rate = _rate(pairs)
        shares = [_percent(rate.value), f"{_percent(rate.low)} to {_percent(rate.high)}"]
        rows.append([_judge_title(name), *(str(counted[sign]) for sign in (1, 0, -1)), *shares])
    return _table("Prompt by prompt", ["Judge", "Wins", "Ties", "Losses", "Win rate", "95% interval"], rows)


def _side_by_side(stages: Stages) -> Section:
    stage = stages["evaluate"]
    rows = [row for row in stage.samples if "before" in row and "after" in row]
    seed = stage.config.get("seed", 0)
    drawn = random.Random(seed if isinstance(seed, int) else 0)
    chosen = drawn.sample(range(len(rows)), min(SHOWN_PROMPTS, len(rows)))
    judges = _judges(stage, stage.figures)
    pairs = [_pair(rows[i], judges) for i in sorted(chosen)]
    how = f"{len(pairs)} of the {len(rows)} held-out prompts, drawn at random by the run's seed ({seed}), not picked."
    blocks = [_note(how), Block("pairs", pairs)] if pairs else [_awaited(stage, "answers of both models")]
    return Section("answers", "Before and after, side by side", blocks)


def _pair(row: Record, judges: Sequence[str]) -> Record:
    """A prompt with its two answers and what was measured of each."""
    sides = []
    for when, ended in (("before", "ended_before"), ("after", "ended")):
        facts = [f"{_short(j)} {_judge_level(j, row.get(f'{j}_{when}'))}" for j in judges]
        if _number(row.get(f"score_{when}")) is not None:
            facts.append(f"score {_plain(row[f'score_{when}'])}")
        if when == "after" and _number(row.get("kl")) is not None:
            facts.append(f"KL {_plain(row['kl'], 1)}")
        if row.get(ended) is False:
            facts.append("ran into the length limit")
        sides.append({"when": when.capitalize(), "text": _text(row[when]), "facts": facts})
    return {"prompt": _text(row.get("prompt", "")), "sides": sides}


def _short(judge: str) -> str:
    return {"vader": "VADER"}.get(judge, judge)


@dataclass(frozen=True)
class Habits:
    """What is counted of many answers together, to see whether they have become alike or broken."""

    distinct2: float
    repeated_words: float
    repeated_pairs: float
    copies: float
    empty: float
    words: float
    commonest: float

    @classmethod
    def of(cls, texts: Sequence[str]) -> Habits:
        from plaudit.evaluation.compare import distinct

        count = max(1, len(texts))
        copies = sum(n for n in Counter(t.strip() for t in texts).values() if n > 1)
        phrases = _phrases(texts)
        return cls(
            distinct2=distinct(texts),
            repeated_words=_repeated(texts, 1),
            repeated_pairs=_repeated(texts, 2),
            copies=copies / count,
            empty=sum(not t.strip() for t in texts) / count,
            words=sum(len(t.split()) for t in texts) / count,
            commonest=max(phrases.values(), default=0) / count,
        )


def _grams(text: str, n: int) -> list[tuple[str, ...]]:
    words = re.findall(r"[\w'’-]+", text.lower())
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]


def _repeated(texts: Sequence[str], n: int) -> float:
    """Share of n-grams that stand a second time in the same answer."""
    grams = [_grams(text, n) for text in texts]
    total = sum(len(g) for g in grams)
    return 1 - sum(len(set(g)) for g in grams) / total if total else 0.0


def _phrases(texts: Sequence[str]) -> Counter[tuple[str, ...]]:
    """In how many answers each run of three words stands."""
    return Counter(gram for text in texts for gram in set(_grams(text, 3)))


def _hacking_check(stages: Stages) -> Section:
    stage = stages["evaluate"]
    rows = [row for row in stage.samples if isinstance(row.get("before"), str) and isinstance(row.get("after"), str)]
    if not rows:
        return Section("hacking", "Has the reward been hacked?", [_awaited(stage, "answers of both models")])
    before, after = [row["before"] for row in rows], [row["after"] for row in rows]
    tables = [_habit_table(before, after), *_phrase_table(before, after)]
    return Section("hacking", "Has the reward been hacked?", tables)


#: what is counted, what it is called, when it is worth a warning, and the same as a test of (before, after)
HABITS: tuple[tuple[str, str, str, Callable[[float, float], bool]], ...] = (
    ("distinct2", "Different word pairs, over all answers (distinct-2)", "falls by a fifth", lambda a, b: b < 0.8 * a),
    ("repeated_words", "Words said before in the same answer", "grows by 5 points", lambda a, b: b > a + 0.05),
    ("repeated_pairs", "Word pairs said before in the same answer", "grows by 3 points", lambda a, b: b > a + 0.03),
    ("copies", "Answers that are given more than once", "grows by 5 points", lambda a, b: b > a + 0.05),
    ("commonest", "Answers that hold the commonest three words", "grows by 10 points", lambda a, b: b > a + 0.1),
    ("empty", "Empty answers", "grows by 1 point", lambda a, b: b > a + 0.01),
    ("words", "Words an answer", "changes by 30%", lambda a, b: abs(b - a) > 0.3 * a),
)


def _habit_table(before: Sequence[str], after: Sequence[str]) -> Block:
    old, new = Habits.of(before), Habits.of(after)
    rows, watched = [], []
    for i, (key, title, bound, passes) in enumerate(HABITS):
        was, now = getattr(old, key), getattr(new, key)
        show: Callable[[Any], str] = (lambda v: _plain(v, 1)) if key == "words" else _percent
        rows.append([title, show(was), show(now), "watch" if passes(was, now) else "fine", bound])
        watched += [i] if passes(was, now) else []
    heads = ["Counted", "Before", "After", "Verdict", "Watch if it"]
    return _table(f"Counted over {len(after)} answers", heads, rows, watched)


def _phrase_table(before: Sequence[str], after: Sequence[str]) -> list[Block]:
    """The runs of three words that gained most, without those that overlap one already named."""
    old, new = _phrases(before), _phrases(after)
    chosen: list[tuple[str, ...]] = []
    for phrase in sorted(new, key=lambda g: (old[g] - new[g], g)):
        if len(chosen) == 6 or new[phrase] - old[phrase] < 2:
            break
        if all(len(set(phrase) & set(other)) < 2 for other in chosen):
            chosen.append(phrase)
    if not chosen:
        return []
    shares = [[_percent(count[p] / len(before)) for count in (old, new)] for p in chosen]
    rows = [[f"“{_text(' '.join(phrase), 120)}”", *share] for phrase, share in zip(chosen, shares, strict=True)]
    return [_table("Phrases that grew most (share of answers that hold them)", ["Phrase", "Before", "After"], rows)]


# --- the earlier stages -----------------------------------------------------------------------------------------------


def _preferred(stages: Stages) -> Section:
    stage = stages["dpo"]
    curves = [
        Curve("loss", "Loss a pair"),
        Curve("accuracy", "Pairs in the right order, in training"),
        Curve("margin", "Gain of the chosen over the rejected answer (β · log ratio)"),
        Curve("chosen_reward", "Gain of the chosen answer (β · log ratio)"),
        Curve("grad_norm", "Gradient norm"),
    ]
    blocks = _charts([_curve_chart(curve, stage.metrics, f"dpo-{i}", "step") for i, curve in enumerate(curves)])
    return Section("dpo", "DPO", blocks or [_awaited(stage, "its loss curve")])


def _fine_tuning(stages: Stages) -> Section:
    stage = stages["sft"]
    curves = [
        Curve("nll_nats_per_token", "Loss (nats a token)"),
        Curve("entropy_nats_per_token", "Entropy (nats a token)"),
        Curve("grad_norm", "Gradient norm"),
    ]
    blocks = _charts([_curve_chart(curve, stage.metrics, f"sft-{i}", "step") for i, curve in enumerate(curves)])
    if stage.samples:
        blocks.append(Block("samples", [_sample(s) for s in stage.samples[:8]], "What it says after fine-tuning"))
    return Section("sft", "Supervised fine-tuning", blocks or [_awaited(stage, "its loss curve")])


def _collected(stages: Stages) -> Section:
    stage = stages["collect"]
    blocks = []
    if stage.summary:
        cards = _count_cards(stage)
        if ended := _column(stage.metrics, "ended"):
            cards.append(Card("Answers that end by themselves", _percent(ended[-1][0])))
        blocks += _cards("", cards)
    else:
        blocks.append(_awaited(stage, "the number of answers"))
    if stage.samples:
        blocks.append(Block("samples", [_sample(s) for s in stage.samples[:8]], "The first answers"))
    return Section("collect", "Answers to compare", blocks)


def _labelled(stages: Stages) -> Section:
    stage = stages["label"]
    blocks = _cards("", _count_cards(stage)) if stage.summary else [_awaited(stage, "the number of labels")]
    rankings = [_ranking(row) for row in stage.samples[:6] if isinstance(row.get("answers"), list)]
    if rankings:
        blocks.append(Block("rankings", rankings, "The first rankings, best first"))
    return Section("label", "Labels", blocks)


def _ranking(row: Record) -> Record:
    placed = zip(_list(row.get("ranks")), row["answers"], strict=False)
    ordered = sorted(((_number(rank) or 0.0, _text(answer)) for rank, answer in placed), key=lambda item: item[0])
    answers = [{"place": f"{rank + 1:.0f}", "text": answer} for rank, answer in ordered]
    return {"prompt": _text(row.get("prompt", "")), "annotator": _text(row.get("annotator", "")), "answers": answers}


# --- course, warnings, settings ---------------------------------------------------------------------------------------


def _course(stages: Stages) -> Section:
    """Stages with their seconds, and the warnings they left."""
    spent = {name: _number(stage.summary.get("seconds")) or 0.0 for name, stage in stages.items()}
    total = sum(spent.values())
    rows = [
        {
            "title": stage.title,
            "state": stage.state,
            "seconds": _duration(stage.summary.get("seconds")),
            "share": round(100 * spent[name] / total, 1) if total else 0,
            "memory": _plain(stage.summary.get("peak_rss_mib"), 0),
        }
        for name, stage in stages.items()
    ]
    return Section("course", "Stages, time and warnings", [Block("stages", rows), *_warnings(stages)])


def _warnings(stages: Stages) -> list[Block]:
    found = [
        [stage.title, _text(event.get("step", "–"), 20), _text(event.get("message", ""), 500)]
        for stage in stages.values()
        for event in stage.events
        if event.get("kind") == "warning"
    ]
    if not found:
        return [_note("No warnings were recorded.")]
    caption = "Warnings" if len(found) <= MOST_EVENTS else f"The first {MOST_EVENTS} of {len(found)} warnings"
    return [_table(caption, ["Stage", "Step", "Warning"], found[:MOST_EVENTS])]


def _rounds(top: Stage) -> list[Section]:
    """What each time round the loop came to, where there was more than one; the sections above are the last one's."""
    rows = []
    for number, done in enumerate(_list(top.summary.get("rounds")), 1):
        interval = f"{_percent(done.get('win_rate_low'))} to {_percent(done.get('win_rate_high'))}"
        rows.append(
            [
                str(number),
                str(done.get("labels", "–")),
                _percent(done.get("reward_model_accuracy")),
                _percent(done.get("gold_after")),
                f"{_percent(done.get('win_rate'))} ({interval})",
                _plain(done.get("kl"), 1),
            ]
        )
    heads = ["Round", "New labels", "Reward model's accuracy", "Gold", "Wins against the SFT model", "KL"]
    note = _note("All rounds start from the SFT model; the sections above are about the last round.")
    return [Section("rounds", "Round after round", [_table("Rounds", heads, rows), note])] if rows else []


def _settings(top: Stage, stages: Stages) -> Section:
    """Each stage's own settings; of a quickstart's, what no stage has taken over yet."""
    given = {key: value for key, value in top.config.items() if key not in stages or not stages[key].config}
    parts = {top.title: given} | {stage.title: stage.config for stage in stages.values()}
    blocks = [Block("settings", list(_flat(c)), f"{title}: configuration") for title, c in parts.items() if c]
    if top.environment:
        blocks.append(Block("settings", list(_flat(top.environment)), "Environment"))
    return Section("settings", "Configuration and environment", blocks)


# --- the page ---------------------------------------------------------------------------------------------------------


def _facts(top: Stage) -> list[tuple[str, str]]:
    """What stands under the title."""
    known = {
        "Command": f"plaudit {top.command}",
        "State": top.state,
        "Model": top.config.get("model"),
        "Seed": top.config.get("seed"),
        "Started": str(top.environment.get("started", "")).replace("T", " ")[:16] or None,
        "Took": _duration(top.summary["seconds"]) if "seconds" in top.summary else None,
        "Memory": f"{_plain(top.summary['peak_rss_mib'], 0)} MiB at most" if "peak_rss_mib" in top.summary else None,
        "Processors": top.environment.get("processors"),
    }
    return [(name, _text(value, 200)) for name, value in known.items() if value is not None]


def _page(top: Stage, sections: Sequence[Section]) -> str:
    """The HTML. Everything but the charts goes through autoescaping: a text of a model's can never run."""
    from importlib.resources import files

    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((files("plaudit") / "templates" / "report.html.j2").read_text(encoding="utf-8"))
    return template.render(
        name=top.folder.resolve().name, command=top.command, facts_of_run=_facts(top), sections=sections
    )


__all__ = ["write_report"]
