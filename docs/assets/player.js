/* The round player: the rules of wait-avoiding allreduces over drawn delays, as a drawing that runs.
 *
 * `playRounds` is the twin of asyncoll/algorithms/rounds/{rules,engine}.py for ranks whose communication is free:
 * screen_tests/test_player.py compares its calls with those of `asyncoll.testing.simulate`. Nothing here uses a network.
 */
"use strict";

const opensRound = {
  solo: () => true,
  majority: (round) => round.drawn.some((rank) => round.arrived.has(rank)),
  quorum: (round, quorum) => round.arrived.size >= quorum,
  all: (round, _, size) => round.arrived.size === size,
};

/** The calls and rounds of ranks whose k-th step takes `steps[rank][k]` seconds, for as long as every rank has steps.
 *
 * `drawn(number)` are the ranks drawn for a round of a majority. Gradients are named [rank, step].
 */
function playRounds({ rule, quorum, steps, drawn }) {
  const size = steps.length;
  const ranks = steps.map((own) => ({ step: 0, aim: 1, slot: [], until: own[0] }));
  const calls = [];
  const rounds = [];
  let next = { arrived: new Set(), drawn: drawn(1), waiting: [] };

  function answer(call, round, at) {
    const rank = ranks[call.rank];
    const included = round.gradients.some(([who, step]) => who === call.rank && step === call.step);
    Object.assign(call, { end: at, round: round.number, active: round.active, lag: round.number - rank.aim, included });
    calls.push(call);
    rank.aim = round.number + 1;
    rank.step += 1;
    rank.until = at + (steps[call.rank][rank.step] ?? Infinity);
  }

  function open(opener, at) {
    const gradients = ranks.flatMap((rank) => rank.slot.splice(0));
    const active = new Set(gradients.map(([rank]) => rank)).size;
    const round = { number: rounds.length + 1, at, opener, gradients, active };
    const { waiting } = next;
    rounds.push(round);
    next = { arrived: new Set(), drawn: drawn(round.number + 1), waiting: [] };
    waiting.forEach((call) => answer(call, round, at));
  }

  for (;;) {
    const first = ranks.reduce((least, rank, index) => (rank.until < ranks[least].until ? index : least), 0);
    const rank = ranks[first];
    if (ranks.some((each, index) => each.step >= steps[index].length)) return { calls, rounds };
    const at = rank.until;
    const call = { rank: first, step: rank.step, begin: at - steps[first][rank.step], arrive: at };
    rank.slot.push([first, rank.step]);
    const isLate = rounds.length >= rank.aim;
    const callsCount = rule === "majority" && 2 * next.arrived.size >= size && next.drawn.includes(first);
    if (isLate && !callsCount) {
      answer(call, rounds.at(-1), at);
      continue;
    }
    rank.until = Infinity;
    next.arrived.add(first);
    next.waiting.push(call);
    if (opensRound[rule](next, quorum, size)) open(first, at);
  }
}

/** Numbers in [0, 1) from a seed: mulberry32, which is in the public domain. */
function randomNumbers(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let x = Math.imul(state ^ (state >>> 15), state | 1);
    x ^= x + Math.imul(x ^ (x >>> 7), x | 61);
    return ((x ^ (x >>> 14)) >>> 0) / 4294967296;
  };
}

const SECONDS = 12;
const delays = {
  "one rank at a time, three times as long": (random, size, count) => {
    const slow = Array.from({ length: count }, () => Math.floor(random() * size));
    return (rank, step) => (slow[step] === rank ? 3 : 1) * (0.95 + 0.1 * random());
  },
  "rank 0 always, twice as long": (random) => (rank) => (rank === 0 ? 2 : 1) * (0.95 + 0.1 * random()),
  "every rank, by chance": (random) => () => 0.6 - 0.8 * Math.log(1 - random()),
};

function drawSteps(delay, size, seed) {
  const random = randomNumbers(seed);
  const count = 4 * SECONDS;
  const seconds = delays[delay](random, size, count);
  const steps = Array.from({ length: size }, () => []);
  for (let step = 0; step < count; step++) steps.forEach((own, rank) => own.push(seconds(rank, step)));
  return steps;
}

