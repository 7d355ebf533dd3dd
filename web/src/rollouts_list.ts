// The list of recorded rollouts: filters, order and page are in the address; arrows move, Enter opens.
import type { Ctx } from "./api";
import { count, el, empty, fill, newId, number } from "./dom";
import {
  advantageMark,
  type Brief,
  type Page,
  rewardBar,
  rewardRange,
  rolloutLink,
  roving,
  statusChip,
  statusWords,
  isFailure,
} from "./rollouts_model";

const PAGE = 50;

type Sort = "step" | "reward" | "advantage" | "age" | "tokens";

interface Column {
  title: string;
  meaning: string;
  sort?: Sort;
  kind?: string;
  cell(row: Brief, range: [number, number]): Node | string;
}

const COLUMNS: Column[] = [
  {
    title: "Step",
    meaning: "The training step that used the rollout. “eval” marks an evaluation after that step.",
    sort: "step",
    kind: "number",
    cell: (row) =>
      row.split === "evaluation"
        ? el("span", null, el("span", { class: "tag" }, "eval"), ` ${row.step}`)
        : `${row.step}`,
  },
  {
    title: "Reward",
    meaning: "How good the environment found it. Failed rollouts have none.",
    sort: "reward",
    cell: (row, range) => rewardBar(row.reward, range),
  },
  {
    title: "Advantage",
    meaning:
      "Reward compared with the other rollouts of the same problem. ▲: training makes its tokens more likely, ▼: less likely.",
    sort: "advantage",
    kind: "number",
    cell: (row) => advantageMark(row.advantage),
  },
  {
    title: "Ended",
    meaning: "How it ended: completed, cut at a limit, or failed.",
    cell: (row) => statusChip(row.status),
  },
  {
    title: "Age",
    meaning:
      "Staleness: how many steps older than the trained weights were the weights that sampled its oldest token. 0 is fresh.",
    sort: "age",
    kind: "number",
    cell: (row) => (row.age_max ? el("span", { class: "age" }, number(row.age_max)) : number(row.age_max)),
  },
  { title: "Turns", meaning: "Answers that the model gave in it.", kind: "number", cell: (row) => number(row.turns) },
  {
    title: "Tokens",
    meaning: "Tokens that the model sampled.",
    sort: "tokens",
    kind: "number",
    cell: (row) => number(row.tokens),
  },
  {
    title: "Picked as",
    meaning: "Why it was recorded: the best or worst of its step, or drawn at random.",
    kind: "chosen",
    cell: (row) => row.chosen ?? "",
  },
  { title: "Last answer", meaning: "The end of what the model wrote.", kind: "excerpt", cell: (row) => row.excerpt },
];

export class RolloutList {
  private isAsking = false;
  private isWanted = false;
  private hasChoices = false;
  private readonly presets = el("ul", { class: "presets", "aria-label": "Often asked" });
  private readonly total = el("p", { class: "total", role: "status" });
  private readonly body = el("div", { class: "list" });
  private readonly statuses = el("select", { name: "status" }, el("option", { value: "" }, "any"));
  private readonly clear = el("a", { class: "clear" }, "Clear filters");
  private readonly form: HTMLFormElement;

  constructor(private readonly ctx: Ctx) {
    this.form = this.filters();
  }

  async render(root: HTMLElement): Promise<void> {
    root.append(
      el(
        "p",
        { class: "lead" },
        "Conversations of the model with its task: a sample of each step, unless the run records all (metrics.rollouts_per_step). Open one to read it, token by token.",
      ),
      this.presets,
      this.form,
      el(
        "div",
        { class: "list-head" },
        this.total,
        el("span", { class: "muted keys" }, "Arrow keys move from row to row, Enter opens"),
        explanations(),
      ),
      this.body,
    );
    await this.load();
  }

  /** Goes to the row of a rollout, if it is on this page. */
  focus(n: number): void {
    const link = this.body.querySelector<HTMLElement>(`a[data-n="${n}"]`);
    link?.focus({ preventScroll: true });
    link?.scrollIntoView({ block: "center" });
  }

  /** Asks again and shows the answer. Questions that come meanwhile are one question after it. */
  async load(): Promise<void> {
    this.isWanted = true;
    if (this.isAsking) return;
    this.isAsking = true;
    try {
      while (this.isWanted) {
        this.isWanted = false;
        const query = new URLSearchParams(this.ctx.query);
        query.delete("run");
        if (!query.has("sort")) query.set("sort", "-step");
        query.set("limit", String(PAGE));
        const page = await this.ctx.get<Page>("rollouts", query);
        if (!this.hasChoices) this.showChoices(page);
        this.hasChoices = true;
        if (!this.isWanted) this.show(page);
      }
    } finally {
      this.isAsking = false;
    }
  }

