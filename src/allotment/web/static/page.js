// SPDX-License-Identifier: Apache-2.0
// What the page does besides showing itself: live updates, charts, keys. Works without a build.
"use strict";

const live = document.getElementById("live");
const connection = document.getElementById("connection");
const HOUR_S = 3600;
let isPaused = false;
let isAsking = false;
let isLate = false;

// ---- live: after each reading the same address is asked for its changing part

function isShown(node) {
  return node.nodeType !== Node.TEXT_NODE || node.data.trim() !== "";
}

function morph(old, fresh) {
  if (old.nodeName !== fresh.nodeName || (old.id || "") !== (fresh.id || "")) {
    old.replaceWith(fresh);
    return;
  }
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  if (old.nodeName === "OUTPUT") return;
  for (const { name, value } of [...fresh.attributes]) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name) && name !== "tabindex" && name !== "open") old.removeAttribute(name);
  }
  // Space between elements differs, and would shift all: an input in use would be replaced.
  const mine = [...old.childNodes].filter(isShown);
  const theirs = [...fresh.childNodes].filter(isShown);
  theirs.forEach((child, place) => {
    if (place < mine.length) morph(mine[place], child);
    else old.appendChild(child);
  });
  mine.slice(theirs.length).forEach((child) => child.remove());
}

async function refresh() {
  if (isPaused || document.hidden) {
    isLate = true;
    return;
  }
  if (isAsking) return;
  isAsking = true;
  isLate = false;
  try {
    const answer = await fetch(location.href, { headers: { "X-Part": "live" } });
    if (answer.ok) {
      const fresh = document.createElement("div");
      fresh.id = "live";
      fresh.innerHTML = await answer.text();
      for (const { name, value } of [...live.attributes]) fresh.setAttribute(name, value);
      morph(live, fresh);
      live.dataset.updates = String(Number(live.dataset.updates || 0) + 1);
      roam();
      await Promise.all(charts.map((chart) => chart.isStill || chart.extend()));
      say("live");
    } else if (answer.status === 401) say("not live: open the page again with its key");
    else say(`not live: status ${answer.status}`);
  } catch {
    say("not live: no connection");
  } finally {
    isAsking = false;
  }
}

function say(text) {
  if (connection.textContent !== text) connection.textContent = text;
}

function pause() {
  isPaused = !isPaused;
  say(isPaused ? "paused" : "live");
  if (!isPaused) refresh();
}

