// What runs at this moment, what it waits for, and how busy the engines are.
import type { Changed, Ctx, View } from "./api";
import { card, count, duration, el, empty, fill, keep, number, percent, scrollBox, sentence, shares } from "./dom";

interface Now {
  is_live: boolean;
  at_unix_s: number | null;
  phase: string | null;
  step: number;
  num_steps: number | null;
  waits: { name: string; seconds: number; details: string }[];
  chain: string;
  rollouts: {
    total: number;
    by_phase: Record<string, number>;
    shown: { rollout_id: string; turn: number | null; phase: string; detail: string | null; seconds: number }[];
  };
  replicas: {
    name: string;
    state: string;
    version: number | null;
    outstanding_tokens: number | null;
    running?: number;
    waiting?: number;
    kv_use?: number;
    tokens_per_s?: number;
  }[];
  groups: { waiting: number; running: number; finished: number; batched: number; capacity: number } | null;
  evaluation: { version: number; done: number; total: number } | null;
}

export const PHASES: Record<string, string> = {
  start: "Starting processes",
  restore: "Restoring the checkpoint",
  rollout: "Waiting for rollouts",
  train: "Training",
  publish: "Publishing new weights",
  sync: "Loading new weights into the engines",
  switch: "Switching the devices",
  checkpoint: "Saving a checkpoint",
  evaluation: "Evaluating",
  export: "Exporting the policy",
};

export default function view(): View {
  let ctx: Ctx;
  let update: () => Promise<void> = async () => undefined;
  let isBusy = false;
  let isPaused = false;
  let timer = 0;

  async function refresh(): Promise<void> {
    if (isBusy || isPaused) return;
    isBusy = true;
    await update().catch(() => undefined); // the header says that the connection is lost
    isBusy = false;
  }

  return {
    async render(root, given) {
      ctx = given;
      const pause = el("button", { type: "button", "aria-pressed": "false" }, "Pause updates");
      pause.addEventListener("click", () => {
        isPaused = !isPaused;
        pause.setAttribute("aria-pressed", String(isPaused));
        void refresh();
      });
      const page = layout(ctx, pause);
      update = async () => page.show(await ctx.get<Now>("now"));
      await update();
      root.append(page.element);
      timer = window.setInterval(() => {
        if (!isPaused) page.age();
      }, 1000);
    },
    onChange(changed: Changed) {
      if (changed.run === ctx.run && (changed.now || changed.metrics)) void refresh();
    },
    dispose() {
      window.clearInterval(timer);
    },
  };
}

function layout(ctx: Ctx, pause: HTMLElement): { element: HTMLElement; show: (now: Now) => void; age: () => void } {
  const title = el("h2", { class: "now-phase" });
  const since = el("p", { class: "muted" });
  const waits = el("div");
  const chain = el("pre", { class: "chain" });
  const report = el("details", { class: "data" }, el("summary", null, "As the watchdog reports it"), chain);
  const groups = el("div");
  const phases = el("div");
  const replicas = el("div");
  const rollouts = el("div");
  const full = el(
    "div",
    { class: "stack" },
    el("div", { class: "row between" }, el("div", null, title, since), pause),
    el(
      "div",
      { class: "now-grid" },
      card("Who waits for what", "Each loop of the run that waits says what it waits for, and since when. If nothing moves for long, the watchdog prints this list, and at last ends the run.", waits, report),
      card("Groups in the work buffer", "A group is the set of attempts at one problem. Groups wait to be started, run, are finished, and are then trained on as part of a batch. The buffer's size bounds how old the trained tokens get.", groups),
      card("What the running rollouts do", "A rollout is one attempt of the policy at a problem. It alternates between writing (generation) and the reply of its environment, and at last gets its reward.", phases),
    ),
    card("Engines", "A replica is one vLLM engine, which writes tokens. Its version is that of its weights; its memory for prompts (KV cache) limits how many requests run at once. Requests that wait have no room yet. Tokens to write: how many the requests given to it may still write at most.", replicas),
    card("Running rollouts", "Those that have been in their present phase for longest come first.", rollouts),
  );
  const none = el("div");
  const element = el("div", null, none, full);
  let at: number | null = null;

  function age(): void {
    fill(since, at === null ? "" : `as of ${duration(Math.max(0, Math.round(Date.now() / 1000 - at)))} ago`);
  }

  function show(now: Now): void {
    const isEmpty = !now.is_live;
    full.hidden = isEmpty;
    none.hidden = !isEmpty;
    if (isEmpty) {
      keep(none, now.step, () => [
        empty("This run is not running", "Here you see what each rollout, engine and group does while a run is going on. What this run did is in the other views."),
        el("p", { class: "centered" }, el("a", { href: ctx.link("timeline") }, "Timeline: what each process did and when")),
      ]);
      return;
    }
    at = now.at_unix_s;
    const of = now.num_steps === null ? "" : ` of ${number(now.num_steps)}`;
    const phase = now.phase === null ? "Running" : (PHASES[now.phase] ?? sentence(now.phase));
    keep(title, [phase, now.step], () => [phase, el("span", { class: "muted" }, ` · ${number(now.step)}${of} steps done`)]);
    age();
    keep(waits, now.waits, () => waiting(now));
    fill(chain, now.chain);
    report.hidden = now.chain === "";
    keep(groups, [now.groups, now.evaluation], () => buffer(now));
    keep(phases, now.rollouts.by_phase, () => rolloutPhases(now));
    keep(replicas, now.replicas, () => engines(now));
    keep(rollouts, now.rollouts.shown, () => running(now));
  }
  return { element, show, age };
}

