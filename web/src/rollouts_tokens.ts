// Shows each token of each turn: coloured by a scale, its values in a panel on hover and focus. Text is
// drawn in chunks; a chunk is one text node until it comes near the screen, then a span for each token.
import type { Ctx } from "./api";
import { count, debounce, duration, el, fill, fixed, number, visible } from "./dom";
import { endWords } from "./rollouts_chat";
import { advantageMark, type Detail, type Token, type Turn } from "./rollouts_model";
import { noToken, tokenValues } from "./rollouts_panel";
import { BUCKETS, type Scale, scalesOf } from "./rollouts_scales";
import { turnTree } from "./rollouts_tree";

const CHUNK = 400; // tokens, if no line ends before
const SHORTEST = 150;
const NEAR = 400; // pixels from the screen

interface Chunk {
  box: HTMLElement;
  turn: number;
  start: number;
  tokens: Token[];
  isDrawn: boolean;
}

interface Place {
  chunk: Chunk;
  at: number; // in the chunk
}

export class TokenView {
  private readonly scales: Scale[];
  private scale: Scale;
  private readonly chunks = new Map<Element, Chunk>();
  private readonly ofTurn: Chunk[][] = [];
  private readonly turnBoxes: HTMLElement[] = [];
  private readonly legend = el("div", { class: "token-legend" });
  private readonly panel = el("aside", { class: "token-panel", "aria-label": "The chosen token" });
  private pinned: Place | null = null;
  // Browsers refuse many changes of the address in short time.
  private readonly keepAddress = debounce(() => {
    if (!this.ctx.signal.aborted) this.ctx.replaceQuery(this.ctx.query);
  }, 200);
  private readonly near: IntersectionObserver;

  constructor(
    private readonly ctx: Ctx,
    private readonly detail: Detail,
  ) {
    this.scales = scalesOf(detail);
    const wanted = ctx.query.get("colour");
    this.scale = this.scales.find((scale) => scale.id === wanted && scale.isKnown) ?? this.firstScale();
    this.near = new IntersectionObserver(
      (entries) => {
        for (const entry of entries) {
          const chunk = this.chunks.get(entry.target);
          if (entry.isIntersecting && chunk !== undefined) this.draw(chunk);
        }
      },
      { rootMargin: `${NEAR}px` },
    );
  }

  render(root: HTMLElement): void {
    const { turns } = this.detail;
    const text = el(
      "div",
      { class: "token-turns" },
      turns.map((turn, n) => this.turn(turn, n)),
    );
    const tree = turns.length > 1 ? turnTree(turns, (n) => this.showTurn(n, true)) : null;
    root.append(
      el("div", { class: "token-tools" }, this.chooser(), this.legend),
      el("div", { class: `token-layout${tree ? " with-tree" : ""}` }, tree, text, this.panel),
    );
    this.showLegend();
    this.showNothing();
    const turn = Number(this.ctx.query.get("turn") ?? "-1");
    if (turns[turn] !== undefined)
      requestAnimationFrame(() => {
        this.showTurn(turn, false);
        const token = this.ctx.query.get("token");
        const place = token === null ? null : this.placeOf(turn, Number(token));
        if (place === null) return;
        this.choose(place, false);
        requestAnimationFrame(() => this.mark(place)); // what is above has its real height only now
      });
  }

  dispose(): void {
    this.near.disconnect();
  }

  private firstScale(): Scale {
    return this.scales.find((scale) => scale.isKnown) ?? this.scales[0]!; // scalesOf always gives some
  }

