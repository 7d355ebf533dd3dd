// What the server says about rollouts, and the words and small elements that several views share.
import type { Ctx, Params } from "./api";
import { count, el, fixed, number, percent } from "./dom";

/** A rollout in a list. */
export interface Brief {
  n: number;
  step: number;
  version: number;
  split: "train" | "evaluation";
  /** Which of the evaluations in a folder; empty in a training run. */
  source?: string;
  group_id: string;
  rollout_id: string;
  problem_id: string;
  status: string;
  reward: number | null;
  advantage: number | null;
  turns: number;
  tokens: number;
  age_max: number | null;
  chosen: string | null;
  excerpt: string;
}

export interface Page {
  total: number;
  rows: Brief[];
  statuses: string[];
  steps: [number, number] | null;
  /** In a report: the rollouts that it holds whole. */
  details?: number[];
}

export interface Token {
  text: string | null;
  id: number;
  logprob: number | null;
  trainer_logprob: number | null;
  ratio: number | null;
  version: number;
  age: number | null;
  mask: 0 | 1;
  advantage: number | null;
  /** From how many tokens it was sampled; null if from all. */
  kept: number | null;
}

export interface Turn {
  text: string | null;
  reward: number | null;
  branch_reward: number | null;
  is_seen: boolean;
  finish_reason: string;
  stop_reason: string | number | null;
  replica: string;
  metrics: Record<string, number | null> | null;
  advantage: number | null;
  prompt_tokens: number;
  /** More than there are in `tokens` if the server cut them. */
  num_tokens: number;
  parent: number | null;
  tokens: Token[];
}

export interface Detail {
  brief: Brief;
  cause: string | null;
  problem: Record<string, unknown>;
  metrics: Record<string, number | null>;
  phase_s: Record<string, number | null>;
  messages: Record<string, unknown>[];
  turns: Turn[];
  siblings: Brief[];
  same_problem: Brief[];
}

/** The recorded rollouts of the group, this one included. */
export function groupOf({ brief, siblings }: Detail): Brief[] {
  return [brief, ...siblings.filter((row) => row.n !== brief.n)];
}

/** Each way to end, in words, and whether it is a failure: then there is no reward and no training. */
const STATUSES: Record<string, [words: string, meaning: string, isFailure: boolean]> = {
  completed: ["completed", "It ended as the environment intends.", false],
  max_turns: ["turn limit", "It was cut at the limit of turns.", false],
  max_tokens: ["token limit", "It was cut because no tokens were left for another turn.", false],
  step_timeout: ["step timeout", "One call of the environment took too long.", true],
  rollout_timeout: ["rollout timeout", "The whole rollout took too long.", true],
  env_error: ["environment error", "The environment raised an error.", true],
  generation_error: ["generation error", "A request was refused, or its replicas were lost.", true],
  reward_error: ["reward error", "A reward function failed.", true],
  cancelled: ["cancelled", "It was stopped from outside.", true],
};

export function statusWords(status: string): string {
  return STATUSES[status]?.[0] ?? status;
}

export function statusMeaning(status: string): string {
  return STATUSES[status]?.[1] ?? "";
}

export function isFailure(status: string): boolean {
  return STATUSES[status]?.[2] ?? true;
}

/** A status as a mark and a word, so that colour is not needed to tell it. */
export function statusChip(status: string): HTMLElement {
  const kind = isFailure(status) ? "failed" : status === "completed" ? "done" : "cut";
  const mark = { failed: "✕", done: "✓", cut: "◗" }[kind];
  return el(
    "span",
    { class: `ending ${kind}`, title: statusMeaning(status) },
    el("span", { "aria-hidden": "true" }, mark),
    ` ${statusWords(status)}`,
  );
}

/** `▲ 0.101`: training makes it more likely; `▼ 0.4`: less likely. */
export function advantageMark(advantage: number | null): HTMLElement {
  if (advantage === null) return el("span", { class: "muted", title: "Not trained on" }, "–");
  const [kind, mark, words] =
    advantage > 0
      ? ["up", "▲ +", "pushed up: training makes this more likely"]
      : advantage < 0
        ? ["down", "▼ −", "pushed down: training makes this less likely"]
        : ["even", "", "no push: as good as its group's mean"];
  return el(
    "span",
    { class: `advantage ${kind}`, title: words },
    el("span", { "aria-hidden": "true" }, `${mark}${fixed(Math.abs(advantage))}`),
    el("span", { class: "sr-only" }, `${fixed(advantage)}, ${words}`),
  );
}

/** A reward as a number and a bar; `range` is what the bar spans. */
export function rewardBar(reward: number | null, range: [number, number]): HTMLElement {
  if (reward === null) return el("span", { class: "muted", title: "Failed rollouts have no reward" }, "none");
  const [low, high] = range;
  const share = high > low ? Math.min(1, Math.max(0, (reward - low) / (high - low))) : 0.5;
  return el(
    "span",
    { class: "reward" },
    el("span", { class: "reward-number" }, fixed(reward)),
    el("span", { class: "reward-bar", "aria-hidden": "true", style: { "--share": `${100 * share}%` } }),
  );
}

/** From 0, or the lowest reward if negative, to 1, or the highest. */
export function rewardRange(rows: Brief[]): [number, number] {
  const rewards = rows.map((row) => row.reward).filter((reward) => reward !== null);
  return [Math.min(0, ...rewards), Math.max(1, ...rewards)];
}

/** How a person names the step: an evaluation is of the weights after it. */
export function stepWords(row: Brief): string {
  return row.split === "evaluation" ? `evaluation after step ${number(row.step)}` : `step ${number(row.step)}`;
}

