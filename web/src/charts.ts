// Curves on a canvas (uPlot), with a cursor that the keyboard moves too.
import uPlot from "uplot";
import { color, el, fixed } from "./dom";

export interface Line {
  label: string;
  /** A CSS variable, such as `--c1`. */
  color: string;
  x: number[];
  y: (number | null)[];
  /** Lengths of strokes and gaps, so that lines differ in more than colour. */
  dash?: number[];
  /** Draws points, for values that are far apart. */
  points?: boolean;
  /** The ends of an interval around each value. */
  low?: (number | null)[];
  high?: (number | null)[];
  /** 0 to 0.99: the weight of the past in the shown mean; the values themselves are drawn faintly. */
  smooth?: number;
}

export interface ChartOptions {
  label: string;
  height: number;
  xName: string;
  xText: (value: number) => string;
  yText: (value: number) => string;
  /** Called when the cursor moves; null: no point. */
  onPoint?: (point: Point | null) => void;
}

/** The values of all lines at a place. `from` is where each was measured: at the place or before it. */
export interface Point {
  x: number;
  values: (number | null)[];
  from: (number | null)[];
}

/** A chart in `element`. */
export class Chart {
  readonly element: HTMLElement;
  private plot: uPlot | null = null;
  private lines: Line[] = [];
  private data: uPlot.AlignedData = [[]];
  private main: number[] = []; // the index in `data` of each line's values
  private zoom: [number, number] | null = null;
  private readonly sizes: ResizeObserver;

  constructor(private readonly options: ChartOptions) {
    this.element = el("div", {
      class: "chart",
      tabindex: "0",
      role: "slider",
      "aria-label": `${options.label}. Arrow keys move through the points, plus and minus zoom, 0 shows all.`,
      "aria-valuemin": "0",
      "aria-valuemax": "0",
      "aria-valuenow": "0",
      "aria-valuetext": "no point chosen",
      style: { height: `${options.height}px` },
    });
    this.element.addEventListener("keydown", (event) => this.onKey(event));
    this.element.addEventListener("blur", () => this.plot?.setCursor({ left: -10, top: -10 }));
    this.sizes = new ResizeObserver(() => {
      const width = this.element.clientWidth;
      if (width > 0 && this.plot !== null && width !== this.plot.width)
        this.plot.setSize({ width, height: this.options.height });
    });
    this.sizes.observe(this.element);
  }

  /** Draws lines, in place of those drawn before. */
  set(lines: Line[]): void {
    const isSame =
      this.plot !== null &&
      lines.length === this.lines.length &&
      lines.every((line, i) => sameShape(line, this.lines[i]));
    this.lines = lines;
    this.align();
    this.element.setAttribute("aria-valuemax", String(Math.max(0, this.xs.length - 1)));
    if (isSame && this.plot !== null) {
      this.plot.setData(this.data, this.zoom === null);
      return;
    }
    this.plot?.destroy();
    this.plot = new uPlot(this.settings(), this.data, this.element);
  }

  destroy(): void {
    this.sizes.disconnect();
    this.plot?.destroy();
    this.plot = null;
  }

  private get xs(): number[] {
    return this.data[0] as number[];
  }

  /** Puts all lines on one x axis, with null where a line has no value. */
  private align(): void {
    const xs = [...new Set(this.lines.flatMap((line) => line.x))].sort((a, b) => a - b);
    const place = new Map(xs.map((x, i) => [x, i]));
    const spread = (line: Line, values: (number | null)[]): (number | null)[] => {
      const found = new Array<number | null>(xs.length).fill(null);
      line.x.forEach((x, i) => (found[place.get(x) ?? 0] = values[i] ?? null));
      return found;
    };
    const columns: (number | null)[][] = [];
    this.main = [];
    for (const line of this.lines) {
      if (line.low && line.high) columns.push(spread(line, line.high), spread(line, line.low));
      if (line.smooth) columns.push(spread(line, line.y));
      this.main.push(columns.length + 1);
      columns.push(spread(line, line.smooth ? smoothed(line.y, line.smooth) : line.y));
    }
    this.data = [xs, ...columns] as uPlot.AlignedData;
  }