  private chooser(): HTMLElement {
    const select = el(
      "select",
      { "aria-describedby": "scale-meaning" },
      this.scales.map((scale) =>
        el(
          "option",
          { value: scale.id, selected: scale === this.scale, disabled: !scale.isKnown },
          scale.isKnown ? scale.label : `${scale.label}: not recorded`,
        ),
      ),
    );
    const meaning = el("p", { id: "scale-meaning", class: "muted small" }, this.scale.meaning);
    select.addEventListener("change", () => {
      this.scale = this.scales.find((scale) => scale.id === select.value) ?? this.scale;
      fill(meaning, this.scale.meaning);
      this.ctx.query.set("colour", this.scale.id);
      this.ctx.replaceQuery(this.ctx.query);
      this.showLegend();
      this.recolour();
    });
    return el(
      "div",
      { class: "chooser" },
      el("label", { class: "field" }, el("span", null, "Colour by"), select),
      meaning,
    );
  }

  private showLegend(): void {
    const masked = el(
      "li",
      null,
      el("span", { class: "token masked", "aria-hidden": "true" }, "ab"),
      " masked: not trained",
    );
    fill(
      this.legend,
      el(
        "ul",
        { class: this.scale.kind, "aria-label": `Legend: ${this.scale.label}` },
        this.scale.legend.map(({ bucket, words }) =>
          el("li", null, el("span", { class: `token k${bucket}`, "aria-hidden": "true" }, "ab"), ` ${words}`),
        ),
        masked,
      ),
    );
  }

  private turn(turn: Turn, n: number): HTMLElement {
    const chunks = chunked(turn.tokens).map((tokens) => {
      const box = el("div", { class: "chunk" }, tokens.map(shown).join(""));
      return { box, turn: n, start: 0, tokens, isDrawn: false };
    });
    let start = 0;
    for (const chunk of chunks) {
      chunk.start = start;
      start += chunk.tokens.length;
      this.chunks.set(chunk.box, chunk);
      this.near.observe(chunk.box);
    }
    this.ofTurn[n] = chunks;
    const text = el(
      "div",
      {
        class: `tokens ${this.scale.kind}`,
        tabindex: turn.tokens.length > 0 ? 0 : null,
        role: "group",
        "aria-label": `Tokens of turn ${n + 1}. Arrow keys go from token to token, Home and End to the first and last.`,
      },
      chunks.map((chunk) => chunk.box),
    );
    text.addEventListener("pointerover", (event) => this.hover(event));
    text.addEventListener("pointerleave", () => this.back());
    text.addEventListener("click", (event) => {
      const place = this.placeAt(event.target);
      if (place !== null) this.choose(place, false);
    });
    text.addEventListener("keydown", (event) => this.key(event, n));
    text.addEventListener("focus", () => {
      if (!text.matches(":focus-visible")) return;
      const place = this.pinned?.chunk.turn === n ? this.pinned : this.placeOf(n, 0);
      if (place !== null) this.choose(place, true);
    });
    const box = el(
      "section",
      { class: "turn", id: `turn-${n}`, "aria-label": `Turn ${n + 1}` },
      turnHead(turn, n),
      turn.tokens.length > 0 ? text : el("p", { class: "muted" }, "No tokens."),
    );
    this.turnBoxes[n] = box;
    return box;
  }

  private showTurn(n: number, isByHand: boolean): void {
    const box = this.turnBoxes[n];
    if (box === undefined) return;
    for (const link of document.querySelectorAll(".turn-tree [aria-current]")) link.removeAttribute("aria-current");
    document.querySelector(`.turn-tree [data-turn="${n}"]`)?.setAttribute("aria-current", "true");
    box.scrollIntoView({ block: "start" });
    if (!isByHand) return;
    box.querySelector<HTMLElement>(".tokens")?.focus({ preventScroll: true });
    this.ctx.query.set("turn", String(n));
    this.ctx.query.delete("token");
    this.ctx.replaceQuery(this.ctx.query);
  }

  private draw(chunk: Chunk): void {
    if (chunk.isDrawn) return;
    chunk.isDrawn = true;
    this.near.unobserve(chunk.box);
    const spans = document.createDocumentFragment();
    for (const token of chunk.tokens) {
      const span = document.createElement("span");
      span.className = this.classOf(token);
      span.textContent = shown(token);
      spans.append(span);
    }
    chunk.box.replaceChildren(spans);
  }

