// Draws the part of a timeline between two moments, and finds what lies under a point.
import { color, number, visible } from "./dom";
import { type Idle, kindOf, KINDS, type Process, type Span, type Timeline, type Track, ticks } from "./timeline_model";

const AXIS = 40;
const HEAD = 24; // a process's own row: its waits
const ROW = 22;
const GAP = 8;

/** A row of the picture: a process with its waits, or one of its tracks. */
export interface Row {
  top: number;
  height: number;
  process: Process;
  track: Track | null;
}

export interface Hit {
  row: Row;
  span: Span | null;
  idle: Idle | null;
}

export function rowsOf(data: Timeline): Row[] {
  const rows: Row[] = [];
  let top = AXIS;
  for (const process of data.processes) {
    rows.push({ top, height: HEAD, process, track: null });
    top += HEAD;
    for (const track of process.tracks) {
      rows.push({ top, height: ROW, process, track });
      top += ROW;
    }
    top += GAP;
  }
  return rows;
}

export function heightOf(rows: Row[]): number {
  const last = rows.at(-1);
  return last === undefined ? AXIS : last.top + last.height + GAP;
}

interface Colors {
  text: string;
  muted: string;
  line: string;
  edge: string;
  accent: string;
  surface: string;
  raised: string;
  kinds: string[];
}

export class Picture {
  private readonly context: CanvasRenderingContext2D;
  private readonly colors: Colors;
  private readonly widths = new Map<string, number>();
  private readonly font: string;
  private hatch: CanvasPattern | null = null;

  constructor(readonly canvas: HTMLCanvasElement) {
    const context = canvas.getContext("2d");
    if (context === null) throw new Error("This browser cannot draw on a canvas.");
    this.context = context;
    this.font = `12px ${getComputedStyle(document.body).fontFamily}`;
    const [text, muted, line, edge, accent, surface, raised] = [
      "text",
      "muted",
      "line",
      "edge",
      "accent",
      "surface",
      "raised",
    ].map((name) => color(`--${name}`)) as [string, string, string, string, string, string, string];
    this.colors = {
      text,
      muted,
      line,
      edge,
      accent,
      surface,
      raised,
      kinds: KINDS.map((_, n) => color(`--c${n + 1}`)),
    };
  }

  get width(): number {
    return this.canvas.clientWidth;
  }

