// Asks for `data` every two seconds and shows it. Nothing is kept but what is on the page.

import { chart, clock } from "./charts.js";

const PERIOD_MS = 2000;
const RECENT_S = 300;
const TIERS = { dram: "Memory", nvme: "NVMe" };
const STATES = ["resident", "leased", "reserved", "quarantined"];

const $ = (id) => document.getElementById(id);
let paused = false;
const open = new Set();

// --- Formats -------------------------------------------------------------------------------

const count = new Intl.NumberFormat("en");

function percent(share) {
  if (share == null) return "–";
  return share === 0 ? "0" : `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
}

function seconds(value) {
  if (value == null) return "–";
  if (value === 0) return "0";
  if (value < 1) return `${(1000 * value).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 100) return `${value.toFixed(value < 10 ? 2 : 0)} s`;
  if (value < 6000) return `${(value / 60).toFixed(0)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (Math.abs(value) >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value.toFixed(unit && Math.abs(value) < 100 ? 1 : 0)} ${units[unit]}`;
}

const short = (id) => id.slice(0, 8);

// --- Elements ------------------------------------------------------------------------------

// Text goes in as text only; nothing from the server becomes markup.
function element(name, options = {}, ...children) {
  const { style, ...attributes } = options;
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  Object.assign(made.style, style);
  made.append(...children);
  return made;
}

function bar(parts, whole, label) {
  const made = element("div", { class: "bar", role: "img", "aria-label": label });
  for (const [name, value] of parts) {
    if (value > 0) {
      const width = `${(100 * value) / Math.max(whole, 1e-9)}%`;
      made.append(element("span", { class: name, style: { width } }));
    }
  }
  return made;
}

function key(name, text) {
  return element("span", { class: "key" }, element("i", { class: name }), text);
}

// --- Sections ------------------------------------------------------------------------------

function showFigures(data) {
  const since = data.at - RECENT_S;
  const recent = data.history.filter((bucket) => bucket.at >= since);
  const sum = (field) => recent.reduce((total, bucket) => total + bucket[field], 0);
  const prompt = sum("prompt_tokens");
  const medians = recent.map((bucket) => bucket.ttft_p50_s).filter((value) => value != null);
  medians.sort((a, b) => a - b);
  const engines = data.replicas.map((replica) => replica.engine).filter(Boolean);
  const total = (field) => engines.reduce((all, engine) => all + engine[field], 0);
  const rows = [
    ["tokens not computed", percent(prompt ? sum("cached_tokens") / prompt : null)],
    ["first token, median", seconds(medians[Math.floor(medians.length / 2)])],
    ["prompt tokens", count.format(prompt)],
    ["running now", count.format(total("running"))],
    ["waiting now", count.format(total("waiting"))],
    ["prefill saved, in all", seconds(data.saved_prefill_s)],
  ];
  $("figures").replaceChildren(
    ...rows.map(([name, value]) =>
      element("div", {}, element("dt", {}, name), element("dd", {}, value)),
    ),
  );
}

function showNodes(nodes) {
  if (nodes.length === 0) {
    const none = "No store runs: replicas compute every prompt, and share nothing.";
    $("nodes").replaceChildren(element("p", { class: "note" }, none));
    return;
  }
  $("nodes").replaceChildren(...nodes.map(showNode));
}