function waiting(now: Now): HTMLElement {
  if (now.waits.length === 0) return el("p", { class: "muted" }, "Nothing waits at the moment.");
  const byName = new Map<string, Now["waits"]>();
  for (const one of [...now.waits].sort((a, b) => b.seconds - a.seconds)) byName.set(one.name, [...(byName.get(one.name) ?? []), one]);
  return el(
    "ul",
    { class: "waits" },
    [...byName].map(([name, waits]) => {
      const details = [waits[0]?.details, waits.length > 1 ? `and ${number(waits.length - 1)} more` : ""].filter(Boolean).join("; ");
      return el("li", null, el("span", null, sentence(name)), el("span", { class: "value" }, duration(waits[0]?.seconds)), details ? el("span", { class: "muted small" }, details) : null);
    }),
  );
}

function buffer(now: Now): HTMLElement {
  const { groups, evaluation } = now;
  const parts: HTMLElement[] = [];
  if (groups !== null) {
    const used = groups.waiting + groups.running + groups.finished + groups.batched;
    parts.push(
      el("p", { class: "muted small" }, `${number(used)} of ${number(groups.capacity)} places taken`),
      shares(
        [
          { name: "wait to be started", value: groups.waiting, color: "--c5" },
          { name: "running", value: groups.running, color: "--c1" },
          { name: "finished, ready for a batch", value: groups.finished, color: "--c3" },
          { name: "in the batch being trained", value: groups.batched, color: "--c2" },
          { name: "free places", value: Math.max(0, groups.capacity - used), color: "--line" },
        ].map((one) => ({ ...one, text: number(one.value) })),
        false,
      ),
    );
  }
  if (evaluation !== null) parts.push(el("p", { class: "muted small" }, `An evaluation of version ${number(evaluation.version)} runs alongside: ${number(evaluation.done)} of ${count(evaluation.total, "rollout")} done.`));
  if (parts.length === 0) parts.push(el("p", { class: "muted" }, "No groups yet."));
  return el("div", null, parts);
}

const ROLLOUT_PHASES: Record<string, string> = {
  generation: "an engine writes, or the request waits in its queue",
  environment: "wait for their environment",
  reward: "wait for their reward",
};

function rolloutPhases(now: Now): HTMLElement {
  const { total, by_phase } = now.rollouts;
  if (total === 0) return el("p", { class: "muted" }, "No rollout runs at the moment.");
  const parts = Object.entries(by_phase).map(([name, value]) => ({ name: ROLLOUT_PHASES[name] ?? name.replaceAll("_", " "), value, text: number(value) }));
  return el("div", null, el("p", { class: "muted small" }, count(total, "rollout")), shares(parts, false));
}

function engines(now: Now): HTMLElement {
  if (now.replicas.length === 0) return el("p", { class: "muted" }, "No engine has reported yet.");
  const newest = Math.max(...now.replicas.map((one) => one.version ?? 0));
  return table(
    "Engines",
    ["Engine", "State", "Version", "Running", "Waiting", "Tokens to write", "KV cache in use", "Tokens/s"],
    [false, false, true, true, true, true, true, true],
    now.replicas.map((one) => [
      one.name,
      el("span", { class: one.state === "dead" || one.state === "suspect" ? "bad" : "" }, one.state),
      one.version === null ? "–" : one.version < newest ? `${number(one.version)} (${number(newest - one.version)} old)` : number(one.version),
      number(one.running),
      number(one.waiting),
      number(one.outstanding_tokens),
      one.kv_use === undefined ? "–" : el("span", { class: "in-cell" }, el("span", { class: "track", "aria-hidden": "true" }, el("i", { style: { width: `${100 * Math.min(1, one.kv_use)}%` } })), el("span", { class: "value" }, percent(one.kv_use))),
      number(one.tokens_per_s),
    ]),
  );
}

function running(now: Now): HTMLElement {
  const { shown, total } = now.rollouts;
  if (shown.length === 0) return el("p", { class: "muted" }, "No rollout runs at the moment.");
  const rows = [...shown].sort((a, b) => b.seconds - a.seconds);
  return el(
    "div",
    null,
    total > rows.length ? el("p", { class: "muted small" }, `${number(rows.length)} of ${number(total)}`) : null,
    table(
      "Running rollouts",
      ["Rollout", "Turn", "Phase", "What it waits for", "For"],
      [false, true, false, false, true],
      rows.map((one) => [el("code", null, one.rollout_id), number(one.turn), one.phase, one.detail ?? "", duration(one.seconds)]),
    ),
  );
}

function table(label: string, heads: string[], isNumber: boolean[], rows: (Node | string)[][]): HTMLElement {
  return scrollBox(
    label,
    el(
      "table",
      null,
      el("thead", null, el("tr", null, heads.map((text, i) => el("th", { scope: "col", class: isNumber[i] ? "num" : null }, text)))),
      el("tbody", null, rows.map((row) => el("tr", null, row.map((cell, i) => el("td", { class: isNumber[i] ? "num" : null }, cell))))),
    ),
  );
}