  private settings(): uPlot.Options {
    const series: uPlot.Series[] = [{}];
    const bands: uPlot.Band[] = [];
    for (const line of this.lines) {
      const stroke = color(line.color);
      const faint = color(line.color).replace(/^rgb\((.*)\)$/, "rgba($1, 0.18)");
      const hidden = { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
      if (line.low && line.high) {
        series.push({ ...hidden }, { ...hidden });
        bands.push({ series: [series.length - 2, series.length - 1], fill: faint });
      }
      if (line.smooth) series.push({ stroke: color(line.color).replace(/^rgb\((.*)\)$/, "rgba($1, 0.35)"), width: 1, points: { show: false }, spanGaps: true });
      series.push({
        stroke,
        width: 1.75,
        dash: line.dash,
        spanGaps: true,
        points: line.points || line.x.length === 1 ? { show: true, size: 7, fill: stroke, stroke: color("--surface"), width: 1.5 } : { show: false },
      });
    }
    const text = color("--muted");
    const grid = { stroke: color("--line"), width: 1 };
    const font = "11px system-ui, sans-serif";
    const axis = { stroke: text, grid, ticks: { show: false }, font };
    const { xText, yText } = this.options;
    return {
      width: Math.max(80, this.element.clientWidth),
      height: this.options.height,
      legend: { show: false },
      padding: [8, 18, 0, 0],
      cursor: { y: false, points: { size: 7 }, drag: { x: true, y: false } },
      scales: { x: { time: false, range: (_, min, max) => this.zoom ?? (min === max ? [min - 1, max + 1] : [min, max]) }, y: { range: (_, min, max) => yRange(min, max) } },
      series,
      bands,
      axes: [
        { ...axis, size: 24, gap: 4, space: 60, values: (_, splits) => splits.map((v) => xText(v)), incrs: undefined },
        { ...axis, gap: 6, space: 30, values: (_, splits) => even(splits, yText), size: (_, values) => 14 + 6.2 * Math.max(2, ...(values ?? []).map((v) => v.length)) },
      ],
      hooks: {
        setCursor: [(u) => this.tell(u.cursor.idx ?? null)],
        setSelect: [(u) => {
          if (u.select.width > 0) this.zoomTo(u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x"));
        }],
        ready: [(u) => u.over.addEventListener("dblclick", () => this.zoomTo(null, null))],
      },
    };
  }

  private tell(index: number | null): void {
    const x = index === null ? undefined : this.xs[index];
    if (index === null || x === undefined) {
      this.options.onPoint?.(null);
      return;
    }
    const places = this.main.map((column) => nearest(this.data[column] as (number | null)[], index));
    const values = this.main.map((column, i) => this.data[column]?.[places[i] ?? -1] ?? null);
    this.element.setAttribute("aria-valuenow", String(index));
    const words = this.lines.map((line, i) => {
      const value = values[i];
      return `${line.label} ${value === null || value === undefined ? "no value" : this.options.yText(value)}`;
    });
    this.element.setAttribute("aria-valuetext", `${this.options.xName} ${this.options.xText(x)}: ${words.join(", ")}`);
    this.options.onPoint?.({ x, values, from: places.map((place) => (place === null ? null : (this.xs[place] ?? null))) });
  }

  private zoomTo(from: number | null, to: number | null): void {
    this.zoom = from === null || to === null ? null : [from, to];
    this.plot?.setData(this.data, true);
    this.plot?.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  }

  private onKey(event: KeyboardEvent): void {
    const plot = this.plot;
    const last = this.xs.length - 1;
    if (plot === null || last < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    const at = plot.cursor.idx ?? null;
    const page = Math.max(1, Math.round(last / 10));
    const moves: Record<string, number> = {
      ArrowRight: at === null ? 0 : at + 1,
      ArrowUp: at === null ? 0 : at + 1,
      ArrowLeft: at === null ? last : at - 1,
      ArrowDown: at === null ? last : at - 1,
      PageUp: (at ?? 0) + page,
      PageDown: (at ?? last) - page,
      Home: 0,
      End: last,
    };
    const move = moves[event.key];
    if (move !== undefined) {
      const index = Math.max(0, Math.min(last, move));
      const x = this.xs[index] ?? 0;
      if (this.zoom !== null && (x < this.zoom[0] || x > this.zoom[1])) this.zoomTo(null, null);
      plot.setCursor({ left: plot.valToPos(x, "x"), top: 0 });
    } else if (event.key === "+" || event.key === "=" || event.key === "-") {
      const [from, to] = this.zoom ?? [this.xs[0] ?? 0, this.xs[last] ?? 0];
      const middle = this.xs[at ?? Math.round(last / 2)] ?? from;
      const half = ((to - from) / 2) * (event.key === "-" ? 2 : 0.5);
      const isAll = half * 2 >= (this.xs[last] ?? 0) - (this.xs[0] ?? 0);
      if (isAll) this.zoomTo(null, null);
      else this.zoomTo(middle - half, middle + half);
      queueMicrotask(() => plot.setCursor({ left: plot.valToPos(middle, "x"), top: 0 })); // once the scale is set
    } else if (event.key === "0" || event.key === "Escape") {
      this.zoomTo(null, null);
    } else {
      return;
    }
    event.preventDefault();
  }
}

function sameShape(a: Line, b: Line | undefined): boolean {
  return (
    b !== undefined && a.label === b.label && a.color === b.color && Boolean(a.smooth) === Boolean(b.smooth) && Boolean(a.low) === Boolean(b.low) && a.x.length > 1 === b.x.length > 1
  );
}

/** The words of an axis: as many decimals as the steps between them need. */
function even(splits: number[], text: (value: number) => string): string[] {
  const step = (splits[1] ?? 0) - (splits[0] ?? 0);
  const largest = Math.max(...splits.map(Math.abs));
  if (step <= 0 || largest < 1e-3 || largest >= 1000) return splits.map(text);
  let decimals = 0;
  while (decimals < 9 && Math.abs(Math.round(step * 10 ** decimals) / (step * 10 ** decimals) - 1) > 1e-3) decimals += 1;
  return splits.map((value) => (Math.abs(value) < step / 2 ? "0" : fixed(value, decimals)));
}

/** A little more than the values take; a constant gets a scale around it. */
function yRange(min: number | null, max: number | null): [number, number] {
  if (min === null || max === null) return [0, 1];
  if (min === max) return min === 0 ? [0, 1] : [Math.min(0, 2 * min), Math.max(0, 2 * max)];
  const pad = (max - min) * 0.08;
  const low = min - pad;
  return [min >= 0 && low < 0 ? 0 : low, max + pad];
}

/** The index of the value at a place or before it; none outside of the line. */
function nearest(values: (number | null)[], index: number): number | null {
  if (values.slice(index).every((value) => value === null)) return null;
  for (let i = index; i >= 0; i -= 1) if (values[i] !== null && values[i] !== undefined) return i;
  return null;
}

/** The exponential mean of a series, without the pull of its start. */
export function smoothed(values: (number | null)[], weight: number): (number | null)[] {
  let sum = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}