  /** Draws the window; `chosen` is outlined. */
  draw(data: Timeline, rows: Row[], from: number, to: number, chosen: Hit | null): void {
    const { context, colors, canvas } = this;
    const ratio = window.devicePixelRatio || 1;
    const [width, height] = [this.width, heightOf(rows)];
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      this.hatch = null;
    }
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = this.font;
    context.textBaseline = "middle";
    const x = (ms: number) => ((ms - from) / (to - from)) * width;
    this.steps(data, from, to, x, height);
    this.axis(from, to, x, height);
    for (const row of rows) {
      if (row.track === null) this.waits(data, row, from, to, x);
      else
        for (const span of row.track.spans)
          if (span[0] + span[1] >= from && span[0] <= to) this.span(data, row, span, x);
    }
    if (chosen?.span != null) this.outline(chosen.row, chosen.span[0], chosen.span[0] + chosen.span[1], x);
    else if (chosen?.idle != null) this.outline(chosen.row, chosen.idle.from, chosen.idle.to, x);
    else if (chosen !== null) {
      context.strokeStyle = colors.accent;
      context.lineWidth = 1;
      context.strokeRect(0.5, chosen.row.top + 0.5, width - 1, chosen.row.height - 1);
    }
  }

  /** The row, and the span or wait in it, at a point of the canvas. */
  hit(data: Timeline, rows: Row[], from: number, to: number, left: number, top: number): Hit | null {
    const row = rows.find((one) => top >= one.top && top < one.top + one.height);
    if (row === undefined) return null;
    const pixel = (to - from) / this.width;
    const at = from + left * pixel;
    if (row.track === null)
      return {
        row,
        span: null,
        idle: data.idle.find((one) => one.process === row.process.name && at >= one.from && at <= one.to) ?? null,
      };
    const near = row.track.spans.filter(
      ([start, length]) => at >= start - 2 * pixel && at <= start + length + 2 * pixel,
    );
    near.sort((a, b) => a[1] - b[1]); // of nested spans, the inner one
    return { row, span: near[0] ?? null, idle: null };
  }

  private steps(data: Timeline, from: number, to: number, x: (ms: number) => number, height: number): void {
    const { context, colors } = this;
    const shown = data.steps.filter((one) => one.to >= from && one.from <= to);
    const each = ticks(0, shown.length, this.width / 40)[1] ?? 1; // of many steps, only some have room for a name
    for (const { step, from: begin, to: end } of shown) {
      const [left, right] = [x(begin), x(end)];
      if (right - left > 2 && step % 2 === 0) {
        context.fillStyle = colors.raised;
        context.fillRect(left, 0, right - left, height);
      }
      if (each > 1 && step % each !== 0) continue;
      if (each > 1) this.text(number(step), left + 2, 10, 40, colors.muted);
      else
        this.text(
          right - left > 70 ? `step ${number(step)}` : number(step),
          Math.max(left, 0) + 4,
          10,
          Math.min(right, this.width) - Math.max(left, 0) - 6,
          colors.muted,
        );
    }
  }

  private axis(from: number, to: number, x: (ms: number) => number, height: number): void {
    const { context, colors } = this;
    context.fillStyle = colors.line;
    context.fillRect(0, AXIS - 1, this.width, 1);
    for (const ms of ticks(from, to, this.width / 100)) {
      const left = Math.round(x(ms));
      context.fillStyle = colors.line;
      context.fillRect(left, 22, 1, height - 22);
      this.text(clock(ms, to - from), left + 4, 30, 90, colors.muted);
    }
  }

  private waits(data: Timeline, row: Row, from: number, to: number, x: (ms: number) => number): void {
    const { context, colors } = this;
    for (const idle of data.idle) {
      if (idle.process !== row.process.name || idle.to < from || idle.from > to) continue;
      const [left, right] = [Math.max(0, x(idle.from)), Math.min(this.width, x(idle.to))];
      context.fillStyle = this.hatched();
      context.fillRect(left, row.top + 3, right - left, row.height - 6);
      context.strokeStyle = colors.line;
      context.lineWidth = 1;
      context.strokeRect(left + 0.5, row.top + 3.5, Math.max(0, right - left - 1), row.height - 7);
      this.label(idle.why, left, right, row.top + row.height / 2);
    }
  }

  /** A text on a plain ground, so that it can be read over the hatching. */
  private label(words: string, left: number, right: number, middle: number): void {
    const shown = this.fit(visible(words), right - left - 14, 8);
    if (shown === "") return;
    this.context.fillStyle = this.colors.surface;
    this.context.fillRect(left + 4, middle - 8, this.measure(shown) + 6, 16);
    this.context.fillStyle = this.colors.muted;
    this.context.fillText(shown, left + 7, middle);
  }

  private span(data: Timeline, row: Row, [start, length, name, count]: Span, x: (ms: number) => number): void {
    const { context, colors } = this;
    const words = data.names[name] ?? "";
    const ink = colors.kinds[kindOf(words)] ?? colors.muted;
    const [left, right] = [Math.max(-2, x(start)), Math.min(this.width + 2, x(start + length))];
    const size = Math.max(1.5, right - left);
    context.fillStyle = ink;
    context.globalAlpha = size < 4 ? 0.85 : count > 1 ? 0.5 : 0.28;
    context.fillRect(left, row.top + 2, size, row.height - 4);
    context.globalAlpha = 1;
    if (size >= 4) context.fillRect(left, row.top + 2, 2, row.height - 4);
    if (count === 1 || size > 60)
      this.text(
        count > 1 ? `${number(count)} × ${words}` : words,
        Math.max(left, 0) + 6,
        row.top + row.height / 2 + 0.5,
        size - 10 + Math.min(left, 0),
        colors.text,
      );
  }

  private outline(row: Row, begin: number, end: number, x: (ms: number) => number): void {
    const { context, colors } = this;
    const [left, right] = [Math.max(1, x(begin)), Math.min(this.width - 1, x(end))];
    context.strokeStyle = colors.accent;
    context.lineWidth = 2;
    context.strokeRect(left, row.top + 1, Math.max(3, right - left), row.height - 2);
  }

  private text(words: string, left: number, middle: number, room: number, ink: string): void {
    const shown = this.fit(visible(words), room);
    if (shown === "") return;
    this.context.fillStyle = ink;
    this.context.fillText(shown, left, middle);
  }

  /** As much of the words as fits; nothing if that is too little to read. */
  private fit(words: string, room: number, fewest = 3): string {
    if (room < 12) return "";
    if (this.measure(words) <= room) return words;
    const letters = Math.floor((words.length * room) / this.measure(words)) - 1;
    return letters < fewest ? "" : `${words.slice(0, letters)}…`;
  }

  private measure(words: string): number {
    let width = this.widths.get(words);
    if (width === undefined) {
      width = this.context.measureText(words).width;
      if (this.widths.size > 5000) this.widths.clear();
      this.widths.set(words, width);
    }
    return width;
  }

  private hatched(): CanvasPattern | string {
    if (this.hatch !== null) return this.hatch;
    const tile = document.createElement("canvas");
    tile.width = tile.height = 8;
    const pen = tile.getContext("2d");
    if (pen === null) return this.colors.line;
    pen.strokeStyle = this.colors.edge;
    pen.globalAlpha = 0.55;
    pen.beginPath();
    for (const shift of [-8, 0, 8]) {
      pen.moveTo(shift, 8);
      pen.lineTo(shift + 8, 0);
    }
    pen.stroke();
    this.hatch = this.context.createPattern(tile, "repeat");
    return this.hatch ?? this.colors.line;
  }
}

/** A moment since the start, as exact as the window needs: `34.20 s`, `3:45`, `2:44:30`. */
export function clock(ms: number, window: number): string {
  if (window < 20) return `${(ms / 1000).toFixed(4)} s`;
  if (window < 20_000) return `${(ms / 1000).toFixed(window < 2000 ? 2 : 1)} s`;
  const seconds = Math.round(ms / 1000);
  if (seconds < 60) return `${seconds} s`;
  const [hours, minutes] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60];
  const pad = (value: number) => String(value).padStart(2, "0");
  return hours > 0 ? `${hours}:${pad(minutes)}:${pad(seconds % 60)}` : `${minutes}:${pad(seconds % 60)}`;
}
