// Every metric as a curve: groups, a filter, several runs, and a table in place of each curve.
import type { Changed, Ctx, View } from "./api";
import { Chart, type Line, type Point } from "./charts";
import { count, debounce, duration, el, empty, fill, newId, number, scrollBox } from "./dom";
import { ESSENTIAL, lookup, meanings, metricsOf, points, type Meaning, type Metrics, type XName } from "./metrics";

const COLORS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6"];
const DASHES: (number[] | undefined)[] = [undefined, [6, 3], [2, 3], [10, 3, 2, 3]];
const X_NAMES: Record<XName, string> = { step: "steps", tokens: "tokens generated so far", seconds: "time since the start" };
const MAX_NAMES = 40; // of one request
const MAX_ROWS = 1000; // of a table
/** Units that help a reader; others are in the explanation. */
const UNITS: Record<string, string> = Object.fromEntries(
  ["s", "ms", "tokens", "tokens/s", "nats", "turns", "groups", "requests", "versions", "bytes", "share"].map((unit) => [unit, unit === "share" ? "of 1" : unit]),
);
const ESSENTIALS = "essentials";
const ALL = "all";
const PINNED = "pinned";

interface State {
  names: string[];
  group: string;
  q: string;
  x: XName;
  smooth: number;
  runs: number[];
}

export default function view(): View {
  let page: Page | null = null;
  return {
    async render(root, ctx) {
      const rows = await meanings(ctx);
      page = new Page(root, ctx, rows);
      await page.start();
    },
    onChange(changed: Changed) {
      if (changed.metrics) page?.change(changed.run);
    },
    dispose() {
      page?.dispose();
    },
  };
}

function readState(ctx: Ctx): State {
  const { query } = ctx;
  const names = (query.get("names") ?? "").split(",").filter(Boolean);
  const x = query.get("x") ?? "step";
  const smooth = Number(query.get("smooth") ?? "0");
  const chosen = (query.get("runs") ?? "").split(",").filter(Boolean).map(Number);
  const runs = ctx.runs.map((one) => one.run).filter((run) => chosen.includes(run));
  return {
    names,
    group: query.get("group") ?? (names.length > 0 ? PINNED : ESSENTIALS),
    q: query.get("q") ?? "",
    x: Object.hasOwn(X_NAMES, x) ? (x as XName) : "step",
    smooth: Number.isFinite(smooth) ? Math.min(0.99, Math.max(0, smooth)) : 0,
    runs: runs.length > 0 ? runs : [ctx.run],
  };
}

/** The view while it is open. */
class Page {
  private readonly state: State;
  private readonly find: (name: string) => Meaning | null;
  private readonly sections: string[];
  private readonly loader: Loader;
  private names: string[] = []; // of all metrics of the chosen runs
  private cards: Card[] = []; // those on the page
  private readonly made = new Map<string, Card>();
  private readonly groups = el("div", { class: "chips", role: "group", "aria-label": "Groups of metrics" });
  private readonly found = el("p", { class: "muted small", role: "status" });
  private readonly body = el("div", { class: "stack" });
  private readonly watch: IntersectionObserver;

  constructor(
    private readonly root: HTMLElement,
    private readonly ctx: Ctx,
    private readonly rows: Meaning[],
  ) {
    this.state = readState(ctx);
    this.find = lookup(rows);
    this.sections = [...new Set(rows.map((row) => row.section))];
    this.loader = new Loader(ctx);
    // Only curves near the window are drawn; the others cost nothing.
    this.watch = new IntersectionObserver(
      (entries) => {
        for (const entry of entries) {
          const card = this.cards.find((one) => one.element === entry.target);
          if (entry.isIntersecting) card?.enter();
          else card?.leave();
        }
      },
      { rootMargin: "500px" },
    );
  }

  async start(): Promise<void> {
    this.root.append(this.toolbar(), this.groups, this.found, this.body);
    await this.list();
    this.draw();
  }

  dispose(): void {
    this.watch.disconnect();
    for (const card of this.cards) card.leave();
  }

  change(run: number): void {
    if (!this.state.runs.includes(run)) return;
    this.loader.forget(run);
    if (this.names.length === 0) void this.list().then(() => this.draw());
    for (const card of this.cards) card.refresh();
  }

