"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const WIDE = data.wide;
  const find = (id) => document.getElementById(id);
  const state = { x: 0, from: 0, to: WIDE, block: -1 };

  // Numbers and words ----------------------------------------------------------------------------
  const bytes = (n) => {
    if (n < 1024) return `${n} B`;
    for (const unit of ["KiB", "MiB", "GiB"]) {
      n /= 1024;
      if (n < 1023.95) return `${n.toFixed(1)} ${unit}`;
    }
    return `${(n / 1024).toFixed(1)} TiB`;
  };
  const digits = (n) => n.toFixed(n >= 100 ? 0 : n >= 10 ? 1 : 2);
  const moment = (x) => {
    const at = (x / WIDE) * data.total;
    if (data.timed && at <= 0) return "0";
    if (!data.timed) return `step ${Math.round(at)}`;
    return data.total >= 1 ? `${digits(at)} s` : data.total >= 1e-3 ? `${digits(at * 1e3)} ms` : `${digits(at * 1e6)} µs`;
  };
  const name = (i) => data.names[i];

  // The step at a place: the last one that begins at or before it, of those with a width.
  const stepAt = (curve, x) => {
    let low = 0, high = curve.o.length - 1;
    if (high < 0 || x > curve.x[high + 1]) return -1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (curve.x[middle] <= x) low = middle; else high = middle - 1;
    }
    return low;
  };
  const element = (tag, text) => { const made = document.createElement(tag); made.textContent = text; return made; };
  const fill = (card, lines) => {
    card.replaceChildren();
    lines.filter(([, text]) => text).forEach(([tag, text], i) => {
      if (i) card.append(document.createElement("br"));
      card.append(element(tag, text));
    });
  };

  // The cursor that timeline and arena share -----------------------------------------------------
  const describe = (title, curve) => {
    const i = stepAt(curve, state.x);
    if (i < 0) return [["span", `${title}: the step is over`]];
    const where = [name(curve.m[i]), name(curve.s[i]), name(curve.p[i])].filter(Boolean).join(" · ");
    return [
      ["span", `${title}, step ${i + 1} of ${curve.o.length}`],
      ["b", bytes(data.resident + curve.b[i])],
      ["code", name(curve.o[i])],
      ["span", where],
    ];
  };
  const percent = (x) => (100 * (x - state.from)) / (state.to - state.from);
  const move = (x) => {
    state.x = Math.max(0, Math.min(WIDE, x));
    for (const cursor of document.querySelectorAll(".cursor")) {
      cursor.style.left = `${percent(state.x)}%`;
      cursor.hidden = false;
    }
    const eager = describe("Eager", data.eager), plan = describe("Plan", data.plan);
    fill(find("read-eager"), eager);
    fill(find("read-plan"), plan);
    const spoken = [moment(state.x), ...eager.map((l) => l[1]), ...plan.map((l) => l[1])].filter(Boolean).join(", ");
    const handle = find("timeline-handle");
    handle.setAttribute("aria-valuenow", Math.max(0, stepAt(data.plan, state.x)));
    handle.setAttribute("aria-valuetext", spoken);
  };

  // Zoom: every picture in time is an SVG whose view box is cut ------------------------------------
  const view = (from, to) => {
    const least = WIDE / 2000;
    if (to - from < least) { const middle = (from + to) / 2; from = middle - least / 2; to = middle + least / 2; }
    const width = Math.min(WIDE, to - from);
    state.from = Math.max(0, Math.min(WIDE - width, from));
    state.to = state.from + width;
    for (const svg of document.querySelectorAll("svg.in-time")) {
      const high = svg.viewBox.baseVal.height;
      svg.setAttribute("viewBox", `${state.from} 0 ${width} ${high}`);
    }
    for (const mark of document.querySelectorAll("[data-x]")) {
      const at = percent(Number(mark.dataset.x));
      mark.style.left = `${at}%`;
      mark.hidden = at < -0.5 || at > 100.5;
    }
    for (const label of document.querySelectorAll("[data-share]")) {
      label.textContent = moment(state.from + width * Number(label.dataset.share));
    }
    find("whole").hidden = width >= WIDE;
    move(state.x);
    pick(state.block);
  };
  const zoom = (factor) => {
    const width = (state.to - state.from) * factor;
    const share = Math.max(0, Math.min(1, (state.x - state.from) / (state.to - state.from)));
    view(state.x - width * share, state.x + width * (1 - share));
  };

  // Blocks of the arena ----------------------------------------------------------------------------
  const blocks = data.blocks;
  const aliveAt = (x) => {
    const step = stepAt(data.plan, x), found = [];
    for (let i = 0; i < blocks.a.length && step >= 0; i++) if (blocks.a[i] <= step && step < blocks.z[i]) found.push(i);
    return found.sort((i, j) => blocks.y[i] - blocks.y[j]);
  };
  const pick = (i) => {
    const box = find("picked");
    if (!box) return;
    state.block = i;
    box.hidden = i < 0;
    if (i < 0) return;
    const left = percent(data.plan.x[blocks.a[i]]), right = percent(data.plan.x[blocks.z[i]]);
    Object.assign(box.style, {
      left: `${left}%`, width: `${right - left}%`,
      bottom: `${(100 * blocks.y[i]) / data.arena}%`, height: `${(100 * blocks.n[i]) / data.arena}%`,
    });
    const where = [name(blocks.m[i]), name(blocks.s[i])].filter(Boolean).join(" · ");
    const lines = [
      ["b", `${bytes(blocks.n[i])} ${name(blocks.k[i])}`],
      ["code", name(blocks.o[i])],
      ["span", where],
      ["span", `steps ${blocks.a[i] + 1} to ${blocks.z[i]}, offset ${bytes(blocks.y[i])}`],
    ];
    fill(find("read-block"), lines);
    find("arena-handle").setAttribute("aria-valuetext", lines.map((l) => l[1]).filter(Boolean).join(", "));
  };

  // Pointers: moving reads, dragging with a mouse zooms ---------------------------------------------
  const placeOf = (frame, event) => {
    const box = frame.getBoundingClientRect();
    const across = Math.max(0, Math.min(1, (event.clientX - box.left) / box.width));
    return { x: state.from + across * (state.to - state.from), up: 1 - (event.clientY - box.top) / box.height };
  };
  const attach = (frame, read) => {
    const brush = frame.querySelector(".brush");
    let start = null;
    const show = (a, b) => Object.assign(brush.style, { left: `${percent(Math.min(a, b))}%`, width: `${Math.abs(percent(a) - percent(b))}%` });
    frame.addEventListener("pointermove", (event) => {
      const at = placeOf(frame, event);
      if (start === null) { read(at); return; }
      brush.hidden = Math.abs(percent(at.x) - percent(start)) < 1;
      show(start, at.x);
    });
    frame.addEventListener("pointerdown", (event) => {
      const at = placeOf(frame, event);
      read(at);
      if (event.pointerType !== "mouse" || event.button !== 0) return;
      start = at.x;
      frame.setPointerCapture(event.pointerId);
    });
    frame.addEventListener("pointerup", (event) => {
      const end = placeOf(frame, event).x;
      if (start !== null && !brush.hidden) view(Math.min(start, end), Math.max(start, end));
      start = null;
      brush.hidden = true;
    });
    frame.addEventListener("pointercancel", () => { start = null; brush.hidden = true; });
    frame.addEventListener("dblclick", () => view(0, WIDE));
  };
  const readArena = (at) => {
    move(at.x);
    const offset = at.up * data.arena;
    const under = aliveAt(at.x).find((i) => blocks.y[i] <= offset && offset < blocks.y[i] + blocks.n[i]);
    if (under !== undefined) pick(under);
  };

  // Keys: a plot is a slider --------------------------------------------------------------------------
  const walk = (count) => {
    const edges = data.plan.x, step = Math.max(0, stepAt(data.plan, Math.min(state.x, edges[edges.length - 1])));
    let next = Math.max(0, Math.min(data.plan.o.length - 1, step + count));
    while (count > 0 && next < data.plan.o.length - 1 && edges[next + 1] <= state.x) next++;
    while (count < 0 && next > 0 && edges[next + 1] === edges[next]) next--;
    move((edges[next] + edges[next + 1]) / 2);
    if (state.x < state.from || state.x > state.to) { const half = (state.to - state.from) / 2; view(state.x - half, state.x + half); }
  };
  const keys = (vertical) => (event) => {
    const far = event.shiftKey ? 10 : 1;
    const act = {
      ArrowRight: () => walk(far), ArrowLeft: () => walk(-far), PageUp: () => walk(-50), PageDown: () => walk(50),
      Home: () => move(0), End: () => move(data.plan.x[data.plan.x.length - 1]),
      "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => view(0, WIDE), Escape: () => view(0, WIDE),
      ArrowUp: () => vertical(1), ArrowDown: () => vertical(-1),
    }[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  };
  const climb = (by) => {
    const alive = aliveAt(state.x);
    if (!alive.length) return;
    const at = alive.indexOf(state.block);
    pick(alive[Math.max(0, Math.min(alive.length - 1, at < 0 ? 0 : at + by))]);
  };

  // The frontier ------------------------------------------------------------------------------------------
  for (const dot of document.querySelectorAll(".dot")) {
    const show = () => { find("read-point").textContent = dot.getAttribute("aria-label"); };
    dot.addEventListener("pointerenter", show);
    dot.addEventListener("focus", show);
    dot.addEventListener("click", show);
  }

  const peak = (curve) => {
    let step = 0;
    curve.b.forEach((n, i) => { if (n > curve.b[step] && curve.x[i] < curve.x[i + 1]) step = i; });
    view(0, WIDE);
    move((curve.x[step] + curve.x[step + 1]) / 2);
  };
  attach(find("timeline-frame"), (at) => move(at.x));
  find("timeline-handle").addEventListener("keydown", keys((by) => walk(by)));
  if (find("arena-frame")) {
    attach(find("arena-frame"), readArena);
    find("arena-handle").addEventListener("keydown", keys(climb));
  }
  for (const [id, act] of [
    ["to-eager", () => peak(data.eager)], ["to-plan", () => peak(data.plan)],
    ["closer", () => zoom(0.5)], ["wider", () => zoom(2)], ["whole", () => view(0, WIDE)],
  ]) find(id).addEventListener("click", act);
  for (const hidden of document.querySelectorAll(".needs-script")) hidden.hidden = false;
  peak(data.plan);
  const [largest] = aliveAt(state.x).sort((i, j) => blocks.n[j] - blocks.n[i]);
  if (largest !== undefined) pick(largest);
  document.documentElement.dataset.ready = "true";
})();
