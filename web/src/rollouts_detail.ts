// One rollout: what happened in words, then its conversation, its tokens, its group, its problem's others.
import type { Ctx } from "./api";
import { count, duration, el, fixed, number, visible } from "./dom";
import { conversation, json, longText } from "./rollouts_chat";
import {
  advantageMark,
  type Brief,
  type Detail,
  groupOf,
  rewardBar,
  rewardRange,
  rolloutLink,
  statusChip,
  stepWords,
  story,
} from "./rollouts_model";
import { TokenView } from "./rollouts_tokens";

export class RolloutDetail {
  private tokens: TokenView | null = null;

  constructor(
    private readonly ctx: Ctx,
    private readonly n: number,
  ) {}

  async render(root: HTMLElement): Promise<void> {
    const detail = await this.ctx.get<Detail>(`rollouts/${this.n}`);
    const { query } = this.ctx;
    const part = query.get("show") ?? (query.has("turn") || query.has("colour") ? "tokens" : "conversation");
    root.append(this.head(detail), this.parts(detail, part), this.part(detail, part));
  }

  dispose(): void {
    this.tokens?.dispose();
  }

  private head(detail: Detail): HTMLElement {
    const { brief } = detail;
    const { ctx } = this;
    const step = { split: brief.split, step: brief.step };
    return el(
      "header",
      { class: "rollout-head" },
      el(
        "nav",
        { class: "crumbs", "aria-label": "Where this rollout is" },
        el("a", { href: ctx.link("rollouts") }, "Rollouts"),
        " › ",
        el("a", { href: ctx.link("rollouts", step) }, capital(stepWords(brief))),
        " › ",
        el("span", { class: "mono" }, brief.rollout_id),
      ),
      el("h2", { title: visible(brief.problem_id) }, "Problem ", el("span", { class: "mono" }, brief.problem_id)),
      el(
        "div",
        { class: "card" },
        el(
          "dl",
          { class: "facts" },
          fact("Ended", statusChip(brief.status)),
          fact("Reward", rewardBar(brief.reward, rewardRange(groupOf(detail)))),
          fact("Advantage", advantageMark(brief.advantage)),
          brief.split === "train"
            ? fact(
                "Age",
                brief.age_max === null
                  ? "–"
                  : brief.age_max === 0
                    ? "0, fresh"
                    : el("span", { class: "age" }, count(brief.age_max, "step")),
              )
            : null,
          fact("Tokens", number(brief.tokens)),
          fact("Turns", number(brief.turns)),
          brief.source ? fact("Evaluation of", brief.source) : null,
          brief.chosen === null
            ? null
            : fact("Picked as", brief.chosen === "random" ? "random" : `${brief.chosen} of its step`),
          fact(
            "Step",
            el(
              "span",
              null,
              `${stepWords(brief)} · `,
              el("a", { href: ctx.link("timeline", { step: brief.step }) }, "on the timeline"),
            ),
          ),
        ),
        el("p", { class: "story" }, story(detail).join(" ")),
        detail.cause === null ? null : el("div", { class: "cause" }, el("b", null, "Cause: "), longText(detail.cause)),
      ),
    );
  }

  private parts(detail: Detail, part: string): HTMLElement {
    const others = detail.same_problem.length;
    const tabs: [string, string][] = [
      ["conversation", "Conversation"],
      ["tokens", "Tokens"],
      ["group", `Group (${number(groupOf(detail).length)})`],
      ["problem", others > 0 ? `Same problem, other steps (${number(others)})` : "Same problem"],
    ];
    return el(
      "nav",
      { class: "tabs", "aria-label": "Parts of this rollout" },
      tabs.map(([name, words]) =>
        el(
          "a",
          { href: rolloutLink(this.ctx, this.n, { show: name }), "aria-current": name === part ? "page" : null },
          words,
        ),
      ),
    );
  }

  private part(detail: Detail, part: string): HTMLElement {
    const section = el("section", { class: `part part-${part}` });
    if (part === "tokens") {
      this.tokens = new TokenView(this.ctx, detail);
      this.tokens.render(section);
    } else if (part === "group") {
      section.append(
        el(
          "p",
          { class: "muted" },
          "Rollouts of one problem at one time. Each is compared with the mean of its group: better ones are pushed up, worse ones down.",
        ),
        cards(this.ctx, byReward(groupOf(detail)), detail.brief, "group"),
      );
    } else if (part === "problem") {
      const rows = [...detail.same_problem, detail.brief].sort((a, b) => a.step - b.step || a.n - b.n);
      section.append(
        el(
          "p",
          { class: "muted" },
          detail.same_problem.length === 0
            ? "No rollout of this problem was recorded at another step. "
            : "How the model answered the same problem as training went on. ",
          el(
            "a",
            { href: this.ctx.link("rollouts", { problem: detail.brief.problem_id, sort: "step" }) },
            "All its recorded rollouts",
          ),
        ),
        cards(this.ctx, rows, detail.brief, "problem"),
      );
    } else {
      section.append(
        el(
          "div",
          { class: "with-aside" },
          conversation(detail, (turn) => rolloutLink(this.ctx, this.n, { show: "tokens", turn })),
          about(detail),
        ),
      );
    }
    return section;
  }
}