  private classOf(token: Token): string {
    const bucket = this.scale.bucket(token);
    return `token${bucket === null ? "" : ` k${Math.max(0, Math.min(BUCKETS - 1, bucket))}`}${token.mask ? "" : " masked"}`;
  }

  private recolour(): void {
    for (const box of this.turnBoxes) box.querySelector(".tokens")?.setAttribute("class", `tokens ${this.scale.kind}`);
    // Reads all places before it writes, so that the browser lays out once.
    const drawn = [...this.chunks.values()].filter(({ isDrawn }) => isDrawn);
    const places = drawn.map(({ box }) => box.getBoundingClientRect());
    drawn.forEach((chunk, n) => {
      const { top, bottom } = places[n] ?? chunk.box.getBoundingClientRect();
      if (bottom > -NEAR && top < window.innerHeight + NEAR) {
        const spans = chunk.box.children;
        chunk.tokens.forEach((token, at) => spans[at]?.setAttribute("class", this.classOf(token)));
      } else {
        // Away from the screen: drawn again when it comes near.
        chunk.isDrawn = false;
        chunk.box.textContent = chunk.tokens.map(shown).join("");
        this.near.observe(chunk.box);
      }
    });
    if (this.pinned !== null) this.mark(this.pinned);
  }

  // ---- The chosen token

  private placeAt(target: EventTarget | null): Place | null {
    if (!(target instanceof Element) || !target.classList.contains("token")) return null;
    const chunk = target.parentElement === null ? undefined : this.chunks.get(target.parentElement);
    return chunk === undefined ? null : { chunk, at: Array.prototype.indexOf.call(chunk.box.children, target) };
  }

  private placeOf(turn: number, index: number): Place | null {
    const chunks = this.ofTurn[turn] ?? [];
    const chunk = chunks.find(({ start, tokens }) => index >= start && index < start + tokens.length);
    if (chunk === undefined) return null;
    this.draw(chunk);
    return { chunk, at: index - chunk.start };
  }

  private hover(event: PointerEvent): void {
    const place = event.pointerType === "touch" ? null : this.placeAt(event.target);
    if (place === null) return;
    this.panel.setAttribute("aria-live", "off");
    this.showValues(place);
  }

  /** Shows the pinned token again, when the pointer has left the text. */
  private back(): void {
    if (this.pinned !== null) this.showValues(this.pinned);
    else this.showNothing();
  }

  private choose(place: Place, isSpoken: boolean): void {
    this.panel.setAttribute("aria-live", isSpoken ? "polite" : "off");
    for (const span of document.querySelectorAll(".token.active")) span.classList.remove("active");
    this.pinned = place;
    this.mark(place);
    this.ctx.query.set("turn", String(place.chunk.turn));
    this.ctx.query.set("token", String(place.chunk.start + place.at));
    this.keepAddress();
    this.showValues(place);
  }

  private mark(place: Place): void {
    this.draw(place.chunk);
    const span = place.chunk.box.children[place.at];
    span?.classList.add("active");
    span?.scrollIntoView({ block: "nearest" });
  }

  private key(event: KeyboardEvent, turn: number): void {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key === "Escape") return this.leave();
    const length = this.detail.turns[turn]?.tokens.length ?? 0;
    const now = this.pinned?.chunk.turn === turn ? this.pinned.chunk.start + this.pinned.at : -1;
    const to = {
      ArrowRight: now + 1,
      ArrowLeft: now - 1,
      Home: 0,
      End: length - 1,
      PageDown: now + 50,
      PageUp: now - 50,
      ArrowDown: this.line(turn, now, 1),
      ArrowUp: this.line(turn, now, -1),
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const place = this.placeOf(turn, Math.max(0, Math.min(length - 1, to)));
    if (place !== null) this.choose(place, true);
  }

