"use strict";
(() => {
  const read = id => JSON.parse(document.getElementById(id).textContent);
  const t = read("words");
  const runs = read("runs").map(run => ({ ...run, metrics: [], samples: [], probes: [], events: [], state: {}, heard: 0 }));
  const colour = i => `var(--r${i % 6})`;
  const monitors = [...new Set(runs.flatMap(run => run.monitors || []))];
  // what is drawn, in the order of the report: gains, costs, then signs of trouble
  const CURVES = [["score", "watch_score"], ...monitors.map(m => [m, m]), ["kl", "watch_kl"],
    ["response_tokens", "watch_length"], ["ended", "watch_ended"], ["actor/entropy_nats_per_token", "watch_entropy"],
    ["actor/clip_fraction", "watch_clip"], ["explained_variance", "watch_explained"], ["distinct2", "watch_distinct"],
    ["seconds", "watch_seconds"]];
  const PHASES = ["generate", "read", "judge", "improve", "publish", "trace", "probe"];

  // --- small helpers: text is always set as text, so that nothing a model wrote can run
  function make(name, set = {}, ...inner) {
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(set)) key === "class" ? (element.className = value) : (element[key] = value);
    element.append(...inner);
    return element;
  }
  const SVG = "http://www.w3.org/2000/svg";
  function draw(name, set, text) {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(set)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    return element;
  }
  const swatch = i => { const s = make("span", { class: "swatch" }); s.style.background = colour(i); return s; };
  const say = (phrase, values) => phrase.replace(/\{(\w+)\}/g, (_, key) => values[key]);
  const minus = text => text.replace("-", "−");
  function shown(x) {
    if (typeof x !== "number" || !Number.isFinite(x)) return "–";
    const size = Math.abs(x);
    if (!size) return "0";
    if (size < 0.001) return minus(x.toExponential(1));
    return minus(x.toFixed(size >= 1000 ? 0 : size >= 10 ? 1 : size >= 0.1 ? 2 : 3));
  }
  /** What cannot be seen, or changes the direction of text, by its name. */
  const visible = text => text.replace(/[\u200e\u200f\u061c\u202a-\u202e\u2066-\u2069\u200b\u2060\ufeff\u0000-\u0008\u000b-\u001f\u007f-\u009f]/g,
    c => `⟨U+${c.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
  const cut = text => visible(text.length > 3000 ? text.slice(0, 3000) + " …" : text);

  // --- curves
  const W = 300, H = 150, LEFT = 40, RIGHT = 6, TOP = 8, BOTTOM = 18;
  /** At most 300 points, means of neighbours, so that a long run stays quick to draw. */
  function thin(points) {
    const size = Math.ceil(points.length / 300);
    if (size <= 1) return points;
    const made = [];
    for (let i = 0; i < points.length; i += size) {
      const part = points.slice(i, i + size), sum = axis => part.reduce((a, p) => a + p[axis], 0) / part.length;
      made.push([sum(0), sum(1)]);
    }
    return made;
  }
  function ticks(low, high, count) {
    const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map(m => m * power).find(s => s >= rough);
    const made = [];
    for (let v = Math.ceil(low / step) * step; v <= high + step * 1e-9; v += step) made.push(Math.abs(v) < step * 1e-9 ? 0 : v);
    return made;
  }
  function chart(title, lines, xTitle) {
    const all = lines.flatMap(line => line.points);
    if (!all.length) return null;
    let [x0, x1] = [Math.min(...all.map(p => p[0])), Math.max(...all.map(p => p[0]))];
    let [y0, y1] = [Math.min(...all.map(p => p[1])), Math.max(...all.map(p => p[1]))];
    if (x0 === x1) x1 = x0 + 1;
    const room = (y1 - y0) * 0.06 || Math.abs(y1) * 0.1 || 1;
    y0 -= room; y1 += room;
    const x = v => LEFT + (v - x0) / (x1 - x0) * (W - LEFT - RIGHT), y = v => H - BOTTOM - (v - y0) / (y1 - y0) * (H - TOP - BOTTOM);
    const latest = lines.filter(l => l.points.length).map(l => `${shown(l.points[0][1])} → ${shown(l.points.at(-1)[1])}`).join(" · ");
    const svg = draw("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${title}: ${latest}` });
    for (const v of ticks(y0, y1, 4)) {
      svg.append(draw("line", { class: "grid", x1: LEFT, x2: W - RIGHT, y1: y(v), y2: y(v) }));
      svg.append(draw("text", { x: LEFT - 4, y: y(v) + 3, "text-anchor": "end" }, shown(v)));
    }
    for (const v of ticks(x0, x1, 5)) svg.append(draw("text", { x: x(v), y: H - 4, "text-anchor": "middle" }, xTitle ? shown(v) : String(Math.round(v))));
    for (const line of lines) {
      const points = line.points;
      const path = draw("polyline", { points: points.map(p => `${x(p[0]).toFixed(1)},${y(p[1]).toFixed(1)}`).join(" ") });
      path.style.stroke = line.colour;
      svg.append(path);
      if (points.length) {
        const end = draw("circle", { cx: x(points.at(-1)[0]), cy: y(points.at(-1)[1]), r: 2.6 });
        end.style.fill = line.colour;
        svg.append(end);
      }
    }
    const caption = make("figcaption", {}, make("span", { textContent: title }), make("span", { class: "soft", textContent: latest }));
    return make("figure", { class: "chart panel" }, caption, svg);
  }
  /** Means over three iterations: one batch's noise hides where a run is going. */
  const smooth = points => points.map((_, i) => {
    const near = points.slice(Math.max(0, i - 1), i + 2), mean = axis => near.reduce((a, p) => a + p[axis], 0) / near.length;
    return [mean(0), mean(1)];
  });
  const series = (run, a, b) => thin(run.metrics.filter(m => Number.isFinite(m[a]) && Number.isFinite(m[b])).map(m => [m[a], m[b]]));
  function curves() {
    const made = CURVES.map(([key, title]) =>
      chart(t[title] || title, runs.map((run, i) => ({ points: series(run, "step", key), colour: colour(i) }))));
    const truth = monitors[0];
    // the proxy against the truth: a policy that games its reward goes right and down
    if (truth) made.splice(1, 0, chart(say(t.watch_against, { judge: truth }),
      runs.map((run, i) => ({ points: smooth(series(run, "score", truth)), colour: colour(i) })), true));
    document.getElementById("charts").replaceChildren(...made.filter(Boolean));
  }

  // --- the rest of the page
  function states() {
    document.getElementById("states").replaceChildren(...runs.map((run, i) => {
      const step = run.metrics.length ? run.metrics.at(-1).step : 0, per = run.metrics.slice(-5).map(m => m.seconds);
      const each = per.length ? per.reduce((a, b) => a + b, 0) / per.length : 0;
      const left = Math.round(each * ((run.iterations || step) - step));
      const bar = make("progress", { max: run.iterations || 1, value: step });
      bar.setAttribute("aria-label", t.watch_progress);
      const words = run.state.finished ? t.watch_finished : !step ? t.watch_waiting
        : say(t.watch_left, { time: left >= 120 ? `${Math.round(left / 60)} min` : `${left} s` });
      return make("div", { class: "state panel" }, make("span", { class: "name" }, swatch(i), run.state.folder || run.name), bar,
        make("span", { textContent: say(t.watch_step, { step, all: run.iterations || "?" }) }), make("span", { class: "soft", textContent: words }));
    }));
  }
  function fill(id, elements) {
    const section = document.getElementById(id);
    section.hidden = !elements.length;
    section.querySelector("ul, div").replaceChildren(...elements);
  }
  const warnings = () => fill("warnings", runs.flatMap((run, i) => run.events.filter(e => e.kind === "warning").map(e =>
    make("li", { class: "note warn" }, runs.length > 1 ? swatch(i) : "", e.message))));
  function phases() {
    fill("time", runs.flatMap((run, i) => {
      const last = run.metrics.slice(-5), mean = phase => last.reduce((a, m) => a + (m[`seconds/${phase}`] || 0), 0) / last.length;
      const times = PHASES.map(mean), total = times.reduce((a, b) => a + b, 0);
      if (!last.length || !total) return [];
      const bar = make("div", { class: "phase-bar" });
      bar.setAttribute("aria-hidden", "true");
      PHASES.forEach((phase, j) => { const part = make("span"); part.style.flex = `${times[j] / total} 0 0`; part.style.background = colour(j); bar.append(part); });
      const names = make("div", { class: "phase-names" }, ...PHASES.map((phase, j) =>
        make("span", {}, swatch(j), `${t["watch_phase_" + phase]} ${times[j].toFixed(2)} s`)));
      return [make("div", { class: "panel" }, runs.length > 1 ? make("div", { textContent: run.name }) : "", bar, names)];
    }));
  }
  const answer = text => make("div", { class: "text", textContent: text.trim() ? cut(text) : t.empty_answer });
  function probes() {
    fill("probes", runs.flatMap((run, i) => {
      const newest = Math.max(0, ...run.probes.map(p => p.step)), first = run.probes.filter(p => p.step === 0);
      return run.probes.filter(p => p.step === newest).map((probe, j) => {
        const before = first[j] || { response: "" };
        return make("div", { class: "panel" }, make("div", { class: "asked" }, runs.length > 1 ? swatch(i) : "", cut(probe.prompt)),
          make("div", { class: "pair" },
            make("div", {}, make("h3", { textContent: t.watch_reference }), answer(before.response)),
            make("div", {}, make("h3", { textContent: say(t.watch_now, { step: newest }) }), answer(probe.response))));
      });
    }));
  }
  function samples() {
    fill("samples", runs.flatMap((run, i) => {
      const newest = Math.max(0, ...run.samples.map(s => s.step)), traced = run.state.traced || [];
      return run.samples.filter(s => s.step === newest).map((sample, row) => {
        const facts = ["score", "kl", ...(run.monitors || [])].filter(k => typeof sample[k] === "number").map(k => `${k} ${shown(sample[k])}`);
        const line = make("div", { class: "facts" }, say(t.watch_iteration, { step: newest }) + " · " + facts.join(" · "));
        if (traced.includes(newest) && row < run.traced) line.append(" · ", make("a", { href: `/trace/${i}/${newest}/${row}`, textContent: t.watch_trace }));
        return make("div", { class: "panel" }, make("div", { class: "asked" }, runs.length > 1 ? swatch(i) : "", cut(sample.prompt)), answer(sample.response), line);
      });
    }));
  }
  const VIEWS = { metrics: [states, curves, phases], samples: [samples], probes: [probes], events: [warnings], state: [states, samples] };
  const due = new Set();
  function redraw() { const views = [...due]; due.clear(); views.forEach(view => view()); }
  function take(news) {
    const run = runs[news.run];
    if (news.kind === "state") run.state = news.lines[0];
    else run[news.kind] = news.anew ? news.lines : run[news.kind].concat(news.lines);
    // what comes in one burst is drawn once
    if (!due.size) requestAnimationFrame(redraw);
    VIEWS[news.kind].forEach(view => due.add(view));
  }
  const link = document.getElementById("link");
  const source = new EventSource("/events");
  // a connection that comes back starts from the beginning: "anew" replaces what was there
  source.onmessage = event => take(JSON.parse(event.data));
  source.onopen = () => { link.textContent = ""; };
  source.onerror = () => { link.textContent = t.watch_lost; };
  states();
})();
