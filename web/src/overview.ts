// Answers at a glance: does it learn, what limits its speed, is anything wrong, how long will it take.
import type { Changed, Ctx, Params, View } from "./api";
import { Chart, type Line } from "./charts";
import { card, command, count, duration, el, empty, fill, fixed, hint, keep, key, number, percent, sentence, shares } from "./dom";
import { drawnWith, interval as intervalOf, metricsOf, points } from "./metrics";
import { PHASES } from "./now";

interface Overview {
  name: string;
  dir: string;
  kind: "train" | "eval";
  is_live: boolean;
  phase: string | null;
  version: number | null;
  is_read: boolean;
  step: number;
  num_steps: number | null;
  eta_s: number | null;
  elapsed_s: number | null;
  seconds_per_step: number | null;
  reward: { first: number | null; last: number | null } | null;
  learns: "yes" | "worse" | "unclear" | null;
  evaluations: { step: number; mean: number; low: number | null; high: number | null }[];
  tokens_per_s: number | null;
  idle: { trainer: number | null; generator: number | null } | null;
  shares_cores: boolean;
  staleness: { mean: number | null; max: number | null; cap: number | null } | null;
  failures: Record<string, number>;
  tokens: Record<"generated" | "trained" | "masked" | "discarded" | "buffered", number | null> & {
    causes: Record<string, number>;
  };
  times: { name: string; seconds: number }[];
  advice: string | null;
  summary: string[];
  found: { cause: string; what: string; fix: string }[];
  warnings: string[];
  next: string[];
}

type Tone = "good" | "warn" | "bad" | "plain";

interface Answer {
  tone: Tone;
  short: string;
  text: string[];
}

export default function view(): View {
  let ctx: Ctx;
  let chart: Chart | null = null;
  let update: () => Promise<void> = async () => undefined;
  let isBusy = false;
  let isStale = false;

  async function refresh(): Promise<void> {
    isStale = true;
    if (isBusy) return;
    isBusy = true;
    while (isStale) {
      isStale = false;
      await update().catch(() => undefined); // the header says that the connection is lost
    }
    isBusy = false;
  }

  return {
    async render(root, given) {
      ctx = given;
      if (ctx.runs.find((one) => one.run === ctx.run)?.kind === "eval") {
        const body = el("div");
        update = async () => keep(body, await ctx.get<Overview>("overview"), (data) => evaluated(data, ctx));
        await update();
        root.append(body);
        return;
      }
      const page = layout();
      chart = page.chart;
      update = async () => {
        const [data, curves] = await Promise.all([ctx.get<Overview>("overview"), curvesOf(ctx)]);
        page.show(data, curves, ctx);
      };
      const [data, curves] = await Promise.all([ctx.get<Overview>("overview"), curvesOf(ctx)]);
      root.append(page.element);
      page.show(data, curves, ctx);
    },
    onChange(changed: Changed) {
      if (changed.run === ctx.run && (changed.metrics || changed.now)) void refresh();
    },
    dispose() {
      chart?.destroy();
    },
  };
}

/** The overview of an evaluation's folder, which has no steps. */
function evaluated(data: Overview, ctx: Ctx): HTMLElement {
  const results = data.evaluations.length > 0 ? data.evaluations.map((one) => `Step ${number(one.step)}: reward ${fixed(one.mean)}${interval(one)}`) : data.summary;
  const text = "The mean reward of the rollouts of each model and temperature, with its 95 % interval: with other problems the value would probably lie in it. Two models differ clearly where their intervals do not overlap.";
  return el(
    "div",
    { class: "stack" },
    data.warnings.map((warning) => notice("warn", "Warning", warning, "")),
    card("Results", text, el("ul", { class: "sentences" }, results.map((line) => el("li", null, line)))),
    card("Look at rollouts", "What the policy wrote, attempt by attempt.", el("ul", { class: "links" }, lookAt(data, ctx))),
  );
}

const REWARDS = { train: "train/reward_mean", mean: "evaluation/reward_mean" };
const QUEUE = "train/generation/queue_s_mean";
const TURNS = "train/turns_mean";
const ROLLOUT_PHASES = { generation: "an engine writes", environment: "the environment replies", reward: "the reward is computed" };

interface Curves {
  lines: Line[];
  /** Mean seconds of a rollout by phase. */
  phases: { name: string; seconds: number }[];
}

