// A metric as a card: its last values, its curve while it is near the window, its explanation and table.
import type { Ctx } from "./api";
import { Chart, type Line, type Point } from "./charts";
import { duration, el, fill, newId, number, scrollBox, sentence } from "./dom";
import { drawnWith, ESSENTIAL, interval, metricsOf, points, type Meaning, type Metrics, type XName } from "./metrics";

const COLORS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6"];
const DASHES: (number[] | undefined)[] = [undefined, [6, 3], [2, 3], [10, 3, 2, 3]];
export const X_NAMES: Record<XName, string> = { step: "steps", tokens: "tokens generated so far", seconds: "time since the start" };
const MAX_NAMES = 40; // of one request
const MAX_ROWS = 1000; // of a table
/** Units that help a reader; others are in the explanation. */
const UNITS: Record<string, string> = Object.fromEntries(
  ["s", "ms", "tokens", "tokens/s", "nats", "turns", "groups", "requests", "versions", "bytes", "share"].map((unit) => [unit, unit === "share" ? "of 1" : unit]),
);

/** What is chosen in the view; it is in the address. */
export interface State {
  names: string[];
  group: string;
  q: string;
  x: XName;
  smooth: number;
  runs: number[];
}

export function swatch(run: number): HTMLElement {
  const node = el("i", { class: "line", "aria-hidden": "true", style: { "border-color": `var(${COLORS[run % COLORS.length]})` } });
  if (run % DASHES.length > 0) node.style.borderTopStyle = run % DASHES.length === 2 ? "dotted" : "dashed";
  return node;
}

/** One metric. Its values are fetched and its curve is drawn while it is near the window. */
export class Card {
  readonly element: HTMLElement;
  private chart: Chart | null = null;
  private data = new Map<number, Metrics>();
  private drawn: Line[] = [];
  private readonly place = el("div", { class: "chart-place" });
  private readonly values = el("div", { class: "values" });
  private readonly button: HTMLButtonElement;
  private readonly enlarge: HTMLAnchorElement;
  private readonly table: HTMLDetailsElement;
  private readonly height: number;
  private readonly unit: string;

  constructor(
    readonly name: string,
    meaning: Meaning | null,
    private readonly state: State,
    private readonly ctx: Ctx,
    private readonly loader: Loader,
    isLarge: boolean,
    pin: () => void,
  ) {
    const plain = ESSENTIAL[name];
    this.height = isLarge ? 380 : 150;
    this.place.style.height = `${this.height}px`;
    this.enlarge = el("a", null, isLarge ? "Back to the essentials" : "Enlarge");
    if (!isLarge) this.enlarge.setAttribute("aria-label", `Enlarge ${name}`);
    this.button = el("button", { type: "button", class: "quiet", "aria-label": `Pin ${name}`, on: { click: pin } });
    const rows = scrollBox(`Values of ${name}`);
    rows.classList.add("scroll");
    this.table = el("details", { class: "data" }, el("summary", { "aria-label": `Table of ${name}` }, "Table"), rows);
    this.table.addEventListener("toggle", () => this.fillTable());
    const title = newId();
    this.unit = UNITS[meaning?.unit ?? ""] ?? "";
    this.element = el(
      "article",
      { class: "card curve", "aria-labelledby": title },
      el("header", null, el("h3", { id: title }, plain ? plain.label : el("code", null, breakable(name))), el("span", { class: "tools" }, this.button, this.enlarge)),
      plain ? el("p", { class: "sub" }, el("code", null, breakable(name))) : null,
      this.values,
      this.place,
      el("p", { class: "explain" }, plain?.text ?? explanation(name, meaning)),
      this.table,
    );
    this.readdress();
  }

