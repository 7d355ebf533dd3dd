// Every metric as a curve: groups, a filter, several runs, and a table in place of each curve.
import type { Changed, Ctx, View } from "./api";
import { Card, Loader, swatch, X_NAMES, type State } from "./curve_card";
import { count, debounce, el, empty, fill } from "./dom";
import { ESSENTIAL, lookup, meanings, type Meaning, type XName } from "./metrics";

const ESSENTIALS = "essentials";
const ALL = "all";
const PINNED = "pinned";

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
    }, 20));
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