async function curvesOf(ctx: Ctx): Promise<Curves> {
  const phaseName = (name: string): string => `train/phase_s/${name}_mean`;
  const metrics = await metricsOf(ctx, ctx.run, [...Object.values(REWARDS), ...drawnWith(REWARDS.mean), ...Object.keys(ROLLOUT_PHASES).map(phaseName), QUEUE, TURNS]);
  const mean = (name: string): number => {
    const { y } = points(metrics, name, "step");
    return y.reduce((sum, value) => sum + value, 0) / Math.max(1, y.length);
  };
  const phases = Object.entries(ROLLOUT_PHASES).map(([name, label]) => ({ name: label, seconds: mean(phaseName(name)) }));
  const [writing] = phases;
  const queued = Math.min(mean(QUEUE) * mean(TURNS), writing?.seconds ?? 0); // requests wait in the engine first
  if (writing !== undefined && queued > 0) {
    writing.seconds -= queued;
    phases.push({ name: "it waits in an engine's queue", seconds: queued });
  }
  const train = points(metrics, REWARDS.train, "step");
  const evaluation = points(metrics, REWARDS.mean, "step");
  const lines: Line[] = [];
  if (train.x.length > 0)
    lines.push({ label: "training", color: "--c2", ...train, smooth: train.x.length >= 60 ? 0.9 : 0 });
  if (evaluation.x.length > 0)
    lines.push({ label: "evaluation", color: "--c1", ...evaluation, points: true, ...intervalOf(metrics, REWARDS.mean, "step", evaluation.x) });
  return { lines, phases: phases.filter((one) => one.seconds > 0) };
}

// ---- Layout: made once; `show` fills in what has changed, so that focus and open notes stay

