// The view of the timeline: all processes on one line of time, who works, who waits and for what.
import type { Ctx, View } from "./api";
import { debounce, duration, el, empty, fill, number, percent } from "./dom";
import { clock, heightOf, type Hit, Picture, type Row, rowsOf } from "./timeline_canvas";
import { KINDS, type Span, stepAt, type Timeline } from "./timeline_model";
import { nameOf, spansTable, usesList, waitsTable } from "./timeline_tables";

const SHORTEST_MS = 0.05; // window
const MANY_STEPS = 40;
const SHOWN_STEPS = 20; // at first, of many

export default function view(): View {
  let panel: TimelinePanel | null = null;
  return {
    async render(root, ctx) {
      panel = new TimelinePanel(ctx);
      await panel.render(root);
    },
    onChange(changed) {
      if (changed.trace) panel?.update(changed.run);
    },
    dispose() {
      panel?.dispose();
    },
  };
}

class TimelinePanel {
  private data: Timeline | null = null;
  private rows: Row[] = [];
  private from = 0;
  private to = 1;
  private chosen: Hit | null = null;
  private picture: Picture | null = null;
  private asked = 0;
  private frame = 0;
  private readonly canvas = el("canvas", { class: "spans", "aria-hidden": "true" });
  private readonly labels = el("ul", { class: "track-labels", "aria-hidden": "true" });
  private readonly details = el("div", { class: "span-details", role: "status" });
  private readonly uses = el("div", { class: "uses" });
  private readonly tables = el("div", { class: "span-tables" });
  private readonly window = el("span", { class: "muted small", role: "status" });
  private readonly stage: HTMLElement;
  private readonly resized = new ResizeObserver(() => this.redraw());
  // Also for the address: browsers refuse many changes of it in short time.
  private readonly refresh = debounce(() => {
    if (this.ctx.signal.aborted) return;
    this.ctx.replaceQuery(this.ctx.query);
    void this.load().catch(() => undefined); // the header says that the server is lost
  }, 150);

  constructor(private readonly ctx: Ctx) {
    this.stage = el(
      "div",
      {
        class: "stage",
        tabindex: 0,
        role: "application",
        "aria-roledescription": "timeline",
        "aria-label": "Timeline of all processes",
        "aria-describedby": "timeline-keys",
        on: { keydown: (event: KeyboardEvent) => this.key(event) },
      },
      this.canvas,
    );
    this.listen();
  }

  async render(root: HTMLElement): Promise<void> {
    const query = this.ctx.query;
    const first = await this.ask(query.get("from"), query.get("to"));
    if (first.processes.length === 0) {
      root.append(
        empty("No trace yet", "The processes of a run write when they are busy. Nothing was recorded so far."),
      );
      return;
    }
    this.data = first;
    root.append(
      el(
        "section",
        { class: "card", "aria-labelledby": "uses-title" },
        el("h2", { id: "uses-title" }, "Who works, who waits"),
        this.uses,
      ),
      this.tools(),
      el("div", { class: "timeline" }, this.labels, this.stage),
      this.details,
      this.keys(),
      this.tables,
    );
    this.picture = new Picture(this.canvas);
    this.resized.observe(this.stage);
    const [from, to] = this.firstWindow(first);
    this.describe(null);
    if (from === first.from && to === first.to) this.accept(first, from, to);
    else {
      this.set(from, to, false);
      await this.load();
    }
  }

  /** Shows what came since, if the end of the run is in the window. */
  update(run: number): void {
    if (run === this.ctx.run && this.data !== null && this.to >= this.data.total_ms - 1) this.refresh();
  }

  dispose(): void {
    cancelAnimationFrame(this.frame);
    this.resized.disconnect();
  }

  /** The step or the window of the address, else the steps, without the start; of many, the last. */
  private firstWindow(data: Timeline): [number, number] {
    const { query } = this.ctx;
    if (query.has("from") || query.has("to")) return [data.from, data.to];
    const wanted = query.get("step");
    const step = wanted === null ? undefined : data.steps.find((one) => one.step === Number(wanted));
    if (step !== undefined) {
      const room = (step.to - step.from) * 0.1;
      return [Math.max(0, step.from - room), step.to + room];
    }
    const first = data.steps.length > MANY_STEPS ? data.steps.at(-SHOWN_STEPS) : data.steps[0];
    return [first?.from ?? data.from, data.total_ms];
  }

  private ask(from: string | number | null, to: string | number | null): Promise<Timeline> {
    const width = Math.max(300, this.canvas.clientWidth || 1000);
    return this.ctx.get<Timeline>("timeline", { from, to, width });
  }

