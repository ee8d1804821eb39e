/* The round player: the rules of wait-avoiding allreduces over drawn delays, as a drawing that runs.
 *
 * `playRounds` is the twin of asyncoll/algorithms/rounds/{rules,engine}.py for ranks whose communication is free:
 * screen_tests/test_player.py compares its calls with those of `asyncoll.testing.simulate`. Nothing here uses a network.
 *
 * It also replays a record: the file that `simulate(..., record=file)` writes.
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

// -- records -------------------------------------------------------------------------------------------------------

/** The record in `text`: the number of ranks, the messages by departure, and the virtual seconds until the last arrival. */
function parseRecord(text) {
  const lines = text.split("\n").filter((line) => line);
  const parsed = lines.map((line, index) => {
    try {
      return JSON.parse(line);
    } catch (error) {
      throw new Error(`line ${index + 1}: ${error.message}`);
    }
  });
  const [head, ...messages] = parsed;
  if (head?.asyncoll !== "simulate") throw new Error("its first line is not one of asyncoll.testing.simulate");
  if (head.format !== 1) throw new Error(`it has format ${head.format}, and this page reads format 1`);
  const end = messages.reduce((last, { departs_s, arrives_s }) => Math.max(last, arrives_s ?? departs_s), 0);
  return { ranks: head.ranks, messages, end };
}

