// What the server says about the timeline, and what can be said of it without drawing.

/** Start and length in ms, index of the name, and how many spans were merged into this one. */
export type Span = [start: number, length: number, name: number, count: number];

export interface Track {
  name: string;
  spans: Span[];
  busy_share: number;
}

export interface Process {
  name: string;
  host: string;
  tracks: Track[];
  busy_share?: number;
  idle_s?: Record<string, number>;
}

export interface Idle {
  process: string;
  from: number;
  to: number;
  why: string;
}

export interface Step {
  step: number;
  from: number;
  to: number;
}

export interface Timeline {
  begin_unix_s: number;
  total_ms: number;
  from: number;
  to: number;
  names: string[];
  processes: Process[];
  steps: Step[];
  idle: Idle[];
}

/** Kinds of work: each has a colour; the spans' names tell them apart without it. */
export const KINDS: [words: string, meaning: string, names: RegExp][] = [
  [
    "Generating",
    "The model writes: decode in a replica, rollouts in the controller.",
    /^(decode|rollout|generate|prefill)/,
  ],
  ["Training", "The optimizer's steps.", /^(train|optimizer|forward|backward|replay)/],
  [
    "Moving weights",
    "New weights go from the trainer to the replicas.",
    /weights|^(publish|sync|pull|reset prefix|fetch to host)/,
  ],
  ["Evaluating", "Fixed problems, without training on them.", /^eval/],
  ["Saving", "Checkpoints and exports.", /checkpoint|export|restore/],
  ["Starting, other", "Processes start, models load, devices switch.", /./],
];

export function kindOf(name: string): number {
  return Math.max(
    0,
    KINDS.findIndex(([, , names]) => names.test(name)),
  );
}

/** How a process spent the window: its working share, and its waits by reason, the longest first. */
export interface Use {
  process: string;
  working: number;
  waits: { why: string; seconds: number; share: number }[];
}

export function usesOf(data: Timeline): Use[] {
  const window_s = Math.max(1e-9, (data.to - data.from) / 1000);
  return data.processes.map((process) => {
    const seconds = new Map(Object.entries(process.idle_s ?? {}));
    if (process.idle_s === undefined)
      for (const { process: name, from, to, why } of data.idle)
        if (name === process.name)
          seconds.set(why, (seconds.get(why) ?? 0) + (Math.min(to, data.to) - Math.max(from, data.from)) / 1000);
    const waits = [...seconds]
      .map(([why, s]) => ({ why, seconds: s, share: s / window_s }))
      .sort((a, b) => b.seconds - a.seconds);
    const idle = waits.reduce((sum, { share }) => sum + share, 0);
    return { process: process.name, working: process.busy_share ?? Math.max(0, 1 - idle), waits };
  });
}

/** A span with where it is. */
export interface Found {
  process: Process;
  track: Track;
  span: Span;
}

export function longest(data: Timeline, from: number, to: number, count: number): Found[] {
  const found: Found[] = [];
  for (const process of data.processes)
    for (const track of process.tracks)
      for (const span of track.spans)
        if (span[0] < to && span[0] + span[1] > from) found.push({ process, track, span });
  return found.sort((a, b) => b.span[1] - a.span[1]).slice(0, count);
}

export function stepAt(data: Timeline, ms: number): Step | undefined {
  return data.steps.find(({ from, to }) => ms >= from && ms <= to);
}

/** Round distances for an axis with at most `most` marks. */
export function ticks(from: number, to: number, most: number): number[] {
  const raw = (to - from) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(raw));
  const distances =
    raw < 1000
      ? [1, 2, 5, 10].map((size) => size * power)
      : [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400].map((s) => s * 1000);
  const distance = distances.find((size) => size >= raw) ?? Math.ceil(raw / 86400e3) * 86400e3;
  const first = Math.ceil(from / distance) * distance;
  return Array.from({ length: Math.max(0, Math.floor((to - first) / distance) + 1) }, (_, n) => first + n * distance);
}