  private async load(): Promise<void> {
    this.asked += 1;
    const mine = this.asked;
    const isLive = this.data !== null && this.to >= this.data.total_ms;
    const data = await this.ask(this.from.toFixed(3), isLive ? null : this.to.toFixed(3));
    if (mine === this.asked) this.accept(data, this.from, isLive ? data.total_ms : this.to);
  }

  /** Takes an answer over; the window may be smaller than the answer (in a report it always holds all). */
  private accept(data: Timeline, from: number, to: number): void {
    const chosen = this.chosen;
    this.data = data;
    this.rows = rowsOf(data);
    this.from = from;
    this.to = to;
    if (chosen !== null) {
      const row = this.rows.find(
        (one) => one.process.name === chosen.row.process.name && one.track?.name === chosen.row.track?.name,
      );
      this.chosen = row === undefined ? null : { ...chosen, row };
    }
    this.showLabels();
    const show = (begin: number, end: number) => this.goTo(begin, end);
    fill(this.uses, usesList(data));
    fill(this.tables, waitsTable(data, from, to, show), spansTable(data, from, to, show));
    this.redraw();
  }

  private set(from: number, to: number, isKept = true): void {
    const end = this.data?.total_ms ?? to;
    const size = Math.min(Math.max(to - from, SHORTEST_MS), end);
    this.from = Math.max(0, Math.min(from, end - size));
    this.to = this.from + size;
    this.redraw();
    if (!isKept) return;
    this.ctx.query.delete("step");
    this.ctx.query.set("from", String(Math.round(this.from * 10) / 10));
    this.ctx.query.set("to", String(Math.round(this.to * 10) / 10));
    this.refresh();
  }

  private zoom(factor: number, around = (this.from + this.to) / 2): void {
    this.set(around - (around - this.from) * factor, around + (this.to - around) * factor);
  }

  private pan(share: number): void {
    const by = (this.to - this.from) * share;
    this.set(this.from + by, this.to + by);
  }