/** What has happened until `time`: messages by kind, calls and rounds that have sent any. */
function countRecord({ messages }, time) {
  const departed = messages.filter(({ departs_s }) => departs_s <= time);
  const kinds = {};
  for (const { kind } of departed) kinds[kind] = (kinds[kind] ?? 0) + 1;
  const ofRounds = departed.filter(({ round }) => round > 0);
  return {
    departed: departed.length,
    arrived: departed.filter(({ arrives_s }) => arrives_s !== null && arrives_s <= time).length,
    bytes: departed.reduce((sum, { bytes }) => sum + bytes, 0),
    kinds,
    calls: new Set(departed.filter(({ call, round }) => call && !round).map(({ call }) => call)).size,
    rounds: new Set(ofRounds.map(({ call, round }) => `${round} ${call}`)).size,
  };
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
const DRAWN_MAX = 4000; // messages; the counts are of all

class Player {
  constructor(place) {
    this.place = place;
    this.time = 0;
    this.isPlaying = false;
    this.record = null;
    this.chart = element("div", { class: "player-chart" });
    this.facts = element("p", { class: "player-facts", "aria-live": "off" });
    this.place.replaceChildren(this.makeControls(), this.chart, this.facts);
    this.restart();
    this.place.addEventListener("dragover", (event) => event.preventDefault());
    this.place.addEventListener("drop", (event) => {
      event.preventDefault();
      this.open(event.dataTransfer.files[0]);
    });
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
    this.slider = element("input", { type: "range", min: 0, max: 1, step: "any", value: 0, "aria-label": "Time" });
    this.playButton = button("▶", "Play or pause", () => this.toggle());
    this.file = element("input", { type: "file", accept: ".jsonl" });
    this.file.addEventListener("change", () => {
      this.open(this.file.files[0]);
      this.file.value = ""; // so that the next record of the same name is read, too
    });
    labels.file = element("label", {}, "Record", this.file);
    const nextButton = button("next round", "To the next round", () => this.toNextRound());
    for (const input of [this.rule, this.quorum, this.ranks, this.delay, this.seed]) {
      input.addEventListener("change", () => this.restart());
    }
    this.slider.addEventListener("input", () => this.seek(this.slider.value * this.end));
    const buttons = element("span", { class: "player-buttons" }, this.playButton, nextButton, this.slider);
    this.quorumLabel = labels.quorum;
    return element("form", { class: "player-controls" }, ...Object.values(labels), buttons);
  }

  restart() {
    const within = (input) => Math.min(Math.max(Math.trunc(Number(input.value)) || 0, input.min), input.max);
    const size = within(this.ranks);
    const quorum = Math.min(within(this.quorum), size);
    const seed = within(this.seed);
    this.record = null;
    this.quorumLabel.hidden = this.rule.value !== "quorum";
    const steps = drawSteps(this.delay.value, size, seed);
    const drawn = drawnRanks(size, seed);
    this.size = size;
    this.story = playRounds({ rule: this.rule.value, quorum, steps, drawn });
    this.together = playRounds({ rule: "all", quorum, steps, drawn });
    this.setEnd(SECONDS);
    this.draw();
  }

  /** Replay `file`, which never leaves this page. */
  async open(file) {
    if (!file) return;
    try {
      this.record = { name: file.name, ...parseRecord(await file.text()) };
    } catch (error) {
      this.facts.textContent = `${file.name} is no record: ${error.message}.`;
      return;
    }
    this.size = this.record.ranks;
    this.time = 0;
    this.setEnd(this.record.end);
    this.draw();
  }

  setEnd(end) {
    this.end = end;
    this.seek(this.time);
  }

  toggle() {
    this.isPlaying = !this.isPlaying;
    this.playButton.textContent = this.isPlaying ? "❚❚" : "▶";
    if (!this.isPlaying) return;
    if (this.time >= this.end) this.time = 0;
    let before = performance.now();
    const frame = (now) => {
      if (!this.isPlaying) return;
      this.seek(this.time + ((now - before) / 1000) * (this.end / SECONDS));
      before = now;
      if (this.time >= this.end) this.toggle();
      else requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  }

  toNextRound() {
    const isNew = (time) => time > this.time + 1e-9;
    const times = this.record ? this.beginnings() : this.story.rounds.map(({ at }) => at);
    this.seek(times.find(isNew) ?? this.end);
  }

  /** When the first message of each round of the record departs. */
  beginnings() {
    const first = new Map();
    for (const { call, round, departs_s } of this.record.messages) {
      const key = `${round} ${call}`;
      if (round && !first.has(key)) first.set(key, departs_s);
    }
    return [...first.values()];
  }

  seek(time) {
    this.time = Math.min(time, this.end);
    this.slider.value = this.time / (this.end || 1);
    this.show();
  }

  x(time) {
    return LEFT + (time / (this.end || 1)) * (this.width - LEFT - 8);
  }

  y(rank) {
    return TOP + rank * ROW;
  }

  draw() {
    this.width = Math.max(this.chart.clientWidth, 240);
    const height = TOP + this.size * ROW + 6;
    const what = this.record ? "messages" : "steps of computation, waits, and rounds";
    const title = `Ranks over time: ${what}`;
    const svg = element("svg", { viewBox: `0 0 ${this.width} ${height}`, role: "img", "aria-label": title });
    for (let rank = 0; rank < this.size; rank++) {
      svg.append(element("text", { x: 0, y: this.y(rank) + 20 }, `rank ${rank}`));
    }
    this.shapes = [];
    if (this.record) {
      for (const message of this.record.messages.slice(0, DRAWN_MAX)) this.drawMessage(svg, message);
    } else {
      for (const call of this.story.calls) this.drawCall(svg, call);
      for (const round of this.story.rounds) this.drawRound(svg, round, height);
    }
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

  drawMessage(svg, message) {
    const { kind, call, round, from, to, bytes, departs_s, arrives_s } = message;
    const hue = round ? "of-round" : call ? "of-call" : "of-none";
    const [begin, end] = [this.x(departs_s), this.x(arrives_s ?? this.end)];
    const fate = arrives_s === null ? "never arrives" : `arrives at ${arrives_s.toPrecision(6)} s`;
    const of = [call, round ? `round ${round}` : ""].filter((part) => part).join(", ");
    const text = `${kind}, rank ${from} to ${to}, ${bytes} bytes, at ${departs_s.toPrecision(6)} s, ${fate}. ${of}`;
    const [y, below] = [this.y(from) + 16, this.y(to) + 16];
    const shape = { class: `message ${hue}`, x1: begin, x2: end, y1: y, y2: below };
    const line = element("line", shape, element("title", {}, text));
    line.addEventListener("pointerenter", () => (this.facts.textContent = text));
    line.addEventListener("pointerleave", () => (this.facts.textContent = this.summary()));
    this.add(svg, line, departs_s);
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
    if (!this.shapes) return;
    for (const [shape, from] of this.shapes) shape.classList.toggle("future", from > this.time);
    this.facts.textContent = this.summary();
  }

  summary() {
    if (this.record) return this.recordSummary();
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

  recordSummary() {
    const { departed, arrived, bytes, kinds, calls, rounds } = countRecord(this.record, this.time);
    const all = this.record.messages.length;
    const byKind = Object.keys(kinds)
      .sort()
      .map((kind) => `${kinds[kind]} ${kind}`)
      .join(", ");
    const cut = all > DRAWN_MAX ? ` The first ${DRAWN_MAX} are drawn.` : "";
    return (
      `${this.record.name}, ${this.time.toPrecision(4)} s of ${this.end.toPrecision(4)} s: ${departed} of ${all} messages have departed` +
      `${byKind && ` (${byKind})`}, ${arrived} have arrived; ${bytes} bytes, ${calls} calls, ${rounds} rounds.${cut}`
    );
  }
}

if (typeof document !== "undefined") {
  const start = () => document.querySelectorAll(".player").forEach((place) => new Player(place));
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
}
