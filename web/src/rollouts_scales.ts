// What tokens can be coloured by. Each scale sorts a token into one of eleven buckets; the style sheet
// gives each bucket a colour and a line of its own thickness, so that colour is not needed to tell them.
import { fixed, number, percent } from "./dom";
import { type Detail, groupOf, type Token } from "./rollouts_model";

export const BUCKETS = 11;
const MIDDLE = 5;

export interface Entry {
  bucket: number;
  words: string;
}

export interface Scale {
  id: string;
  label: string;
  meaning: string;
  /** `sequential`: from nothing to much; `diverging`: the middle is nothing. */
  kind: "sequential" | "diverging";
  /** The bucket of a token; null if the token lacks the value. */
  bucket(token: Token): number | null;
  legend: Entry[];
  isKnown: boolean;
}

type Made = Omit<Scale, "isKnown">;

// Bounds between the buckets of a logprob, as probabilities: surprise grows by about a half each.
const SURE = [0.99, 0.95, 0.9, 0.75, 0.6, 0.4, 0.25, 0.1, 0.05, 0.01];
const LOG_SURE = SURE.map(Math.log);
const GAPS = [0.01, 0.03, 0.1, 0.3, 1]; // bounds of |difference of logprobs|
const KEPT = [10_000, 3000, 1000, 300, 100, 30, 10, 5, 3, 2]; // bounds of the number of tokens

/** All scales; `isKnown` tells for which of them the rollout has values. */
export function scalesOf(detail: Detail): Scale[] {
  const tokens = detail.turns.flatMap((turn) => turn.tokens);
  const most = groupOf(detail).map((row) => Math.abs(row.advantage ?? 0));
  const size = tokens.reduce((found, token) => Math.max(found, Math.abs(token.advantage ?? 0)), Math.max(...most)) || 1;
  const scales = [
    signed(
      "push",
      "Push of the gradient",
      "What this update does with each token: advantage × (1 − its probability). A line above: made more likely, a line below: less likely. A token that was certain is hardly pushed.",
      size,
      pushOf,
    ),
    signed(
      "advantage",
      "Advantage",
      "How much better (line above) or worse (line below) the rollout was than its group: the weight of the token in the loss. The scale's ends are the group's largest.",
      size,
      (token) => (token.mask ? token.advantage : null),
    ),
    surprise(
      "logprob",
      "Probability when sampled (logprob)",
      "How likely the model that wrote the token found it. Marked tokens were a surprise even to it.",
      (token) => token.logprob,
    ),
    surprise(
      "trainer",
      "Probability for the trainer (logprob)",
      "How likely the trainer, just before its update, found the token.",
      (token) => token.trainer_logprob,
    ),
    gap(
      "difference",
      "Trainer minus sampler",
      "The difference of the two logprobs. Far from 0, the two engines disagree, or the token is stale.",
      difference,
    ),
    gap(
      "ratio",
      "Ratio trainer / sampler",
      "The importance ratio of the loss: how much likelier the trainer finds the token than its sampler did. 1 is no difference.",
      (token) => logOf(token.ratio),
      true,
    ),
    steps(
      "version",
      "Policy version",
      "The number of training steps behind the weights that sampled the token.",
      tokens,
      (token) => token.version,
    ),
    steps(
      "age",
      "Age (staleness)",
      "Steps between the weights that sampled the token and those that were trained. 0 is fresh.",
      tokens,
      (token) => token.age,
    ),
    {
      id: "mask",
      label: "Trained or masked",
      meaning: "Masked tokens have no part in the loss. They are hatched in each colouring.",
      kind: "sequential" as const,
      bucket: (token: Token) => (token.mask ? MIDDLE : 0),
      legend: [{ bucket: MIDDLE, words: "trained" }],
    },
    {
      id: "kept",
      label: "Kept tokens",
      meaning:
        "From how many tokens of the vocabulary sampling could choose, after top-p, top-k or min-p. Marked: few were left. Unmarked: all.",
      kind: "sequential" as const,
      bucket: ({ kept }: Token) => (kept === null ? null : KEPT.filter((bound) => kept < bound).length),
      legend: between(KEPT, number),
    },
  ];
  return scales.map((scale) => ({ ...scale, isKnown: tokens.some((token) => scale.bucket(token) !== null) }));
}