  enter(): void {
    if (this.chart !== null) return;
    this.chart = new Chart({
      label: `${this.name} over ${X_NAMES[this.state.x]}`,
      height: this.height,
      xName: this.state.x === "seconds" ? "after" : this.state.x,
      xText: (value) => xText(this.state.x, value),
      yText: number,
      onPoint: (point) => this.tell(point),
    });
    fill(this.place, this.chart.element);
    if (this.data.size > 0) this.redraw(false);
    this.refresh();
  }

  leave(): void {
    if (this.chart === null || this.element.contains(document.activeElement)) return;
    this.chart.destroy();
    this.chart = null;
    this.place.replaceChildren();
  }

  /** The chosen runs have changed. */
  forget(): void {
    this.data.clear();
    this.refresh();
  }

  /** Fetches the values again, if the curve is drawn. */
  refresh(): void {
    if (this.chart === null) return;
    void Promise.all(this.state.runs.map(async (run) => [run, await this.loader.load(run, this.name)] as const)).then(
      (found) => {
        this.data = new Map(found);
        this.redraw(false);
        this.fillTable();
      },
      () => {
        if (!this.ctx.signal.aborted && this.data.size === 0) fill(this.values, el("span", { class: "muted" }, "The values could not be loaded."));
      },
    );
  }

  /** Draws again; `isNew`: on another x axis. */
  redraw(isNew: boolean): void {
    if (this.chart === null || this.data.size === 0) return;
    if (isNew) {
      this.chart.destroy();
      this.chart = null;
      this.enter();
      return;
    }
    this.drawn = this.lines();
    this.chart.set(this.drawn);
    this.tell(null);
  }

  /** Follows what is chosen: the address of the enlarged curve, and whether this one is pinned. */
  readdress(): void {
    const { state } = this;
    const isPinned = state.names.includes(this.name);
    if (this.button.getAttribute("aria-pressed") !== String(isPinned)) {
      this.button.setAttribute("aria-pressed", String(isPinned));
      fill(this.button, isPinned ? "Pinned" : "Pin");
    }
    const names = this.height > 150 ? null : this.name;
    this.enlarge.href = this.ctx.link("curves", {
      names,
      x: state.x === "step" ? null : state.x,
      smooth: state.smooth || null,
      runs: state.runs.length !== 1 || state.runs[0] !== this.ctx.run ? state.runs.join(",") : null,
    });
  }

  private lines(): Line[] {
    return this.state.runs.map((run) => {
      const metrics = this.data.get(run);
      const found = metrics ? points(metrics, this.name, this.state.x) : { x: [], y: [] };
      return {
        label: this.ctx.runs.find((one) => one.run === run)?.name ?? String(run),
        color: COLORS[run % COLORS.length] ?? "--c1",
        dash: DASHES[run % DASHES.length],
        ...found,
        ...(metrics ? interval(metrics, this.name, this.state.x, found.x) : {}),
        points: metrics?.series[this.name]?.axis !== "step" && found.x.length < 60,
        smooth: this.state.smooth,
      };
    });
  }

  /** Writes the values at the cursor or, without one, the last ones. */
  private tell(point: Point | null): void {
    const lines = this.drawn;
    const values = point?.values ?? lines.map((line) => line.y.at(-1) ?? null);
    const isOne = lines.length === 1;
    fill(
      this.values,
      el("span", { class: "when" }, point === null ? "last" : `${this.state.x === "seconds" ? "after" : this.state.x} ${xText(this.state.x, point.x)}`),
      lines.map((_, i) => el("span", { class: "one" }, isOne ? null : swatch(this.state.runs[i] ?? 0), el("b", null, number(values[i])))),
      this.unit ? el("span", { class: "when" }, this.unit) : null,
    );
  }

