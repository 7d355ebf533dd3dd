// The timeline in words: how each process spent the window, its longest waits and its longest spans.
import { duration, el, number, percent } from "./dom";
import { clock } from "./timeline_canvas";
import { longest, type Span, stepAt, type Timeline, type Use, usesOf } from "./timeline_model";

const LISTED = 20;

type Show = (from: number, to: number) => void;

/** How each process that computes spent the time of the answer. */
export function usesList(data: Timeline): HTMLElement {
  const { from, to } = data;
  const uses = usesOf(data).filter(({ waits, process }) => waits.length > 0 || process !== "controller");
  return el(
    "div",
    null,
    el(
      "dl",
      null,
      uses.map(({ process, working, waits }) => [
        el("dt", null, process),
        el(
          "dd",
          null,
          el(
            "div",
            { class: "use-bar", "aria-hidden": "true" },
            el("span", { class: "working", style: { "flex-grow": String(working) } }),
            waits.map(({ share }) => el("span", { class: "waiting", style: { "flex-grow": String(share) } })),
          ),
          el("p", null, el("b", null, `works ${percent(working)}`), reasons(waits, working)),
        ),
      ]),
    ),
    el(
      "p",
      { class: "muted small" },
      `Between ${clock(from, to - from)} and ${clock(to, to - from)} after the start of the run.`,
    ),
  );
}

/** `, waits 44 %: for rollouts 40 % (6.5 s), an evaluation runs 3 % (1 s)` */
function reasons(waits: Use["waits"], working: number): (string | HTMLElement)[] {
  const said = waits.filter(({ share }) => share >= 0.005).slice(0, 3);
  return said.flatMap(({ why, share, seconds }, n) => [
    n === 0 ? `, waits ${percent(1 - working)}: ` : ", ",
    `${why.replace(/^waits /, "")} `,
    el("span", { class: "nowrap" }, `${percent(share)} (${duration(seconds)})`),
  ]);
}

/** The longest waits of a window, as an alternative to the picture. */
export function waitsTable(data: Timeline, from: number, to: number, show: Show): HTMLElement {
  const waits = data.idle
    .filter((one) => one.to > from && one.from < to)
    .sort((a, b) => b.to - b.from - (a.to - a.from))
    .slice(0, LISTED)
    .map((one) => ({ process: one.process, words: one.why, from: one.from, to: one.to }));
  return table("Longest waits in this window", "What for", data, waits, to - from, show);
}

/** The longest spans of a window. */
export function spansTable(data: Timeline, from: number, to: number, show: Show): HTMLElement {
  const spans = longest(data, from, to, LISTED).map(({ process, span }) => ({
    process: process.name,
    words: nameOf(data, span),
    from: span[0],
    to: span[0] + span[1],
  }));
  return table("Longest spans in this window", "Does", data, spans, to - from, show);
}

export function nameOf(data: Timeline, [, , name, merged]: Span): string {
  const words = data.names[name] ?? "";
  return merged > 1 ? `${number(merged)} spans, mostly ${words}` : words;
}

interface Item {
  process: string;
  words: string;
  from: number;
  to: number;
}

function table(title: string, does: string, data: Timeline, items: Item[], window: number, show: Show): HTMLElement {
  const rows = items.map(({ process, words, from, to }) => {
    const step = stepAt(data, (from + to) / 2);
    const label = `Show ${words} of ${process} at ${clock(from, to - from)} on the timeline`;
    const button = el(
      "button",
      { type: "button", class: "quiet", "aria-label": label, on: { click: () => show(from, to) } },
      clock(from, window),
    );
    return el(
      "tr",
      null,
      el("td", null, process),
      el("td", null, words),
      el("td", { class: "num" }, duration((to - from) / 1000)),
      el("td", { class: "num" }, step === undefined ? "–" : number(step.step)),
      el("td", null, button),
    );
  });
  const heads = ["Process", does, "Takes", "Step", "Begins"].map((head) =>
    el("th", { scope: "col", class: head === "Takes" || head === "Step" ? "num" : null }, head),
  );
  return el(
    "section",
    { class: "card" },
    el("h2", null, title),
    rows.length === 0
      ? el("p", { class: "muted" }, "None.")
      : el(
          "div",
          { class: "table-box" },
          el("table", null, el("thead", null, el("tr", null, heads)), el("tbody", null, rows)),
        ),
  );
}