  /** The token that lies on the next line (by = 1) or the line before, at about the same height. */
  private line(turn: number, index: number, by: 1 | -1): number {
    const from = this.spanOf(turn, index);
    if (from === null) return index + by;
    const start = from.getBoundingClientRect();
    let best = index;
    for (let other = index + by, line: number | null = null; ; other += by) {
      const rect = this.spanOf(turn, other)?.getBoundingClientRect();
      if (rect === undefined) return best === index ? other - by : best;
      if (Math.abs(rect.bottom - start.bottom) < 3) continue;
      line ??= rect.bottom;
      if (Math.abs(rect.bottom - line) > 3) return best;
      best = other;
      if (by > 0 ? rect.right > start.left : rect.left <= start.left) return best;
    }
  }

  private spanOf(turn: number, index: number): Element | null {
    const place = this.placeOf(turn, index);
    return place?.chunk.box.children[place.at] ?? null;
  }

  /** Leaves the chosen token; on a narrow screen the panel covers text. */
  private closer(): HTMLElement | null {
    if (this.pinned === null) return null;
    const button = el("button", { type: "button", class: "quiet closer", "aria-label": "Leave this token" }, "✕");
    button.addEventListener("click", () => this.leave());
    return button;
  }

  private leave(): void {
    for (const span of document.querySelectorAll(".token.active")) span.classList.remove("active");
    this.pinned = null;
    this.ctx.query.delete("token");
    this.ctx.replaceQuery(this.ctx.query);
    this.showNothing();
  }

  private showNothing(): void {
    this.panel.classList.remove("has-token");
    fill(
      this.panel,
      noToken(this.detail.turns, (turn, at) => {
        const place = this.placeOf(turn, at);
        if (place !== null) this.choose(place, true);
      }),
    );
  }

  private showValues({ chunk, at }: Place): void {
    const token = chunk.tokens[at];
    const turn = this.detail.turns[chunk.turn];
    if (token === undefined || turn === undefined) return;
    this.panel.classList.add("has-token");
    const where = `token ${number(chunk.start + at + 1)} of ${number(turn.num_tokens)} in turn ${chunk.turn + 1}`;
    fill(this.panel, this.closer(), tokenValues(token, turn, where));
  }
}

function turnHead(turn: Turn, n: number): HTMLElement {
  const facts = [
    count(turn.num_tokens, "token"),
    turn.num_tokens > turn.tokens.length ? `the first ${number(turn.tokens.length)} shown` : null,
    `prompt of ${number(turn.prompt_tokens)}`,
    turn.reward === null ? null : `reward ${fixed(turn.reward)}`,
    turn.branch_reward === null ? null : `branch reward ${fixed(turn.branch_reward)}`,
    endWords(turn),
    turn.is_seen ? null : "discarded by the agent",
    turn.replica,
    turn.metrics?.decode_s == null ? null : `decoded in ${duration(turn.metrics.decode_s)}`,
  ].filter((fact) => fact !== null && fact !== "");
  return el(
    "header",
    { class: "turn-head" },
    el("h3", null, `Turn ${n + 1}`),
    advantageMark(turn.advantage),
    el("span", { class: "muted small" }, facts.join(" · ")),
  );
}

function shown(token: Token): string {
  if (token.text === null) return `⟨${token.id}⟩ `;
  if (token.text === "") return "∅";
  return visible(token.text).replaceAll("\n", "↵\n");
}

/** Cuts after a line's end where there is one. */
function chunked(tokens: Token[]): Token[][] {
  const chunks: Token[][] = [];
  let start = 0;
  for (let end = 1; end <= tokens.length; end += 1) {
    const size = end - start;
    const isLine = size >= SHORTEST && tokens[end - 1]?.text?.endsWith("\n");
    if (!isLine && size < CHUNK && end < tokens.length) continue;
    chunks.push(tokens.slice(start, end));
    start = end;
  }
  return chunks;
}