function showNode(node) {
  const title = `Node ${short(node.node)}, ${node.address}`;
  const made = element("div", {}, element("h3", { title: node.node }, title));
  if (!node.tiers) {
    made.append(element("p", { class: "note" }, "Its store does not answer; requests compute."));
    return made;
  }
  for (const tier of node.tiers) {
    const used = STATES.filter((state) => state in tier.states).map((state) => [
      state,
      tier.states[state],
    ]);
    const physical = used.reduce((total, [, value]) => total + value, 0);
    const name = TIERS[tier.tier] ?? tier.tier;
    const label = `${name}: ${bytes(physical)} of ${bytes(tier.capacity)} in use`;
    made.append(element("p", { class: "tier" }, label), bar(used, tier.capacity, label));
    const saved = { encoding: tier.saved.codec ?? 0, sharing: tier.saved.sharing ?? 0 };
    const told = Object.entries(saved)
      .filter(([, value]) => value > 0)
      .map(([by, value]) => `${bytes(value)} by ${by}`);
    made.append(
      ...used.map(([state, value]) => key(state, `${state} ${bytes(value)}`)),
      key("free", `free ${bytes(tier.states.free ?? tier.capacity - physical)}`),
    );
    // The disk tier counts no savings of its own: it holds what memory has coded already.
    if (told.length) made.append(element("p", { class: "note" }, `Saved: ${told.join(", ")}.`));
  }
  const { sessions, evictions, uptime_s: uptime } = node;
  const text = `${count.format(sessions)} clients, ${count.format(evictions)} blocks evicted, up ${seconds(uptime)}.`;
  made.append(element("p", { class: "note" }, text));
  return made;
}

// The rows of a table's body, or one that says why there is none. Roles are told, because a
// narrow page shows rows as lists, and browsers then forget that they were a table's.
function showRows(id, rows, none) {
  const body = $(id);
  const heads = [...body.closest("table").querySelectorAll("thead th")];
  if (rows.length === 0) {
    rows = [element("tr", {}, element("td", { class: "empty", colspan: heads.length }, none))];
  }
  for (const row of rows) {
    row.setAttribute("role", "row");
    [...row.children].forEach((one, column) => {
      one.setAttribute("role", one.scope === "row" ? "rowheader" : "cell");
      if (one.colSpan === 1 && column) one.dataset.name = heads[column].textContent;
    });
  }
  body.replaceChildren(...rows);
}

function row(name, ...cells) {
  return element("tr", {}, element("th", { scope: "row" }, element("code", {}, name)), ...cells);
}

function number(value) {
  return element("td", { class: "number" }, count.format(value));
}

function showReplicas(replicas) {
  const rows = replicas.map(({ replica, node, engine }) => {
    const where = element("td", { title: node }, element("code", {}, short(node) || "–"));
    if (!engine) return row(replica, where, element("td", { colspan: 5 }, "does not answer"));
    const share = 1 - engine.pool_free_blocks / Math.max(engine.pool_blocks, 1);
    const label = `${percent(share)} of the pool in use`;
    return row(
      replica,
      where,
      number(engine.running),
      number(engine.waiting),
      number(engine.outstanding_prefill_tokens),
      element("td", {}, bar([["resident", share]], 1, label), percent(share)),
      number(engine.generated_tokens),
    );
  });
  showRows("replicas", rows, "No replica runs: requests wait, or are refused.");
}

function showHottest(hottest) {
  const rows = hottest.map((one) => row(one.key, number(one.requests), number(one.cached_tokens)));
  showRows("hottest", rows, "No prompt of a whole block or more has come yet.");
}

// Why a replica answered, by the reasons of mooncake_serve/api/gateway.py, and whose figures follow.
const WHY = {
  least_time: (name) => [`Replica ${name} had the least expected time to the first token`, "It"],
  pinned: (name) => [`The request asked for replica ${name}`, "It"],
  beside: (name) => [`Replica ${name} has another choice of the same prompt`, "It"],
  replica_died: (name) => [
    `The planned replica died. Of the others ${name} had the least expected time to the first token`,
    "It",
  ],
  elsewhere: (name) => [
    `Replica ${name} answered because the planned one was gone or full`,
    "The planned one",
  ],
};

function explanation(route) {
  const parts = [
    ["queue", route.queue_s],
    ["load", route.load_s],
    ["prefill", route.prefill_s],
  ];
  const expected = route.queue_s + route.load_s + route.prefill_s;
  const whole = Math.max(expected, route.ttft_s ?? 0);
  const label = `expected ${seconds(expected)} to the first token`;
  const [why, whose] = (WHY[route.reason] ?? ((name) => [`Replica ${name}`, "It"]))(route.replica);
  const held = `${count.format(route.matched_tokens)} of ${count.format(route.prompt_tokens)}`;
  const told =
    route.ttft_s == null
      ? "It has not ended, or failed."
      : `It took ${seconds(route.ttft_s)}, with ${count.format(route.cached_tokens)} tokens cached.`;
  return element(
    "div",
    { class: "detail" },
    bar(parts, whole, label),
    ...parts.map(([name, value]) => key(name, `${name} ${seconds(value)}`)),
    element(
      "p",
      {},
      `${why}. ${whose} was expected to take ${seconds(expected)}, ` +
        `with ${held} tokens in its caches. ${told}`,
    ),
  );
}