function layout(): {
  element: HTMLElement;
  chart: Chart;
  show: (data: Overview, curves: Curves, ctx: Ctx) => void;
} {
  const questions = {
    learns: question("Does it learn?", "A rollout is one attempt of the policy (the model in training) at a problem; its reward says how well it did. Evaluation gives the policy the same problems each time, so its reward can be compared between steps. The range after it is the 95 % interval: with other problems the value would probably lie in it."),
    speed: question("What limits its speed?", "A training step first waits for rollouts (vLLM writes answers, the environment replies, rewards are computed), then trains on them. The larger part is the one to speed up."),
    wrong: question("Is anything wrong?", "Known faults are looked for in the numbers of this run: a learning rate that is too high, rewards without differences, failing or slow environments, answers that are cut, a slow replica and others. They are looked for from step 6 on."),
    left: question("How long will it take?", "The time left is the number of steps left times the usual time of a step. Start-up and a last evaluation come on top."),
  };
  const notices = el("section", { class: "notices", "aria-label": "Findings" });
  const legend = el("p", { class: "legend" });
  const readout = el("p", { class: "readout" });
  const chart = new Chart({
    label: "Reward by step",
    height: 310,
    xName: "step",
    xText: number,
    yText: number,
    onPoint: (point) => {
      if (point === null) {
        fill(readout);
        return;
      }
      const words = shown.map((line, i) => `${line.label} ${fixed(point.values[i])}${point.from[i] == null || point.from[i] === point.x ? "" : ` (of step ${number(point.from[i])})`}`);
      fill(readout, `Step ${number(point.x)}: ${words.join(", ")}`);
    },
  });
  let shown: Line[] = [];
  const chartCard = card("Reward", "Higher is better; what the numbers mean is up to the task. Training: mean over the rollouts of a step, whose problems differ. Evaluation: mean over fixed problems, with its 95 % interval as a band.", legend, chart.element, readout);
  chartCard.classList.add("wide");
  const time = el("div");
  const phase = el("div");
  const idle = el("div");
  const links = el("ul", { class: "links" });
  const numbers = el("dl", { class: "numbers" });
  const endings = el("div");
  const tokens = el("div");
  const sentences = el("ul", { class: "sentences" });
  const sentencesCard = card("In sentences", "What the command “torchtitan-rl explain” says. The first third of the steps is compared with the last third.", sentences);
  sentencesCard.classList.add("all");
  const next = el("div", { class: "stack tight" });
  const nextCard = card("What to run next", "Commands for a terminal, in the folder from which this run was started.", next);
  const element = el(
    "div",
    { class: "stack" },
    el("section", { class: "questions", "aria-label": "In short" }, Object.values(questions).map(({ element }) => element)),
    notices,
    el(
      "div",
      { class: "overview-grid" },
      chartCard,
      card("Where the time of a step goes", "The parts of all steps so far, added up. Below: what a rollout spends its time on, on average, and the share of the time in which each part of the run had nothing to do.", time, phase, idle),
      card("Key numbers", "Of the last step or, where it says so, of the whole run.", numbers),
      el(
        "div",
        { class: "column" },
        card("Look at rollouts", "What the policy wrote, attempt by attempt: the numbers say whether it learns, the texts say what.", links),
        card("How rollouts ended", "Rollouts of the training steps. Those that failed have no reward and are not trained on.", endings),
      ),
      el("div", { class: "column" }, card("What became of the tokens", "Every token that the policy wrote in this run. They are counted, so none is lost without a cause.", tokens), nextCard),
      sentencesCard,
    ),
  );

  function show(data: Overview, { lines, phases }: Curves, ctx: Ctx): void {
    keep(questions.learns.body, learning(data), answer);
    keep(questions.speed.body, speed(data), answer);
    keep(questions.wrong.body, faults(data), answer);
    keep(questions.left.body, remaining(data), answer);
    keep(notices, [data.found, data.warnings, data.is_read], () => [
      data.is_read ? null : notice("plain", "The run's files are still being read", "The numbers change until that is done.", ""),
      data.found.map((one) => notice("warn", one.cause, one.what, one.fix)),
      data.warnings.map((text) => notice("warn", "Warning of the run", text, "")),
    ]);
    notices.hidden = data.found.length + data.warnings.length === 0 && data.is_read;
    shown = lines;
    keep(legend, lines.map((line) => line.label), () => lines.map((line) => key(line.color, line.label === "evaluation" ? "evaluation (points, with 95 % interval)" : line.smooth ? "training (smoothed; single steps faint)" : "training")));
    if (lines.length > 0) chart.set(lines);
    chart.element.hidden = lines.length === 0;
    if (lines.length === 0) keep(legend, "none", () => empty("No step has ended yet", "The curve begins with the first step. Starting the processes takes a minute or more; “Now” shows what they do."));
    keep(time, data.times, () => (data.times.length === 0 ? later() : shares(data.times.map((one) => ({ name: one.name, value: one.seconds, text: duration(one.seconds) })))));
    keep(phase, phases, () => (phases.length === 0 ? null : el("div", { class: "idle" }, el("h3", null, "How a rollout spends its time"), shares(phases.map((one) => ({ name: one.name, value: one.seconds, text: duration(one.seconds) }))))));
    keep(links, [data.step, data.kind], () => lookAt(data, ctx));
    keep(idle, [data.idle, data.shares_cores], () => idleness(data));
    keep(numbers, [data.step, data.version, data.tokens_per_s, data.staleness, data.seconds_per_step, data.elapsed_s, data.phase], () => keyNumbers(data));
    keep(endings, data.failures, () => ended(data, ctx));
    keep(tokens, data.tokens, () => fates(data));
    keep(sentences, data.summary, () => data.summary.map((text) => el("li", null, sentence(text.replaceAll("->", "→")))));
    keep(next, data.next, () => data.next.map(command));
    nextCard.hidden = data.next.length === 0;
  }
  return { element, chart, show };
}

function question(title: string, text: string): { element: HTMLElement; body: HTMLElement } {
  const body = el("div", { class: "answer" });
  const element = card(title, text, body);
  element.classList.add("question");
  return { element, body };
}

function answer({ tone, short, text }: Answer): HTMLElement[] {
  return [
    el("p", { class: `short ${tone}` }, el("span", { class: "mark", "aria-hidden": "true" }, MARKS[tone]), short),
    ...text.map((line) => el("p", { class: "detail" }, line)),
  ];
}

const MARKS: Record<Tone, string> = { good: "✓", warn: "!", bad: "✕", plain: "" };

function notice(tone: Tone, title: string, what: string, fix: string): HTMLElement {
  return el(
    "div",
    { class: `notice ${tone}` },
    el("h3", null, sentence(title)),
    el("p", null, sentence(what)),
    fix ? el("p", null, el("b", null, "Try first: "), fix) : null,
  );
}

function later(): HTMLElement {
  return el("p", { class: "muted" }, "No step has ended yet.");
}

// ---- The four answers