export function difference(token: Token): number | null {
  return token.trainer_logprob === null || token.logprob === null ? null : token.trainer_logprob - token.logprob;
}

function surprise(id: string, label: string, meaning: string, of: (token: Token) => number | null): Made {
  return {
    id,
    label,
    meaning,
    kind: "sequential",
    bucket(token) {
      const logprob = of(token);
      return logprob === null ? null : LOG_SURE.filter((bound) => logprob < bound).length;
    },
    legend: between(SURE, percent),
  };
}

/** Entries for values that fall over `bounds`. */
function between(bounds: number[], words: (value: number) => string): Entry[] {
  return [...bounds, null].map((bound, bucket) => ({
    bucket,
    words: bound === null ? `under ${words(bounds.at(-1) ?? 0)}` : `${words(bound)} or more`,
  }));
}

function gap(id: string, label: string, meaning: string, of: (token: Token) => number | null, isRatio = false): Made {
  const words = (bound: number, sign: number) =>
    isRatio ? number(Number(Math.exp(sign * bound).toPrecision(3))) : `${sign < 0 ? "−" : "+"}${bound}`;
  return {
    id,
    label,
    meaning,
    kind: "diverging",
    bucket(token) {
      const value = of(token);
      if (value === null) return null;
      return MIDDLE + Math.sign(value) * GAPS.filter((bound) => Math.abs(value) >= bound).length;
    },
    legend: [
      ...GAPS.map((bound, n) => ({ bucket: MIDDLE - n - 1, words: `${words(bound, -1)} or less` })).reverse(),
      { bucket: MIDDLE, words: isRatio ? "about 1" : "about 0" },
      ...GAPS.map((bound, n) => ({ bucket: MIDDLE + n + 1, words: `${words(bound, 1)} or more` })),
    ],
  };
}

function logOf(ratio: number | null): number | null {
  return ratio === null || ratio <= 0 ? null : Math.log(ratio);
}

/** How strongly the gradient pushes a token: the derivative of its loss with respect to its own logit. */
export function pushOf(token: Token): number | null {
  if (!token.mask || token.advantage === null) return null;
  const logprob = token.trainer_logprob ?? token.logprob;
  return logprob === null ? null : token.advantage * (1 - Math.exp(Math.min(0, logprob)));
}

/** A scale around 0 whose ends are `most`; a value that is not 0 is at least in the first bucket. */
function signed(id: string, label: string, meaning: string, most: number, of: (token: Token) => number | null): Made {
  const size = (value: number) => Math.ceil(Math.min(1, Math.abs(value) / most - 1e-9) * 5);
  const bound = (level: number) => fixed((level / 5) * most);
  return {
    id,
    label,
    meaning,
    kind: "diverging",
    bucket(token) {
      const value = of(token);
      if (value === null) return null;
      return Math.abs(value) < most / 200 ? MIDDLE : MIDDLE + Math.sign(value) * Math.max(1, size(value));
    },
    legend: [
      ...[5, 3, 1].map((level) => ({ bucket: MIDDLE - level, words: `▼ less likely (to −${bound(level)})` })),
      { bucket: MIDDLE, words: "no push" },
      ...[1, 3, 5].map((level) => ({ bucket: MIDDLE + level, words: `▲ more likely (to +${bound(level)})` })),
    ],
  };
}

/** A scale of whole numbers: each its own bucket, as far as there are buckets. */
function steps(id: string, label: string, meaning: string, tokens: Token[], of: (token: Token) => number | null): Made {
  const values = [...new Set(tokens.map(of).filter((value) => value !== null))].sort((a, b) => a - b);
  const low = id === "age" ? 0 : (values[0] ?? 0);
  const span = Math.max((values.at(-1) ?? 0) - low, 1);
  const bucketOf = (value: number) =>
    span <= 5 ? 2 * (value - low) : Math.round(((value - low) / span) * (BUCKETS - 1));
  const legend = new Map<number, number[]>();
  for (const value of values) legend.set(bucketOf(value), [...(legend.get(bucketOf(value)) ?? []), value]);
  return {
    id,
    label,
    meaning,
    kind: "sequential",
    bucket(token) {
      const value = of(token);
      return value === null ? null : bucketOf(value);
    },
    legend: [...legend].map(([bucket, own]) => ({
      bucket,
      words: own.length > 1 ? `${number(own[0])} to ${number(own.at(-1))}` : number(own[0]),
    })),
  };
}