  /** Asks which metrics the chosen runs have. */
  private async list(): Promise<void> {
    const lists = await Promise.all(
      this.state.runs.map((run) => this.ctx.get<{ names: string[] }>(`/api/runs/${run}/metrics`)),
    );
    const place = (name: string): number => {
      const found = this.find(name);
      return found === null ? this.rows.length : this.rows.indexOf(found);
    };
    const names = [...new Set(lists.flatMap((one) => one.names))];
    this.names = names.map((name) => [place(name), name] as const).sort((a, b) => a[0] - b[0] || a[1].localeCompare(b[1])).map(([, name]) => name);
  }

  private toolbar(): HTMLElement {
    const { state, ctx } = this;
    const filter = el("input", { type: "search", value: state.q, placeholder: "name or meaning", autocomplete: "off", size: 26 });
    filter.addEventListener("input", debounce(() => {
      state.q = filter.value.trim();
      this.save();
      this.draw();
    }, 60));
    const x = el("select", null, Object.entries(X_NAMES).map(([name, label]) => el("option", { value: name, selected: name === state.x }, label)));
    x.addEventListener("change", () => {
      state.x = x.value as XName;
      this.save();
      for (const card of this.cards) card.redraw(true);
    });
    const amount = el("output", { class: "mono" }, state.smooth.toFixed(2));
    const smooth = el("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: state.smooth });
    smooth.addEventListener("input", () => {
      state.smooth = Number(smooth.value);
      fill(amount, state.smooth.toFixed(2));
      this.save();
      for (const card of this.cards) card.redraw(false);
    });
    const runs =
      ctx.runs.length < 2
        ? null
        : el(
            "fieldset",
            { class: "runs" },
            el("legend", null, "Runs"),
            ctx.runs.map((run) => {
              const box = el("input", { type: "checkbox", checked: state.runs.includes(run.run), value: run.run });
              box.addEventListener("change", () => {
                const chosen = ctx.runs.map((one) => one.run).filter((one) => (one === run.run ? box.checked : state.runs.includes(one)));
                if (chosen.length === 0) {
                  box.checked = true;
                  return;
                }
                state.runs = chosen;
                this.save();
                void this.list().then(() => this.draw());
                for (const card of this.made.values()) card.forget();
              });
              return el("label", { class: "run" }, box, swatch(run.run), run.name);
            }),
          );
    return el(
      "div",
      { class: "toolbar curves-tools" },
      el("label", null, "Filter", filter),
      el("label", null, "Over", x),
      el("label", null, el("span", null, "Smoothing ", amount), smooth),
      runs,
    );
  }

  private save(): void {
    const { state, ctx } = this;
    const query = new URLSearchParams();
    if (state.names.length > 0) query.set("names", state.names.join(","));
    if (state.group !== (state.names.length > 0 ? PINNED : ESSENTIALS)) query.set("group", state.group);
    if (state.q) query.set("q", state.q);
    if (state.x !== "step") query.set("x", state.x);
    if (state.smooth > 0) query.set("smooth", String(state.smooth));
    if (state.runs.length !== 1 || state.runs[0] !== ctx.run) query.set("runs", state.runs.join(","));
    ctx.replaceQuery(query);
    for (const card of this.cards) card.readdress();
  }

  private section(name: string): string {
    return this.find(name)?.section ?? "Other";
  }

  /** The names to show, by the heading above them. */
  private shown(): Map<string, string[]> {
    const { state } = this;
    let names = this.names;
    const words = state.q.toLowerCase().split(/\s+/).filter(Boolean);
    if (words.length > 0) {
      names = names.filter((name) => {
        const plain = ESSENTIAL[name];
        const text = `${name} ${this.find(name)?.meaning ?? ""} ${plain?.label ?? ""} ${plain?.text ?? ""}`.toLowerCase();
        return words.every((word) => text.includes(word));
      });
    } else if (state.group === ESSENTIALS) {
      return new Map([["Essentials", Object.keys(ESSENTIAL).filter((name) => names.includes(name))]]);
    } else if (state.group === PINNED) {
      return new Map([["Pinned", state.names]]);
    } else if (state.group !== ALL) {
      names = names.filter((name) => this.section(name) === state.group);
    }
    const by = new Map<string, string[]>();
    for (const section of [...this.sections, "Other"]) by.set(section, []);
    for (const name of names) by.get(this.section(name))?.push(name);
    return by;
  }

  private draw(): void {
    const { state } = this;
    this.drawGroups();
    this.watch.disconnect();
    const before = this.cards;
    this.cards = [];
    const shown = this.shown();
    const total = [...shown.values()].reduce((sum, names) => sum + names.length, 0);
    const isLarge = total <= 2 && state.group === PINNED && !state.q;
    const parts: HTMLElement[] = [];
    for (const [heading, names] of shown) {
      if (names.length === 0) continue;
      const cards = names.map((name) => this.card(name, isLarge));
      this.cards.push(...cards);
      parts.push(
        el(
          "section",
          { class: "stack tight", "aria-label": heading },
          el("h2", { class: shown.size > 1 ? "group-title" : "sr-only" }, heading, el("span", { class: "muted" }, ` ${names.length}`)),
          el("div", { class: `grid curves${isLarge ? " large" : ""}` }, cards.map((card) => card.element)),
        ),
      );
    }
    fill(this.body, parts.length > 0 ? parts : this.nothing());
    fill(this.found, state.q ? `${count(total, "metric")} of ${this.names.length} match` : "");
    const after = new Set(this.cards);
    for (const card of before) if (!after.has(card)) card.leave();
    for (const card of this.cards) this.watch.observe(card.element);
  }

  /** The card of a metric; made once, because most of them stay while a filter is typed. */
  private card(name: string, isLarge: boolean): Card {
    const key = `${name} ${isLarge}`;
    const card = this.made.get(key) ?? new Card(name, this.find(name), this.state, this.ctx, this.loader, isLarge, () => this.pin(name));
    this.made.set(key, card);
    card.readdress();
    return card;
  }

  private nothing(): HTMLElement {
    const isEvaluation = this.ctx.runs.some((one) => one.kind === "eval" && this.state.runs.includes(one.run));
    if (this.names.length === 0 && isEvaluation) return empty("An evaluation has no curves", "Its results are in the overview, its rollouts in Rollouts.");
    if (this.names.length === 0) return empty("No step has ended yet", "The first values appear when the first step ends.");
    if (this.state.q) return empty("No metric matches", "The filter looks at names and explanations; each word must occur.");
    return empty("Nothing here", this.state.group === PINNED ? "Pin metrics of other groups to see them here." : "This run has no metric of this group.");
  }

  private drawGroups(): void {
    const { state } = this;
    const has = new Set(this.names.map((name) => this.section(name)));
    const sections = [...this.sections, "Other"].filter((one) => has.has(one));
    const labels: [string, string][] = [
      [ESSENTIALS, "Essentials"],
      ...(state.names.length > 0 ? [[PINNED, `Pinned (${state.names.length})`] as [string, string]] : []),
      ...sections.map((one) => [one, one] as [string, string]),
      [ALL, `All (${this.names.length})`],
    ];
    const focused = this.groups.contains(document.activeElement) ? document.activeElement?.textContent : null;
    fill(
      this.groups,
      labels.map(([group, label]) => {
        const button = el("button", { type: "button", "aria-pressed": String(group === state.group && !state.q) }, label);
        button.addEventListener("click", () => {
          state.group = group;
          state.q = "";
          const filter = this.root.querySelector<HTMLInputElement>("input[type=search]");
          if (filter) filter.value = "";
          this.save();
          this.draw();
        });
        return button;
      }),
    );
    for (const button of this.groups.children) if (button.textContent === focused) (button as HTMLElement).focus();
  }

  private pin(name: string): void {
    const { state } = this;
    const { group } = state;
    state.names = state.names.includes(name) ? state.names.filter((one) => one !== name) : [...state.names, name];
    state.group = group;
    this.save();
    this.drawGroups();
  }
}

function swatch(run: number): HTMLElement {
  const node = el("i", { class: "line", "aria-hidden": "true", style: { "border-color": `var(${COLORS[run % COLORS.length]})` } });
  if (run % DASHES.length > 0) node.style.borderTopStyle = run % DASHES.length === 2 ? "dotted" : "dashed";
  return node;
}

/** One metric. Its values are fetched and its curve is drawn while it is near the window. */
class Card {
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
      el("p", { class: "explain" }, plain?.text ?? explanation(meaning)),
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

function explanation(meaning: Meaning | null): string {
  if (meaning === null) return "A metric of this task; it has no description.";
  const text = meaning.meaning.replaceAll("`", "").replaceAll("\\|", "|");
  return `${text.charAt(0).toUpperCase()}${text.slice(1)}${text.endsWith(".") ? "" : "."}`;
}

function xText(x: XName, value: number): string {
  if (x === "seconds") return duration(value);
  if (x === "tokens" && value >= 10000) return value >= 1e6 ? `${number(value / 1e6)}M` : `${number(value / 1e3)}k`;
  return number(value);
}

/** Fetches metrics: what is asked for in the same moment goes into one request. */
class Loader {
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
        metricsOf(this.ctx, run, part.map(([name]) => name)).then(
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