function learning(data: Overview): Answer {
  const [first, last] = [data.evaluations[0], data.evaluations.at(-1)];
  const text: string[] = [];
  if (first && last && first !== last)
    text.push(`Evaluation reward ${fixed(first.mean)} at step ${number(first.step)}, now ${fixed(last.mean)}${interval(last)}.`);
  else if (last) text.push(`Evaluation reward ${fixed(last.mean)}${interval(last)} at step ${number(last.step)}.`);
  if (data.reward) text.push(`Training reward ${fixed(data.reward.first)} in the first third of the steps, ${fixed(data.reward.last)} in the last.`);
  if (data.step === 0) return { tone: "plain", short: "Not yet known", text: ["No training step has ended yet.", ...text] };
  switch (data.learns) {
    case "yes":
      return { tone: "good", short: "Yes, it learns", text };
    case "worse":
      return { tone: "bad", short: "No, it gets worse", text };
    case "unclear":
      return { tone: "plain", short: data.is_live ? "No clear change yet" : "No clear change", text };
    default:
      return { tone: "plain", short: "Too early to say", text };
  }
}

function interval(one: { low: number | null; high: number | null }): string {
  return one.low === null || one.high === null ? "" : ` (${fixed(one.low)} to ${fixed(one.high)})`;
}

function speed(data: Overview): Answer {
  const total = data.times.reduce((sum, one) => sum + one.seconds, 0);
  const most = data.times.reduce<{ name: string; seconds: number } | null>((best, one) => (best === null || one.seconds > best.seconds ? one : best), null);
  if (most === null || total <= 0) return { tone: "plain", short: "Not yet known", text: ["No training step has ended yet."] };
  const text = [`${percent(most.seconds / total)} of the time of a step.`];
  if (data.advice) text.push(`${sentence(data.advice)}.`);
  else if (data.shares_cores) text.push("Trainer and engines share the same CPU cores, so an option that speeds up one slows down the other: more cores help.");
  return { tone: "plain", short: sentence(most.name), text };
}

function faults(data: Overview): Answer {
  const [first] = data.found;
  const more = data.found.length + data.warnings.length;
  if (first !== undefined) return { tone: "warn", short: sentence(first.cause), text: [more > 1 ? `The first of ${more} notes below.` : "See the note below for what to try first."] };
  if (more > 0) return { tone: "warn", short: count(more, "warning"), text: ["See below."] };
  if (data.step < 6) return { tone: "plain", short: "Nothing seen so far", text: ["Faults are looked for from step 6 on."] };
  return { tone: "good", short: "Nothing found", text: ["No known fault shows in the numbers of this run."] };
}

function remaining(data: Overview): Answer {
  const of = data.num_steps === null ? "" : ` of ${number(data.num_steps)}`;
  const text = [`Step ${number(data.step)}${of}${data.seconds_per_step === null ? "" : `, ${duration(data.seconds_per_step)} a step`}.`];
  if (!data.is_live) {
    const isDone = data.num_steps !== null && data.step >= data.num_steps;
    if (data.elapsed_s !== null) text.push(`It ran for ${duration(data.elapsed_s)}.`);
    return { tone: "plain", short: isDone ? "It is finished" : "It has stopped", text };
  }
  if (data.elapsed_s !== null) text.push(`Running for ${duration(data.elapsed_s)}.`);
  return { tone: "plain", short: data.eta_s === null ? "Not yet known" : data.eta_s < 1 ? "About to end" : `${duration(data.eta_s)} left`, text };
}

// ---- Parts

function idleness(data: Overview): HTMLElement | null {
  if (data.idle === null) return null;
  const meter = (label: string, value: number | null): HTMLElement | null =>
    value === null ? null : el("div", { class: "meter" }, el("span", null, label), el("span", { class: "track", "aria-hidden": "true" }, el("i", { style: { width: `${100 * value}%` } })), el("span", { class: "value" }, percent(value)));
  return el(
    "div",
    { class: "idle" },
    el("h3", null, "Had nothing to do"),
    meter("trainer", data.idle.trainer),
    meter("engines", data.idle.generator),
    data.shares_cores ? el("p", { class: "muted small" }, "Both share the same CPU cores: these shares do not show what limits the run.") : null,
  );
}

