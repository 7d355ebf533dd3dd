// What stands next to the tokens: the values of the chosen one, else what the gradient pushes most.
import { count, el, fixed, number, percent, visible } from "./dom";
import { advantageMark, type Token, type Turn } from "./rollouts_model";
import { difference, pushOf } from "./rollouts_scales";

const STRONGEST = 8;

/** What to do, and the tokens that the gradient pushes most; `choose` takes the turn and the place in it. */
export function noToken(turns: Turn[], choose: (turn: number, at: number) => void): HTMLElement {
  const strongest = strongestPushes(turns);
  const how = "Point at a token, or go through them with Tab and the arrow keys: its values show here.";
  return el(
    "div",
    null,
    el("p", { class: "muted" }, how),
    strongest.length === 0 ? null : el("h3", null, "Strongest pushes"),
    el(
      "ul",
      { class: "strongest" },
      strongest.map(({ turn, at, token, push }) =>
        el(
          "li",
          null,
          el(
            "button",
            { type: "button", class: "quiet", on: { click: () => choose(turn, at) } },
            advantageMark(push),
            el("code", null, pieces(token.text ?? String(token.id)).slice(0, 24)),
            el("span", { class: "muted small" }, `turn ${turn + 1}`),
          ),
        ),
      ),
    ),
  );
}

/** All values of a token. */
export function tokenValues(token: Token, turn: Turn, where: string): HTMLElement {
  const text = token.text === null ? el("span", { class: "muted" }, "text unknown") : pieces(token.text);
  return el(
    "div",
    null,
    el("p", { class: "token-text" }, text),
    el("p", { class: "muted small" }, `${where}, id ${token.id}`),
    el(
      "dl",
      null,
      values(token, turn).map(([name, value]) => [el("dt", null, name), el("dd", null, value)]),
    ),
  );
}

/** The tokens that the gradient pushes most, the strongest first. */
function strongestPushes(turns: Turn[]): { turn: number; at: number; token: Token; push: number }[] {
  const found: { turn: number; at: number; token: Token; push: number }[] = [];
  turns.forEach((turn, n) =>
    turn.tokens.forEach((token, at) => {
      const push = pushOf(token);
      const weakest = found.length < STRONGEST ? 0 : Math.abs(found.at(-1)?.push ?? 0);
      if (push === null || Math.abs(push) <= weakest) return;
      found.push({ turn: n, at, token, push });
      found.sort((a, b) => Math.abs(b.push) - Math.abs(a.push));
      found.length = Math.min(found.length, STRONGEST);
    }),
  );
  return found;
}

function values(token: Token, turn: Turn): [string, Node | string][] {
  const advantage = token.mask ? (token.advantage ?? turn.advantage) : null;
  const kept = token.kept === null ? "all tokens" : count(token.kept, "token");
  return [
    ["Training", token.mask ? el("span", null, "trained on") : el("span", null, "masked: not trained on")],
    ["Advantage", advantageMark(advantage)],
    ["Push", advantageMark(pushOf(token))],
    ["Sampler’s probability", likely(token.logprob)],
    ["Trainer’s probability", likely(token.trainer_logprob)],
    ["Trainer minus sampler", token.trainer_logprob === null ? "not recorded" : fixed(difference(token), 4)],
    ["Ratio", token.ratio === null ? "not recorded" : fixed(token.ratio, 4)],
    ["Policy version", number(token.version)],
    ["Age", token.age === null ? "not trained" : token.age === 0 ? "0, fresh" : count(token.age, "step")],
    ["Sampled from", kept],
  ];
}

function likely(logprob: number | null): Node | string {
  if (logprob === null) return "not recorded";
  return el("span", null, percent(Math.exp(logprob)), el("span", { class: "muted" }, ` log ${fixed(logprob, 3)}`));
}

/** A token's text with its white space visible. */
function pieces(text: string): string {
  if (text === "") return "∅";
  return visible(text).replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥");
}
