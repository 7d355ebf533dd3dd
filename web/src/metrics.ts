// The metrics of a run, what they mean, and those that a newcomer should see first.
import type { Ctx } from "./api";

export interface Axis {
  step: number[];
  seconds: number[];
  tokens: number[];
}

export interface Metrics {
  axes: Record<string, Axis>;
  series: Record<string, { axis: string; value: (number | null)[] }>;
}

export interface Meaning {
  name: string;
  unit: string;
  reduction: string;
  meaning: string;
  section: string;
}

export type XName = "step" | "tokens" | "seconds";

/** A metric in plain words: what it is, and how to read it. */
export interface Plain {
  label: string;
  text: string;
}

export const ESSENTIAL: Record<string, Plain> = {
  "train/reward_mean": {
    label: "Reward in training",
    text: "How well the policy did on the problems of each step, on average. It should rise. It jumps from step to step because every step has other problems.",
  },
  "evaluation/reward_mean": {
    label: "Reward in evaluation",
    text: "The same, on problems that stay the same and are not trained on. This is the curve to judge learning by.",
  },
  "trainer/entropy": {
    label: "Entropy",
    text: "How undecided the policy is about the next token. A slow fall is normal. Near 0 it tries nothing new any more; a rise together with a falling reward means that it breaks.",
  },
  "train/response_length_mean": {
    label: "Length of answers",
    text: "Tokens that the policy writes in one rollout. A sudden change often means that it found a way around the task.",
  },
  "train/groups_without_variance_share": {
    label: "Groups that teach nothing",
    text: "Share of groups whose attempts at a problem all got the same reward. Near 100 % means that problems are too easy or too hard.",
  },
  "trainer/grad_norm": {
    label: "Size of the gradient",
    text: "How strongly a step pushes the weights, before clipping. Single peaks are normal; a steady rise is a warning.",
  },
  "trainer/ratio_max": {
    label: "Largest probability ratio",
    text: "How much the trained policy differs from the one that wrote the tokens, at the worst token. 1 means no difference.",
  },
  "trainer/age_0/logprob_diff_mean": {
    label: "Disagreement of trainer and engine",
    text: "Difference of the two programs' log-probabilities for the same tokens and the same weights. It should be tiny; if not, training learns from wrong numbers.",
  },
  "policy/staleness_mean": {
    label: "Age of the trained tokens",
    text: "How many weight updates ago the trained tokens were written, on average. 0 means by the newest weights.",
  },
  "time/step_s": {
    label: "Time of a step",
    text: "Seconds from the end of one step to the end of the next.",
  },
  "tokens/generated_per_second": {
    label: "Throughput",
    text: "Tokens written for the step, divided by the time of the whole step.",
  },
  "trainer/loss": {
    label: "Loss",
    text: "What the optimizer minimizes. Unlike in pre-training it need not fall: look at the reward.",
  },
};

let catalogue: Promise<Meaning[]> | null = null;

/** The table of metrics; asked for once. */
export function meanings(ctx: Ctx): Promise<Meaning[]> {
  catalogue ??= ctx.get<Meaning[]>("/api/catalogue", {}, new AbortController().signal).catch((error: unknown) => {
    catalogue = null;
    throw error;
  });
  return catalogue;
}

/** Finds the row of a metric, whose name may belong to a family such as `train/task/*`. */
export function lookup(rows: Meaning[]): (name: string) => Meaning | null {
  const exact = new Map(rows.map((row) => [row.name, row]));
  const families = rows
    .filter((row) => row.name.includes("*"))
    .map((row) => ({ row, start: row.name.slice(0, row.name.indexOf("*")) }))
    .sort((a, b) => b.start.length - a.start.length);
  return (name) => exact.get(name) ?? families.find(({ start }) => name.startsWith(start))?.row ?? null;
}

/** The values of several runs; a run that lacks a metric lacks its series. */
export async function metricsOf(ctx: Ctx, run: number, names: string[], signal?: AbortSignal): Promise<Metrics> {
  return ctx.get<Metrics>(`/api/runs/${run}/metrics`, { names: names.join(",") }, signal);
}

/** The x values of an axis without those of rows that lack the metric. */
export function points(metrics: Metrics, name: string, x: XName): { x: number[]; y: number[] } {
  const series = metrics.series[name];
  const axis = series && metrics.axes[series.axis];
  const found = { x: [] as number[], y: [] as number[] };
  if (!series || !axis) return found;
  const xs = axis[x];
  series.value.forEach((value, i) => {
    const at = xs[i];
    if (value === null || at === undefined || at === null) return;
    found.x.push(at);
    found.y.push(value);
  });
  return found;
}

const MEAN = "evaluation/reward_mean";
const ENDS = ["evaluation/reward_ci95_low", "evaluation/reward_ci95_high"];

/** The metrics that are drawn with a metric: the ends of its 95 % interval. */
export function drawnWith(name: string): string[] {
  return name === MEAN ? ENDS : [];
}

/** The 95 % interval of each value of a metric at `xs`; empty for a metric without one. */
export function interval(metrics: Metrics, name: string, x: XName, xs: number[]): { low?: (number | null)[]; high?: (number | null)[] } {
  const [low, high] = drawnWith(name).map((end) => {
    const found = points(metrics, end, x);
    const at = new Map(found.x.map((value, i) => [value, found.y[i] ?? null]));
    return xs.map((value) => at.get(value) ?? null);
  });
  return low && high ? { low, high } : {};
}