function showRoutes(routes) {
  const list = $("routes");
  if (routes.length === 0) {
    list.replaceChildren(element("li", { class: "note" }, "No request has come yet."));
    return;
  }
  const focused = document.activeElement?.dataset?.route;
  list.replaceChildren(
    ...routes.map((route, index) => {
      const name = route.request_id || `${route.at}-${index}`;
      const shown = open.has(name);
      const button = element(
        "button",
        { type: "button", "aria-expanded": shown, "data-route": name },
        element("span", {}, clock(route.at)),
        element("code", {}, short(route.request_id || "–")),
        element("span", {}, `to ${short(route.replica)}`),
        element("span", {}, `${count.format(route.prompt_tokens)} tokens`),
        element(
          "span",
          {},
          route.ttft_s == null ? "no token yet" : `first token in ${seconds(route.ttft_s)}`,
        ),
      );
      button.addEventListener("click", () => {
        if (!open.delete(name)) open.add(name);
        showRoutes(routes);
      });
      return element("li", {}, button, ...(shown ? [explanation(route)] : []));
    }),
  );
  if (focused) list.querySelector(`[data-route="${CSS.escape(focused)}"]`)?.focus();
}

// --- The page ------------------------------------------------------------------------------

const hits = chart($("hits"), [{ label: "share", colour: "--prefill", format: percent }], [0, 1]);
const ttft = chart(
  $("ttft"),
  [
    { label: "median", colour: "--prefill", format: seconds },
    { label: "p95", colour: "--queue", format: seconds },
  ],
  (_, _low, high) => [0, high ? 1.1 * high : 1],
);

function showCharts(history) {
  const times = history.map((bucket) => bucket.at);
  const share = history.map((bucket) =>
    bucket.prompt_tokens ? bucket.cached_tokens / bucket.prompt_tokens : null,
  );
  const median = history.map((bucket) => bucket.ttft_p50_s);
  const high = history.map((bucket) => bucket.ttft_p95_s);
  hits.draw([times, share], `Share of prompt tokens not computed, now ${percent(share.at(-1))}`);
  ttft.draw([times, median, high], `Time to first token, now ${seconds(median.at(-1))}`);
}

function show(data) {
  $("model").textContent = data.model ?? "";
  showFigures(data);
  showCharts(data.history);
  showNodes(data.nodes);
  showReplicas(data.replicas);
  showHottest(data.hottest);
  showRoutes(data.decisions);
}

function status(text, bad = false) {
  $("status").textContent = text;
  $("status").classList.toggle("bad", bad);
  $("main").classList.toggle("stale", bad);
}

async function refresh() {
  if (!paused && !document.hidden) {
    try {
      const answer = await fetch("data", { signal: AbortSignal.timeout(10_000) });
      if (!answer.ok) throw new Error(`${answer.status}`);
      const data = await answer.json();
      if (!paused) {
        show(data);
        status(`live, ${clock(data.at)}`);
      }
    } catch (error) {
      status(`no answer from the server (${error.message}); trying again`, true);
    }
  }
  setTimeout(refresh, PERIOD_MS);
}

function applyTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const chosen = $("theme").value;
  document.documentElement.dataset.theme = chosen === "auto" ? (dark ? "dark" : "light") : chosen;
  hits.redraw();
  ttft.redraw();
}

$("theme").value = localStorage.getItem("theme") ?? "auto";
$("theme").addEventListener("change", () => {
  localStorage.setItem("theme", $("theme").value);
  applyTheme();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", applyTheme);
$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", paused);
  if (paused) status("paused");
});

applyTheme();
refresh();