  private redraw(): void {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => {
      if (this.data === null) return;
      this.canvas.style.setProperty("height", `${heightOf(this.rows)}px`);
      this.picture?.draw(this.data, this.rows, this.from, this.to, this.chosen);
      const size = this.to - this.from;
      this.window.textContent = `${clock(this.from, size)} to ${clock(this.to, size)} after the start, ${duration(size / 1000)}`;
    });
  }

  // ---- Mouse and keys

  private listen(): void {
    const { canvas } = this;
    let drag: { x: number; from: number; to: number; isMoved: boolean } | null = null;
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      drag = { x: event.clientX, from: this.from, to: this.to, isMoved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (drag === null) {
        const hit = this.hitAt(event);
        this.describe(hit?.span || hit?.idle ? hit : this.chosen, false);
        return;
      }
      const by = ((drag.x - event.clientX) * (drag.to - drag.from)) / canvas.clientWidth;
      if (Math.abs(drag.x - event.clientX) > 3) drag.isMoved = true;
      if (drag.isMoved) this.set(drag.from + by, drag.to + by);
    });
    const drop = (event: PointerEvent) => {
      if (drag !== null && !drag.isMoved) this.choose(this.hitAt(event));
      drag = null;
    };
    canvas.addEventListener("pointerup", drop);
    canvas.addEventListener("pointercancel", () => (drag = null));
    canvas.addEventListener("pointerleave", () => this.describe(this.chosen, false));
    canvas.addEventListener("dblclick", (event) => {
      const hit = this.hitAt(event);
      if (hit?.span != null) this.zoomTo(hit.span[0], hit.span[0] + hit.span[1]);
      else if (hit?.idle != null) this.zoomTo(hit.idle.from, hit.idle.to);
    });
    canvas.addEventListener(
      "wheel",
      (event) => {
        const sideways = event.shiftKey ? event.deltaY : event.deltaX;
        if (event.ctrlKey || event.metaKey)
          this.zoom(
            Math.exp(event.deltaY * 0.002),
            this.from + (event.offsetX / canvas.clientWidth) * (this.to - this.from),
          );
        else if (Math.abs(sideways) > Math.abs(event.shiftKey ? 0 : event.deltaY))
          this.pan(sideways / canvas.clientWidth);
        else return; // scrolls the page
        event.preventDefault();
      },
      { passive: false },
    );
  }

  private hitAt(event: MouseEvent): Hit | null {
    if (this.data === null || this.picture === null) return null;
    return this.picture.hit(this.data, this.rows, this.from, this.to, event.offsetX, event.offsetY);
  }

  private key(event: KeyboardEvent): void {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const actions: Record<string, () => void> = {
      ArrowLeft: () => (event.shiftKey ? this.next(-1) : this.pan(-0.2)),
      ArrowRight: () => (event.shiftKey ? this.next(1) : this.pan(0.2)),
      ",": () => this.next(-1),
      ".": () => this.next(1),
      ArrowUp: () => this.row(-1),
      ArrowDown: () => this.row(1),
      "+": () => this.zoom(0.6),
      "=": () => this.zoom(0.6),
      "-": () => this.zoom(1 / 0.6),
      "0": () => this.all(),
      Home: () => this.set(0, this.to - this.from),
      End: () => this.set((this.data?.total_ms ?? 0) - (this.to - this.from), this.data?.total_ms ?? 0),
      Enter: () => this.zoomToChosen(),
      Escape: () => this.choose(null),
    };
    const action = actions[event.key];
    if (action === undefined) return;
    event.preventDefault();
    action();
  }

  /** Goes to the next row up or down that has something in the window. */
  private row(by: number): void {
    const at =
      this.chosen === null ? (by > 0 ? -1 : this.rows.length) : this.rows.findIndex((row) => row === this.chosen?.row);
    for (let next = at + by; next >= 0 && next < this.rows.length; next += by) {
      const row = this.rows[next];
      const hit = row === undefined ? null : this.firstOf(row, this.momentOf(this.chosen));
      if (hit?.span == null && hit?.idle == null) continue;
      this.choose(hit);
      return;
    }
  }

  private momentOf(hit: Hit | null): number {
    return Math.max(this.from, hit?.span?.[0] ?? hit?.idle?.from ?? this.from);
  }

  /** The span or wait of a row at or after a moment. */
  private firstOf(row: Row, moment: number): Hit {
    const inside = (begin: number, end: number) => end > this.from && begin < this.to;
    if (row.track === null) {
      const own = (this.data?.idle ?? []).filter((one) => one.process === row.process.name && inside(one.from, one.to));
      return { row, span: null, idle: own.find((one) => one.to > moment) ?? own.at(-1) ?? null };
    }
    const own = row.track.spans.filter(([start, length]) => inside(start, start + length));
    return { row, idle: null, span: own.find(([start, length]) => start + length > moment) ?? own.at(-1) ?? null };
  }

  /** Goes to the next or the previous span or wait of the chosen row. */
  private next(by: 1 | -1): void {
    const { chosen } = this;
    if (chosen === null) return this.row(1);
    const spans: { at: number; hit: Hit }[] =
      chosen.row.track === null
        ? (this.data?.idle ?? [])
            .filter((one) => one.process === chosen.row.process.name)
            .map((idle) => ({ at: idle.from, hit: { row: chosen.row, span: null, idle } }))
        : chosen.row.track.spans.map((span) => ({ at: span[0], hit: { row: chosen.row, span, idle: null } }));
    const now = chosen.span?.[0] ?? chosen.idle?.from ?? this.from;
    const other = by > 0 ? spans.find(({ at }) => at > now) : spans.findLast(({ at }) => at < now);
    if (other === undefined) return;
    this.choose(other.hit);
    if (other.at < this.from || other.at > this.to)
      this.set(other.at - (this.to - this.from) / 2, other.at + (this.to - this.from) / 2);
  }

  private choose(hit: Hit | null): void {
    this.chosen = hit;
    this.describe(hit);
    this.redraw();
  }

  private zoomToChosen(): void {
    const { chosen } = this;
    if (chosen?.span != null) this.zoomTo(chosen.span[0], chosen.span[0] + chosen.span[1]);
    else if (chosen?.idle != null) this.zoomTo(chosen.idle.from, chosen.idle.to);
  }

  private zoomTo(from: number, to: number): void {
    const room = Math.max((to - from) * 0.25, SHORTEST_MS);
    this.set(from - room, to + room);
  }

  private goTo(from: number, to: number): void {
    this.zoomTo(from, to);
    this.stage.scrollIntoView({ block: "center" });
    this.stage.focus({ preventScroll: true });
  }

  private all(): void {
    this.set(0, this.data?.total_ms ?? 1);
  }

  // ---- What stands around the picture

  private tools(): HTMLElement {
    const button = (words: string, label: string, action: () => void) =>
      el("button", { type: "button", "aria-label": label, title: label, on: { click: action } }, words);
    const steps = () => this.data?.steps ?? [];
    const choice = el("input", {
      type: "number",
      min: steps()[0]?.step ?? 1,
      max: steps().at(-1)?.step ?? 1,
      value: this.ctx.query.get("step") ?? "",
      "aria-label": "Step to show",
    });
    choice.addEventListener("change", () => {
      const step = steps().find((one) => one.step === Number(choice.value));
      if (step !== undefined) this.zoomTo(step.from, step.to);
    });
    return el(
      "div",
      { class: "timeline-tools" },
      button("−", "Zoom out", () => this.zoom(1 / 0.6)),
      button("+", "Zoom in", () => this.zoom(0.6)),
      button("←", "Earlier", () => this.pan(-0.4)),
      button("→", "Later", () => this.pan(0.4)),
      button("Whole run", "Show the whole run", () => this.all()),
      steps().length > 0
        ? button("All steps", "Show the steps, without the start", () =>
            this.set(steps()[0]?.from ?? 0, this.data?.total_ms ?? 1),
          )
        : null,
      steps().length > 0 ? el("label", { class: "step-choice" }, "Step ", choice) : null,
      this.window,
      this.ctx.frozen
        ? null
        : el(
            "a",
            {
              class: "download",
              href: `/api/runs/${this.ctx.run}/trace.json`,
              download: "trace.json",
              title: "Open it at ui.perfetto.dev or in chrome://tracing",
            },
            "Download for Perfetto",
          ),
      el(
        "ul",
        { class: "kinds", "aria-label": "Colours" },
        KINDS.map(([words, meaning], n) =>
          el("li", { title: meaning }, el("i", { class: `kind kind-${n + 1}`, "aria-hidden": "true" }), words),
        ),
        el("li", null, el("i", { class: "kind waiting", "aria-hidden": "true" }), "Waiting"),
      ),
    );
  }

  private keys(): HTMLElement {
    return el(
      "details",
      { class: "keys small" },
      el("summary", null, "Mouse and keys"),
      el(
        "p",
        { id: "timeline-keys" },
        "Drag to move, Ctrl and wheel to zoom, double-click a span to fill the window with it. " +
          "Keys: Left and Right move, plus and minus zoom, 0 shows all, Up and Down choose a row, comma and full stop the span before and after, Enter fills the window with it, Escape leaves it.",
      ),
    );
  }

  private showLabels(): void {
    const { from, to } = this.data ?? { from: 0, to: 0 };
    const between = `from ${clock(from, to - from)} to ${clock(to, to - from)}`;
    fill(
      this.labels,
      this.rows.map((row) =>
        row.track === null
          ? el(
              "li",
              {
                class: "process",
                style: { top: `${row.top}px`, height: `${row.height}px` },
                title: row.process.host ? `on ${row.process.host}` : null,
              },
              row.process.name,
              row.process.host ? el("span", { class: "muted" }, ` ${row.process.host}`) : null,
            )
          : el(
              "li",
              {
                style: { top: `${row.top}px`, height: `${row.height}px` },
                title: `busy ${small(row.track.busy_share)} of the time ${between}`,
              },
              el("span", null, row.track.name),
              el("span", { class: "muted" }, small(row.track.busy_share)),
            ),
      ),
    );
  }

  /** Says what a span or a wait is; `isSpoken`: also to a screen reader. */
  private describe(hit: Hit | null, isSpoken = true): void {
    this.details.setAttribute("aria-live", isSpoken ? "polite" : "off");
    const { data } = this;
    this.details.classList.toggle("has-span", hit !== null);
    if (hit === null || data === null) {
      fill(
        this.details,
        el("span", { class: "muted" }, "Point at a span, or choose one with the arrow keys: what it is shows here."),
      );
      return;
    }
    const where = `${hit.row.process.name}${hit.row.track === null ? "" : `, ${hit.row.track.name}`}`;
    const span = hit.span ?? (hit.idle === null ? null : ([hit.idle.from, hit.idle.to - hit.idle.from, -1, 1] as Span));
    if (span === null) {
      fill(this.details, el("b", null, where), " nothing in this window");
      return;
    }
    const words = hit.idle === null ? nameOf(data, span) : `waits: ${hit.idle.why}`;
    const step = stepAt(data, span[0] + span[1] / 2);
    fill(
      this.details,
      el("b", null, words),
      el("span", null, where),
      el("span", null, `${span[3] > 1 ? "in " : ""}${duration(span[1] / 1000)}`),
      el(
        "span",
        { class: "muted" },
        `from ${clock(span[0], Math.max(span[1], 20))}${step === undefined ? "" : `, step ${number(step.step)}`}`,
      ),
    );
  }
}

/** A share without digits that nobody needs. */
function small(share: number): string {
  return share > 0 && share < 0.001 ? "<0.1\u202f%" : percent(share);
}