/** A query for the address, without what is empty. */
export function rolloutLink(ctx: Ctx, n: number, query: Params = {}): string {
  return ctx.link(`rollouts/${n}`, query);
}

/** What a rollout shows, in sentences that need no other knowledge. */
export function story(detail: Detail): string[] {
  const { brief } = detail;
  const sentences = [ending(detail)];
  const group = comparison(detail);
  if (group !== null) sentences.push(group);
  sentences.push(push(detail));
  const age = ageSentence(detail);
  if (age !== null) sentences.push(age);
  if (brief.split === "evaluation") sentences.push("It belongs to an evaluation: nothing is trained on it.");
  return sentences.filter((sentence) => sentence !== "");
}

function ending({ brief }: Detail): string {
  const where = `${count(brief.turns, "turn")} and ${count(brief.tokens, "token")}`;
  const meaning = statusMeaning(brief.status) || `It ended as “${brief.status}”.`;
  return `${meaning.replace(/\.$/, "")}, after ${where}.`;
}

function comparison(detail: Detail): string | null {
  const { brief } = detail;
  if (brief.reward === null) return "It has no reward, so it does not count for its group.";
  const rewards = groupOf(detail)
    .map((row) => row.reward)
    .filter((reward) => reward !== null);
  if (rewards.length < 2) {
    const { advantage } = brief;
    const than =
      advantage === null
        ? ""
        : advantage > 0
          ? ", better than its group"
          : advantage < 0
            ? ", worse than its group"
            : ", like its group";
    return `Its reward is ${fixed(brief.reward)}${than}.`;
  }
  const mean = rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;
  const lower = rewards.filter((reward) => reward < (brief.reward ?? 0)).length;
  const higher = rewards.filter((reward) => reward > (brief.reward ?? 0)).length;
  const group = `the ${rewards.length} recorded rollouts of its group`;
  if (lower === 0 && higher === 0) return `Its reward is ${fixed(brief.reward)}, like that of all of ${group}.`;
  const place =
    lower === 0
      ? `the lowest of ${group}`
      : higher === 0
        ? `the highest of ${group}`
        : `better than ${lower} and worse than ${higher} of ${group}`;
  return `Its reward is ${fixed(brief.reward)}: ${place}, whose mean is ${fixed(mean)}.`;
}

/** Counts the tokens that the gradient makes more likely, less likely, or leaves alone. */
export function pushes(turns: Turn[]): { up: number; down: number; even: number; masked: number } {
  const found = { up: 0, down: 0, even: 0, masked: 0 };
  for (const turn of turns)
    for (const token of turn.tokens) {
      const advantage = token.advantage ?? turn.advantage;
      if (!token.mask) found.masked += 1;
      else if (advantage === null || advantage === 0) found.even += 1;
      else if (advantage > 0) found.up += 1;
      else found.down += 1;
    }
  return found;
}

function push({ brief, turns }: Detail): string {
  if (brief.split === "evaluation") return "";
  const { up, down, even, masked } = pushes(turns);
  const parts = [];
  if (up > 0) parts.push(`makes ${count(up, "token")} more likely`);
  if (down > 0) parts.push(`makes ${count(down, "token")} less likely`);
  if (even > 0) parts.push(`gives no push to ${count(even, "token")}, as the advantage is 0`);
  if (parts.length === 0) return "Training used none of its tokens.";
  const rest = masked > 0 ? `; ${count(masked, "token")} masked` : "";
  return `Training ${list(parts)}${rest}.`;
}

function ageSentence({ brief, turns }: Detail): string | null {
  if (brief.split === "evaluation" || brief.age_max === null) return null;
  const versions = new Set(turns.flatMap((turn) => turn.tokens.map((token) => token.version)));
  const mixed =
    versions.size > 1 ? ` Its tokens come from ${versions.size} versions, as weights changed while it ran.` : "";
  if (brief.age_max === 0) return `It is fresh: sampled by the very weights that were then trained.${mixed}`;
  const old = turns.reduce((sum, turn) => sum + turn.tokens.filter((token) => (token.age ?? 0) > 0).length, 0);
  const share = brief.tokens > 0 && old > 0 ? `; ${percent(old / brief.tokens)} of its tokens are older than those weights` : "";
  return `It is stale: its oldest tokens were sampled by weights ${count(brief.age_max, "step")} older than those that were trained${share}.${mixed}`;
}

function list(parts: string[]): string {
  return parts.length < 2 ? (parts[0] ?? "") : `${parts.slice(0, -1).join(", ")} and ${parts.at(-1)}`;
}

/** Makes arrow keys move between the elements that `selector` finds, of which Tab reaches one. */
export function roving(box: HTMLElement, selector: string): void {
  const all = () => [...box.querySelectorAll<HTMLElement>(selector)];
  all().forEach((one, n) => (one.tabIndex = n === 0 ? 0 : -1));
  box.addEventListener("focusin", (event) => {
    if (!(event.target instanceof HTMLElement) || !event.target.matches(selector)) return;
    for (const one of box.querySelectorAll<HTMLElement>(`${selector}[tabindex="0"]`)) one.tabIndex = -1;
    event.target.tabIndex = 0;
  });
  box.addEventListener("keydown", (event) => {
    const items = all();
    const at = items.indexOf(document.activeElement as HTMLElement);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: items.length - 1 }[event.key];
    if (at < 0 || to === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    const item = items[Math.max(0, Math.min(items.length - 1, to))];
    item?.focus();
    item?.scrollIntoView({ block: "nearest" });
  });
}