/** The problem's data, the reward's parts and where the time went. */
function about(detail: Detail): HTMLElement {
  const metrics = Object.entries(detail.metrics);
  const phases = Object.entries(detail.phase_s).filter((entry): entry is [string, number] => entry[1] !== null);
  const total = phases.reduce((sum, [, seconds]) => sum + seconds, 0);
  const generation = phases.find(([name]) => name === "generation");
  const queued = Math.min(
    detail.turns.reduce((sum, turn) => sum + (turn.metrics?.["queue_s"] ?? 0), 0),
    generation?.[1] ?? 0,
  );
  if (generation !== undefined && queued > 0) {
    generation[1] -= queued;
    phases.push(["engine's queue", queued]);
  }
  return el(
    "aside",
    { class: "about", "aria-label": "About this rollout" },
    card("Problem", "What the task knows of the problem, the right answer often included.", entries(detail.problem)),
    metrics.length === 0
      ? null
      : card(
          "Reward and metrics",
          "What the task measured. The reward is made of some of these.",
          table([
            ["reward", fixed(detail.brief.reward)],
            ...metrics.map(([name, value]): [string, string] => [name, number(value)]),
          ]),
        ),
    phases.length === 0
      ? null
      : card(
          "Time",
          `What it waited for, ${duration(total)} in all.`,
          el(
            "table",
            null,
            phases
              .sort((a, b) => b[1] - a[1])
              .map(([name, seconds]) =>
                el(
                  "tr",
                  null,
                  el("th", { scope: "row" }, name),
                  el("td", { class: "num" }, duration(seconds)),
                  el(
                    "td",
                    { class: "bar-cell" },
                    el("span", {
                      class: "share",
                      "aria-hidden": "true",
                      style: { "--share": `${total > 0 ? (100 * seconds) / total : 0}%` },
                    }),
                  ),
                ),
              ),
          ),
        ),
  );
}

function entries(problem: Record<string, unknown>): HTMLElement {
  return el(
    "dl",
    { class: "entries" },
    Object.entries(problem).map(([name, value]) => [
      el("dt", null, name),
      el(
        "dd",
        null,
        longText(typeof value === "string" ? value : isShort(value) ? JSON.stringify(value) : json(value)),
      ),
    ]),
  );
}

function isShort(value: unknown): boolean {
  return (JSON.stringify(value) ?? "").length < 60;
}

function table(rows: [string, string][]): HTMLElement {
  return el(
    "table",
    null,
    rows.map(([name, value]) => el("tr", null, el("th", { scope: "row" }, name), el("td", { class: "num" }, value))),
  );
}

function card(title: string, meaning: string, body: HTMLElement): HTMLElement {
  return el("section", { class: "card" }, el("h3", null, title), el("p", { class: "muted small" }, meaning), body);
}

/** Rollouts side by side: reward, ending, size and last answer of each. */
function cards(ctx: Ctx, rows: Brief[], current: Brief, show: string): HTMLElement {
  const range = rewardRange(rows);
  return el(
    "ul",
    { class: "side-by-side" },
    rows.map((row) => {
      const isThis = row.n === current.n;
      const name = show === "problem" ? capital(stepWords(row)) : (row.rollout_id.split("/").at(-1) ?? row.rollout_id);
      return el(
        "li",
        { class: `card${isThis ? " current" : ""}` },
        el("h3", null, isThis ? `${name} · this one` : el("a", { href: rolloutLink(ctx, row.n, { show }) }, name)),
        el("div", { class: "card-facts" }, rewardBar(row.reward, range), advantageMark(row.advantage)),
        el(
          "div",
          { class: "muted small" },
          statusChip(row.status),
          ` · ${count(row.turns, "turn")} · ${count(row.tokens, "token")}`,
          row.age_max ? ` · age ${row.age_max}` : null,
        ),
        el(
          "div",
          { class: "answer text", tabindex: row.excerpt.length > 300 ? 0 : null },
          row.excerpt || "(no answer)",
        ),
        isThis
          ? null
          : el("a", { class: "small", href: rolloutLink(ctx, row.n), "aria-label": `Read ${name}` }, "Read it"),
      );
    }),
  );
}

function byReward(rows: Brief[]): Brief[] {
  return [...rows].sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity) || a.n - b.n);
}

function fact(name: string, value: Node | string): HTMLElement {
  return el("div", null, el("dt", null, name), el("dd", null, value));
}

function capital(words: string): string {
  return words.charAt(0).toUpperCase() + words.slice(1);
}