function drawnRanks(size, seed) {
  return (number) => [Math.floor(randomNumbers(seed * 65537 + number)() * size)];
}

// -- the drawing ---------------------------------------------------------------------------------------------------

function element(name, attributes = {}, ...children) {
  const isDrawn = ["svg", "g", "rect", "line", "path", "text", "title"].includes(name);
  const made = isDrawn ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const ROW = 34;
const LEFT = 52;
const TOP = 18;

class Player {
  constructor(place) {
    this.place = place;
    this.time = 0;
    this.isPlaying = false;
    this.chart = element("div", { class: "player-chart" });
    this.facts = element("p", { class: "player-facts", "aria-live": "off" });
    this.place.replaceChildren(this.makeControls(), this.chart, this.facts);
    this.restart();
    new ResizeObserver(() => this.draw()).observe(this.chart);
  }

  makeControls() {
    const choice = (label, options) => {
      const select = element("select", {}, ...options.map((option) => element("option", {}, option)));
      return [select, element("label", {}, label, select)];
    };
    const number = (label, value, least, most) => {
      const input = element("input", { type: "number", value, min: least, max: most });
      return [input, element("label", {}, label, input)];
    };
    const button = (text, label, act) => {
      const made = element("button", { type: "button", "aria-label": label }, text);
      made.addEventListener("click", act);
      return made;
    };
    const labels = {};
    [this.rule, labels.rule] = choice("Rule", Object.keys(opensRound));
    this.rule.value = "quorum";
    [this.quorum, labels.quorum] = number("Quorum", 3, 1, 12);
    [this.ranks, labels.ranks] = number("Ranks", 4, 2, 12);
    [this.delay, labels.delay] = choice("Slow", Object.keys(delays));
    [this.seed, labels.seed] = number("Seed", 0, 0, 99999);
    this.slider = element("input", { type: "range", min: 0, max: SECONDS, step: 0.01, value: 0, "aria-label": "Time" });
    this.playButton = button("▶", "Play or pause", () => this.toggle());
    const nextButton = button("next round", "To the next round", () => this.toNextRound());
    for (const input of [this.rule, this.quorum, this.ranks, this.delay, this.seed]) {
      input.addEventListener("change", () => this.restart());
    }
    this.slider.addEventListener("input", () => this.seek(Number(this.slider.value)));
    const buttons = element("span", { class: "player-buttons" }, this.playButton, nextButton, this.slider);
    this.quorumLabel = labels.quorum;
    return element("form", { class: "player-controls" }, ...Object.values(labels), buttons);
  }

  restart() {
    const within = (input) => Math.min(Math.max(Math.trunc(Number(input.value)) || 0, input.min), input.max);
    const size = within(this.ranks);
    const quorum = Math.min(within(this.quorum), size);
    const seed = within(this.seed);
    this.quorumLabel.hidden = this.rule.value !== "quorum";
    const steps = drawSteps(this.delay.value, size, seed);
    const drawn = drawnRanks(size, seed);
    this.size = size;
    this.story = playRounds({ rule: this.rule.value, quorum, steps, drawn });
    this.together = playRounds({ rule: "all", quorum, steps, drawn });
    this.draw();
  }

  toggle() {
    this.isPlaying = !this.isPlaying;
    this.playButton.textContent = this.isPlaying ? "❚❚" : "▶";
    if (!this.isPlaying) return;
    if (this.time >= SECONDS) this.time = 0;
    let before = performance.now();
    const frame = (now) => {
      if (!this.isPlaying) return;
      this.seek(this.time + (now - before) / 1000);
      before = now;
      if (this.time >= SECONDS) this.toggle();
      else requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  }

  toNextRound() {
    const round = this.story.rounds.find(({ at }) => at > this.time + 1e-9);
    this.seek(round ? round.at : SECONDS);
  }

  seek(time) {
    this.time = Math.min(time, SECONDS);
    this.slider.value = this.time;
    this.show();
  }

  x(time) {
    return LEFT + (time / SECONDS) * (this.width - LEFT - 8);
  }

  y(rank) {
    return TOP + rank * ROW;
  }

  draw() {
    this.width = Math.max(this.chart.clientWidth, 240);
    const height = TOP + this.size * ROW + 6;
    const title = "Ranks over time: steps of computation, waits, and rounds";
    const svg = element("svg", { viewBox: `0 0 ${this.width} ${height}`, role: "img", "aria-label": title });
    for (let rank = 0; rank < this.size; rank++) {
      svg.append(element("text", { x: 0, y: this.y(rank) + 20 }, `rank ${rank}`));
    }
    this.shapes = [];
    for (const call of this.story.calls) this.drawCall(svg, call);
    for (const round of this.story.rounds) this.drawRound(svg, round, height);
    this.chart.replaceChildren(svg);
    this.svg = svg;
    this.show();
  }

  drawCall(svg, call) {
    const round = this.story.rounds.find(({ gradients }) =>
      gradients.some(([rank, step]) => rank === call.rank && step === call.step),
    );
    const name = `gradient ${call.step + 1} of rank ${call.rank}`;
    const fate = round ? `${name}: in round ${round.number}, with ${round.active} of ${this.size} ranks` : `${name}: staged`;
    const hue = call.included ? "fresh" : "late";
    const [x, end, y] = [this.x(call.begin), this.x(call.arrive), this.y(call.rank) + 4];
    const bar = element(
      "rect",
      { class: `step ${hue}`, x, y, width: Math.max(end - x - 1, 1), height: ROW - 10, rx: 3, tabindex: 0 },
      element("title", {}, fate),
    );
    const path = round && element("path", { class: "follow", d: `M${end},${y + 12} L${this.x(round.at)},${TOP - 4}` });
    if (path) bar.addEventListener("pointerenter", () => this.follow(path, round, fate));
    if (path) bar.addEventListener("focus", () => this.follow(path, round, fate));
    bar.addEventListener("pointerleave", () => this.follow());
    bar.addEventListener("blur", () => this.follow());
    this.add(svg, bar, call.begin);
    if (path) svg.append(path);
    const wait = element("rect", { class: "wait", x: end, y: y + 10, width: this.x(call.end) - end, height: 4 });
    this.add(svg, wait, call.arrive);
  }

  drawRound(svg, round, height) {
    const x = this.x(round.at);
    const line = element("line", { class: "round", x1: x, x2: x, y1: TOP - 4, y2: height, "data-round": round.number });
    this.add(svg, line, round.at);
    this.add(svg, element("text", { class: "number", x, y: TOP - 7 }, `${round.number}`), round.at);
  }

  add(svg, shape, from) {
    svg.append(shape);
    this.shapes.push([shape, from]);
  }

  follow(path, round, fate) {
    for (const old of this.svg.querySelectorAll(".followed")) old.classList.remove("followed");
    if (path) {
      path.classList.add("followed");
      this.svg.querySelector(`[data-round="${round.number}"]`).classList.add("followed");
    }
    this.facts.textContent = fate ?? this.summary();
  }

  show() {
    for (const [shape, from] of this.shapes) shape.classList.toggle("future", from > this.time);
    this.facts.textContent = this.summary();
  }

  summary() {
    const over = (story) => story.rounds.filter(({ at }) => at <= this.time);
    const rounds = over(this.story);
    const calls = this.story.calls.filter(({ end }) => end <= this.time);
    const taken = rounds.flatMap(({ gradients }) => gradients.map(String));
    const given = this.story.calls.filter(({ arrive }) => arrive <= this.time).length;
    if (!rounds.length) return `${this.time.toFixed(1)} s: no round yet. Press ▶.`;
    const active = rounds.reduce((sum, round) => sum + round.active, 0) / rounds.length;
    const late = calls.filter(({ included }) => !included).length / Math.max(calls.length, 1);
    const isExact = new Set(taken).size === taken.length;
    return (
      `${this.time.toFixed(1)} s: ${rounds.length} rounds (waiting for all ranks: ${over(this.together).length}), ` +
      `with ${active.toFixed(1)} of ${this.size} ranks in the mean. ${Math.round(100 * late)} % of the calls came late. ` +
      `${given} gradients: ${taken.length} in ${isExact ? "exactly one round each" : "two rounds: a defect"}, ` +
      `${Math.max(given - taken.length, 0)} staged for the next.`
    );
  }
}

if (typeof document !== "undefined") {
  const start = () => document.querySelectorAll(".player").forEach((place) => new Player(place));
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
}