// ---- charts by uPlot: the last hour, which grows; or a longer range, as it was when it was asked for

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function inBytes(value) {
  if (value === null || value === undefined) return "-";
  const units = ["B", "Ki", "Mi", "Gi", "Ti"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${Math.round(value * 10) / 10}${units[unit]}`;
}

function inPercent(value) {
  return value === null || value === undefined ? "-" : `${Math.round(value * 100)} %`;
}

const POWERS = Array.from({ length: 40 }, (_, power) => 2 ** (power + 10));

class Chart {
  constructor(place) {
    this.place = place;
    this.format = place.dataset.figure === "memory" ? inBytes : inPercent;
    this.isStill = "still" in place.dataset;
    this.names = [];
    this.data = [[]];
    new ResizeObserver(() => this.plot?.setSize(this.size())).observe(place);
  }

  size() {
    return { width: Math.max(280, this.place.clientWidth), height: 180 };
  }

  async ask(since) {
    const answer = await fetch(`${this.place.dataset.address}&since=${since}`);
    return answer.ok ? answer.json() : null;
  }

  async extend() {
    const times = this.data[0];
    const last = times.length ? times[times.length - 1] : 0;
    const more = await this.ask(last);
    if (more === null) return;
    if (more.names.join("\n") !== this.names.join("\n")) {
      const whole = last ? await this.ask(0) : more;
      if (whole === null) return;
      this.names = whole.names;
      this.data = [whole.times, ...whole.values];
      this.draw();
      return;
    }
    if (!more.times.length) return;
    const first = more.times[more.times.length - 1] - HOUR_S;
    const joined = [more.times, ...more.values].map((values, row) => [...this.data[row], ...values]);
    const old = joined[0].findIndex((time) => time >= first);
    this.data = joined.map((values) => values.slice(old));
    this.plot.setData(this.data);
  }

  draw() {
    this.plot?.destroy();
    // Shares have the colours of the GPU's bar.
    const shares = this.names[0] === "GPU" ? 1 : 0;
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 } };
    this.plot = new uPlot(
      {
        ...this.size(),
        series: [
          {},
          ...this.names.map((label, place) => ({
            label,
            stroke: colour(place < shares ? "--ink" : `--h${(place - shares) % 6}`),
            dash: place - shares >= 6 ? [6, 4] : undefined,
            width: 1.5,
            points: { show: false },
            value: (_, value) => this.format(value),
          })),
        ],
        scales: { y: { range: (_, low, high) => [0, high > 0 ? high * 1.05 : 1] } },
        axes: [
          axis,
          {
            ...axis,
            size: 64,
            incrs: this.format === inBytes ? POWERS : undefined,
            values: (_, ticks) => ticks.map(this.format),
          },
        ],
      },
      this.data,
      this.place,
    );
  }
}

const charts = [...document.querySelectorAll(".chart")].map((place) => new Chart(place));
charts.forEach((chart) => chart.extend());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
  charts.forEach((chart) => chart.plot && chart.draw()),
);

// ---- the heat map: one stop for the tab key, arrows inside; the overview leads to nodes

function cells() {
  return [...document.querySelectorAll(".heat tbody tr")].map((row) => [...row.querySelectorAll("a.gpu")]);
}

function roam() {
  const all = cells().flat();
  const stop = all.find((cell) => cell.tabIndex === 0 && cell.hasAttribute("tabindex")) || all[0];
  all.forEach((cell) => cell.setAttribute("tabindex", cell === stop ? "0" : "-1"));
}

function step(event) {
  const here = document.activeElement;
  if (!here?.matches?.(".heat a.gpu")) return false;
  const rows = cells();
  const row = rows.findIndex((each) => each.includes(here));
  const column = rows[row].indexOf(here);
  const [down, right] = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  const next = rows[row + down]?.[column + right];
  if (!next) return false;
  here.setAttribute("tabindex", "-1");
  next.setAttribute("tabindex", "0");
  next.focus();
  return true;
}

function pointed(event) {
  const picture = document.getElementById("overview");
  if (!picture || !picture.contains(event.target)) return null;
  const box = picture.getBoundingClientRect();
  const scale = picture.viewBox.baseVal.width / box.width;
  const column = Math.floor(((event.clientX - box.left) * scale) / Number(picture.dataset.step));
  const row = Math.floor(((event.clientY - box.top) * scale) / Number(picture.dataset.height));
  return picture.dataset.nodes.split(" ")[row * Number(picture.dataset.row) + column] || null;
}

live.addEventListener("pointermove", (event) => {
  const output = document.getElementById("pointed");
  if (output) output.textContent = pointed(event) || "";
});
live.addEventListener("click", (event) => {
  const node = pointed(event);
  if (node) location.href = `/nodes/${encodeURIComponent(node)}`;
});
live.addEventListener("change", (event) => {
  if (event.target.matches("select")) event.target.form.requestSubmit();
});

// ---- keys

const keys = document.getElementById("keys");
document.getElementById("keys-button").addEventListener("click", () => keys.showModal());
let isGoing = false;
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("input, select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (event.key.startsWith("Arrow")) {
    if (step(event)) event.preventDefault();
    return;
  }
  if (isGoing) {
    isGoing = false;
    document.querySelector(`header nav a[data-key="${CSS.escape(event.key)}"]`)?.click();
    return;
  }
  if (event.key === "g") isGoing = true;
  else if (event.key === "p") pause();
  else if (event.key === "?") keys.showModal();
  else if (event.key === "/") {
    const filter = document.querySelector('input[type="search"]');
    if (filter) {
      event.preventDefault();
      filter.focus();
    }
  }
});

document.addEventListener("visibilitychange", () => {
  if (!document.hidden && isLate) refresh();
});
roam();
const stream = new EventSource(`/live?seen=${live.dataset.number}`);
stream.addEventListener("open", () => say("live"));
stream.addEventListener("error", () => say("not live: no connection"));
stream.addEventListener("reading", refresh);