  private showChoices(page: Page): void {
    const wanted = this.ctx.query.get("status") ?? "";
    for (const status of page.statuses) this.statuses.append(el("option", { value: status }, statusWords(status)));
    this.statuses.value = wanted;
    const last = page.steps?.[1];
    const failed = page.statuses.filter((status) => isFailure(status));
    const links: [string, Record<string, string | number>][] = [
      ["All, newest first", {}],
      ["Worst rewards", { split: "train", sort: "reward" }],
      ...(last
        ? ([[`Worst of step ${last}`, { split: "train", step: last, sort: "reward" }]] as [
            string,
            Record<string, string | number>,
          ][])
        : []),
      ["Best rewards", { split: "train", sort: "-reward" }],
      ["Stale", { split: "train", age_min: 1, sort: "-age" }],
      ...failed.map((status): [string, Record<string, string>] => [`Failed: ${statusWords(status)}`, { status }]),
      ["Evaluations", { split: "evaluation" }],
    ];
    fill(
      this.presets,
      links.map(([words, query]) => el("li", null, el("a", { href: this.ctx.link("rollouts", query) }, words))),
    );
    this.clear.href = this.ctx.link("rollouts");
    this.mark();
  }

  /** Marks the preset that is shown. */
  private mark(): void {
    const here = withoutPlace(this.ctx.query);
    this.clear.hidden = here === "";
    for (const link of this.presets.querySelectorAll("a")) {
      const is = withoutPlace(new URLSearchParams(link.hash.split("?")[1] ?? ""));
      if (is === here) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
  }

  private filters(): HTMLFormElement {
    const { query } = this.ctx;
    const text = (name: string, props: Record<string, unknown>) =>
      el("input", { name, value: query.get(name) ?? "", autocomplete: "off", ...props });
    const steps = (name: string, words: string) => text(name, { type: "number", min: 0, "aria-label": words });
    const rewards = (name: string, words: string) => text(name, { type: "number", step: "any", "aria-label": words });
    const splits = el(
      "select",
      { name: "split" },
      el("option", { value: "" }, "both"),
      el("option", { value: "train" }, "training"),
      el("option", { value: "evaluation" }, "evaluation"),
    );
    splits.value = query.get("split") ?? "";
    const one = query.get("step");
    const bounds = [steps("step_min", "First step"), steps("step_max", "Last step")];
    if (one !== null) for (const bound of bounds) bound.value = one;
    const form = el(
      "form",
      { class: "filters folded", role: "search", "aria-label": "Filter rollouts" },
      field("Search", text("q", { type: "search", placeholder: "words in prompts, answers" }), "wide"),
      this.toggle(),
      field("Used for", splits),
      pair("Steps", bounds),
      field("Ended", this.statuses),
      pair("Reward", [rewards("reward_min", "Lowest reward"), rewards("reward_max", "Highest reward")]),
      field("Age at least", text("age_min", { type: "number", min: 0 })),
      field("Problem", text("problem", { placeholder: "whole id, without /r5" }), "wide"),
      query.get("group") ? field("Group", text("group", {}), "wide") : null,
      this.clear,
    );
    form.addEventListener("input", () => this.filter());
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.filter();
    });
    return form;
  }

  /** Opens and closes the other filters on a narrow screen; a wide one has them all. */
  private toggle(): HTMLElement {
    const button = el("button", { type: "button", class: "toggle", "aria-expanded": "false" }, "Filters");
    button.addEventListener("click", () => {
      const isFolded = this.form.classList.toggle("folded");
      button.setAttribute("aria-expanded", String(!isFolded));
    });
    return button;
  }

  /** Puts the form into the address and asks again, from the first page on. */
  private filter(): void {
    const { query } = this.ctx;
    const values = new FormData(this.form);
    for (const [name, value] of values) {
      if (typeof value === "string" && value !== "") query.set(name, value);
      else query.delete(name);
    }
    query.delete("step");
    query.delete("offset");
    this.changed();
  }

  private changed(): void {
    this.ctx.replaceQuery(this.ctx.query);
    this.mark();
    this.load().catch((error: unknown) => {
      if (!this.ctx.signal.aborted) this.total.textContent = error instanceof Error ? error.message : String(error);
    });
  }

  private show(page: Page): void {
    const offset = Number(this.ctx.query.get("offset") ?? 0);
    const shown = page.rows.length;
    const part =
      page.details === undefined
        ? ""
        : `; this report holds the conversations of ${number(page.details.length)}, which are links`;
    this.total.textContent =
      page.total > shown && shown > 0
        ? `${number(offset + 1)} to ${number(offset + shown)} of ${count(page.total, "rollout")}${part}`
        : `${count(page.total, "rollout")}${part}`;
    if (shown === 0) {
      fill(this.body, empty("No rollout matches", "Clear filters, or wait until the run has recorded some."));
      return;
    }
    const links = () => [...this.body.querySelectorAll<HTMLElement>("a[data-n]")];
    const at = links().indexOf(document.activeElement as HTMLElement);
    const focused = links()[at]?.dataset["n"];
    fill(this.body, this.table(page), this.pager(page, offset));
    if (at >= 0) (links().find((link) => link.dataset["n"] === focused) ?? links()[Math.min(at, shown - 1)])?.focus();
  }

  private table(page: Page): HTMLElement {
    const range = rewardRange(page.rows);
    const whole = page.details === undefined ? null : new Set(page.details);
    const rows = page.rows.map((row) => this.row(row, range, whole === null || whole.has(row.n)));
    const table = el(
      "table",
      { class: "rollouts", "aria-label": "Recorded rollouts" },
      el(
        "thead",
        null,
        el(
          "tr",
          null,
          COLUMNS.map((column) => this.header(column)),
          el("th", { scope: "col" }, "Problem"),
        ),
      ),
      el("tbody", null, rows),
    );
    roving(table, "a[data-n]");
    table.addEventListener("click", (event) => {
      if (!(event.target instanceof Element) || event.target.closest("a, button") || getSelection()?.toString()) return;
      event.target.closest("tr")?.querySelector<HTMLElement>("a[data-n]")?.click();
    });
    return table;
  }

  private header(column: Column): HTMLElement {
    const { sort, title, meaning } = column;
    if (sort === undefined) return el("th", { scope: "col", class: column.kind, title: meaning }, title);
    const now = this.ctx.query.get("sort") ?? "-step";
    const isThis = now.replace("-", "") === sort;
    const order = !isThis ? null : now.startsWith("-") ? "descending" : "ascending";
    const button = el(
      "button",
      { type: "button", class: "sort", title: meaning },
      title,
      el("span", { class: "order", "aria-hidden": "true" }, order === null ? "↕" : order === "ascending" ? "↑" : "↓"),
    );
    button.addEventListener("click", () => {
      this.ctx.query.set("sort", order === "descending" ? sort : `-${sort}`);
      this.ctx.query.delete("offset");
      this.changed();
    });
    return el("th", { scope: "col", class: column.kind, "aria-sort": order }, button);
  }

  private row(row: Brief, range: [number, number], isWhole: boolean): HTMLElement {
    const name = row.source ? `${row.source} ${row.rollout_id}` : row.rollout_id;
    return el(
      "tr",
      null,
      COLUMNS.map((column) => el("td", { class: column.kind, data: { title: column.title } }, column.cell(row, range))),
      el(
        "th",
        { scope: "row", class: "problem" },
        isWhole
          ? el("a", { href: rolloutLink(this.ctx, row.n), data: { n: String(row.n) } }, name)
          : el("span", { class: "muted", title: "Its conversation is not in this report" }, name),
      ),
    );
  }

  private pager(page: Page, offset: number): HTMLElement | null {
    if (page.total <= PAGE) return null;
    const to = (words: string, start: number, isThere: boolean) => {
      const button = el("button", { type: "button", disabled: !isThere }, words);
      button.addEventListener("click", () => {
        if (start > 0) this.ctx.query.set("offset", String(start));
        else this.ctx.query.delete("offset");
        this.changed();
        this.total.scrollIntoView({ block: "nearest" });
      });
      return button;
    };
    const lastStart = Math.floor((page.total - 1) / PAGE) * PAGE;
    return el(
      "nav",
      { class: "pager", "aria-label": "Pages of rollouts" },
      to("First", 0, offset > 0),
      to("Previous", Math.max(0, offset - PAGE), offset > 0),
      el("span", null, `page ${number(Math.floor(offset / PAGE) + 1)} of ${number(lastStart / PAGE + 1)}`),
      to("Next", offset + PAGE, offset < lastStart),
      to("Last", lastStart, offset < lastStart),
    );
  }
}