  private fillTable(): void {
    const box = this.table.querySelector(".table-box");
    if (!this.table.open || box === null || this.data.size === 0) return;
    const lines = this.lines();
    const xs = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
    const maps = lines.map((line) => new Map(line.x.map((x, i) => [x, line.y[i] ?? null])));
    const last = xs.slice(-MAX_ROWS);
    fill(
      box,
      el(
        "table",
        null,
        xs.length > last.length ? el("caption", null, `The last ${number(last.length)} of ${number(xs.length)} values.`) : null,
        el("thead", null, el("tr", null, el("th", { scope: "col", class: "num" }, this.state.x === "seconds" ? "time" : this.state.x), lines.map((line) => el("th", { scope: "col", class: "num" }, lines.length === 1 ? "value" : line.label)))),
        el("tbody", null, last.map((x) => el("tr", null, el("td", { class: "num" }, xText(this.state.x, x)), maps.map((map) => el("td", { class: "num" }, number(map.get(x))))))),
      ),
    );
  }
}

/** Lets a name break after its slashes. */
function breakable(name: string): (string | Node)[] {
  return name.split(/(?<=[/_])/).flatMap((part, i) => (i === 0 ? [part] : [document.createElement("wbr"), part]));
}

/** The words of the table of metrics, after what the name says about the split and the reduction. */
function explanation(name: string, meaning: Meaning | null): string {
  if (meaning === null) return "A metric of this task; it has no description.";
  const split = name.startsWith("train/") ? "training" : name.startsWith("evaluation/") ? "evaluation" : "";
  const ending = /_(mean|max|min|std|low|high)$/.exec(name)?.[1] ?? (meaning.reduction === "sum" || meaning.reduction === "mean" ? meaning.reduction : "");
  const start = [split, ENDINGS[ending] ?? ""].filter(Boolean).join(", ");
  const text = sentence(meaning.meaning.replaceAll("`", "").replaceAll("\\|", "|"));
  return `${start ? `${sentence(start)}. ` : ""}${text}${text.endsWith(".") ? "" : "."}`;
}

const ENDINGS: Record<string, string> = {
  mean: "mean",
  max: "largest value",
  min: "smallest value",
  std: "standard deviation",
  low: "lower end",
  high: "upper end",
  sum: "sum",
};

function xText(x: XName, value: number): string {
  if (x === "seconds") return duration(value);
  if (x === "tokens" && value >= 10000) return value >= 1e6 ? `${number(value / 1e6)}M` : `${number(value / 1e3)}k`;
  return number(value);
}

/** Fetches metrics: what is asked for in the same moment goes into one request. */
export class Loader {
  private readonly waiting = new Map<number, Map<string, { done: (m: Metrics) => void; fail: (e: unknown) => void }[]>>();
  private readonly had = new Map<string, Metrics>();
  private timer = 0;

  constructor(private readonly ctx: Ctx) {}

  load(run: number, name: string): Promise<Metrics> {
    const had = this.had.get(`${run} ${name}`);
    if (had !== undefined) return Promise.resolve(had);
    return new Promise((done, fail) => {
      const names = this.waiting.get(run) ?? new Map<string, { done: (m: Metrics) => void; fail: (e: unknown) => void }[]>();
      this.waiting.set(run, names);
      names.set(name, [...(names.get(name) ?? []), { done, fail }]);
      if (this.timer === 0) this.timer = window.setTimeout(() => this.send(), 10);
    });
  }

  /** What has been fetched of a run is old. */
  forget(run: number): void {
    for (const key of this.had.keys()) if (key.startsWith(`${run} `)) this.had.delete(key);
  }

  private send(): void {
    this.timer = 0;
    for (const [run, names] of this.waiting) {
      const all = [...names];
      for (let first = 0; first < all.length; first += MAX_NAMES) {
        const part = all.slice(first, first + MAX_NAMES);
        metricsOf(this.ctx, run, part.flatMap(([name]) => [name, ...drawnWith(name)])).then(
          (metrics) => {
            for (const [name, waiters] of part) {
              this.had.set(`${run} ${name}`, metrics);
              for (const { done } of waiters) done(metrics);
            }
          },
          (error: unknown) => part.forEach(([, waiters]) => waiters.forEach(({ fail }) => fail(error))),
        );
      }
    }
    this.waiting.clear();
  }
}