function keyNumbers(data: Overview): HTMLElement[] {
  const { staleness } = data;
  const rows: [string, string, string][] = [
    ["Phase", data.is_live ? (PHASES[data.phase ?? ""] ?? data.phase ?? "–").toLowerCase() : "ended", "What the run does at the moment."],
    ["Time of a step", duration(data.seconds_per_step), "The usual time from the end of one step to the end of the next."],
    ["Throughput", data.tokens_per_s === null ? "–" : `${number(data.tokens_per_s)} tokens/s`, "Tokens that the policy wrote for a step, divided by the time of the whole step."],
    ["Age of the trained tokens", staleness?.mean == null ? "–" : number(Math.round(staleness.mean * 100) / 100), "How many weight updates ago the tokens of a step were written, on average (staleness). 0: by the newest weights. Older tokens fit the trained policy less."],
    ["Oldest trained token", staleness?.cap == null ? number(staleness?.max) : `${number(staleness.max)} (${number(staleness.cap)} allowed)`, "The same for the oldest token of a step. The option schedule.staleness is the bound."],
    ["Version of the weights", number(data.version), "The number of optimizer steps that the newest weights have behind them."],
    ["Run time", duration(data.elapsed_s), "Since the start of the run."],
  ];
  return rows.map(([label, value, text]) => el("div", null, el("dt", null, label, hint(label, text)), el("dd", null, value)));
}

export const ENDINGS: Record<string, string> = {
  completed: "completed",
  max_turns: "reached the limit of turns",
  max_tokens: "reached the limit of tokens",
  step_timeout: "failed: one call of the environment took too long",
  rollout_timeout: "failed: the whole rollout took too long",
  env_error: "failed: the environment raised an error",
  generation_error: "failed: generation did not succeed",
  reward_error: "failed: the reward function raised an error",
  cancelled: "were cancelled",
};

function ended(data: Overview, ctx: Ctx): HTMLElement {
  const found = Object.entries(data.failures).filter(([, n]) => n > 0);
  const total = found.reduce((sum, [, n]) => sum + n, 0);
  if (total === 0) return el("p", { class: "muted" }, data.step === 0 ? "No step has ended yet." : "No rollout failed.");
  return el(
    "ul",
    { class: "bars" },
    found.map(([status, n]) =>
      el("li", null, el("a", { href: ctx.link("rollouts", { status }) }, ENDINGS[status] ?? status), el("span", { class: "value" }, number(n)), el("span", { class: "track", "aria-hidden": "true" }, el("i", { style: { width: `${(100 * n) / total}%` } }))),
    ),
  );
}

function lookAt(data: Overview, ctx: Ctx): HTMLElement[] {
  const isTrain = data.kind === "train";
  const split = { split: isTrain ? "train" : null };
  const step = { step: isTrain && data.step > 0 ? data.step : null };
  const found: [string, string, Params][] = [
    ["Worst rollouts", isTrain ? "of the last step, by reward" : "by reward", { ...split, ...step, sort: "reward" }],
    ["Best rollouts", isTrain ? "of the last step, by reward" : "by reward", { ...split, ...step, sort: "-reward" }],
    ["Longest rollouts", isTrain ? "of the run, by tokens" : "by tokens", { ...split, sort: "-tokens" }],
  ];
  if (isTrain) found.push(["Stale rollouts", "of the run, by the age of their tokens", { ...split, age_min: 1, sort: "-age" }]);
  return found.map(([label, what, query]) => el("li", null, el("a", { href: ctx.link("rollouts", query) }, label), el("span", { class: "muted small" }, ` ${what}`)));
}

function fates(data: Overview): HTMLElement {
  const { tokens } = data;
  if (!tokens.generated) return later();
  const causes = (kind: string): string =>
    Object.entries(tokens.causes)
      .filter(([name]) => name.startsWith(`${kind}: `))
      .map(([name, n]) => `${name.slice(kind.length + 2).replaceAll("_", " ")} ${number(n)}`)
      .join(", ");
  const parts = [
    { name: "trained on", value: tokens.trained ?? 0 },
    { name: "left out of the loss by a rule:", value: tokens.masked ?? 0, note: causes("masked") },
    { name: "thrown away:", value: tokens.discarded ?? 0, note: causes("discarded") },
    { name: "in rollouts that are not trained yet", value: tokens.buffered ?? 0 },
  ];
  return el("div", null, el("p", { class: "muted small" }, `${number(tokens.generated)} tokens written so far`), shares(parts.filter((one) => one.value > 0).map((one) => ({ ...one, text: number(one.value) }))));
}