/** The query that says which rollouts, without the run and the place in the list. */
function withoutPlace(query: URLSearchParams): string {
  const rest = new URLSearchParams(query);
  rest.delete("run");
  rest.delete("offset");
  if (rest.has("step_min") && rest.get("step_min") === rest.get("step_max")) {
    rest.set("step", rest.get("step_min") ?? "");
    rest.delete("step_min");
    rest.delete("step_max");
  }
  if (rest.get("sort") === "-step") rest.delete("sort");
  rest.sort();
  return rest.toString();
}

function field(words: string, input: HTMLElement, kind = ""): HTMLElement {
  return el("label", { class: `field ${kind}` }, el("span", null, words), input);
}

function pair(words: string, inputs: HTMLElement[]): HTMLElement {
  const id = newId();
  return el(
    "div",
    { class: "field pair", role: "group", "aria-labelledby": id },
    el("span", { id }, words),
    el("div", null, inputs[0], el("span", { "aria-hidden": "true" }, "–"), inputs[1]),
  );
}

function explanations(): HTMLElement {
  return el(
    "details",
    { class: "columns-help" },
    el("summary", null, "What the columns mean"),
    el(
      "dl",
      null,
      COLUMNS.map(({ title, meaning }) => [el("dt", null, title), el("dd", null, meaning)]),
    ),
  );
}
