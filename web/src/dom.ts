// Builds elements and words. Text reaches the document as text nodes only: a run's content is hostile.

type Child = Node | string | number | null | undefined | false | Child[];
type Props = Record<string, unknown>;

/** Makes an element. `on` holds listeners, `data` the data attributes, `style` single CSS properties;
 * other names are attributes (true: without value; false, null: left out). */
export function el<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  props: Props | null = null,
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const node = document.createElement(tag);
  setProps(node, props ?? {});
  append(node, children);
  return node;
}

/** The same for SVG. */
export function svg(tag: string, props: Props | null = null, ...children: Child[]): SVGElement {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  setProps(node, props ?? {});
  append(node, children);
  return node;
}

function setProps(node: HTMLElement | SVGElement, props: Props): void {
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") {
      for (const [event, listener] of Object.entries(value as Record<string, EventListener>))
        node.addEventListener(event, listener);
    } else if (name === "data") {
      for (const [key, text] of Object.entries(value as Record<string, string>)) node.dataset[key] = text;
    } else if (name === "style") {
      for (const [key, text] of Object.entries(value as Record<string, string>))
        node.style.setProperty(key, text);
    } else {
      node.setAttribute(name, value === true ? "" : String(value));
    }
  }
}

function append(node: Node, children: Child[]): void {
  for (const child of children) {
    if (Array.isArray(child)) append(node, child);
    else if (child instanceof Node) node.appendChild(child);
    else if (child !== null && child !== undefined && child !== false)
      node.appendChild(document.createTextNode(visible(String(child))));
  }
}

/** Replaces what is in `node`. */
export function fill(node: Element, ...children: Child[]): void {
  node.replaceChildren();
  append(node, children);
}

// Control characters but newline and tab, and characters that change the direction of text, are
// invisible, or are half of a pair.
const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|\p{Surrogate}/gu;

/** Shows characters that have no shape: control characters as their symbols, others as `<U+202E>`. */
export function visible(text: string): string {
  return text.replace(HIDDEN, (one) => {
    const code = one.codePointAt(0) ?? 0;
    if (code < 0x20) return String.fromCodePoint(0x2400 + code);
    if (code === 0x7f) return "\u2421";
    return `\u27e8U+${code.toString(16).toUpperCase().padStart(4, "0")}\u27e9`;
  });
}

const MINUS = "\u2212";

/** `0.5156`, `1,840`, `1.2e-7`: about four digits. */
export function number(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  let text: string;
  if (size === 0) text = "0";
  else if (size < 1e-3 || size >= 1e9) text = size.toExponential(2).replace("e+", "e").replace("e-", `e${MINUS}`);
  else if (size >= 1000 || Number.isInteger(size)) text = Math.round(size).toLocaleString("en-US");
  else text = trimmed(size.toPrecision(4));
  return value < 0 ? MINUS + text : text;
}

function trimmed(text: string): string {
  return text.includes(".") ? text.replace(/0+$/, "").replace(/\.$/, "") : text;
}

/** `0.516`; null is a dash. */
export function fixed(value: number | null | undefined, digits = 3): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  return value.toFixed(digits).replace("-", MINUS);
}

/** `40 %` */
export function percent(share: number | null | undefined): string {
  if (share === null || share === undefined || !Number.isFinite(share)) return "–";
  const value = share * 100;
  return `${value !== 0 && Math.abs(value) < 1 ? trimmed(value.toPrecision(1)) : Math.round(value)}\u202f%`;
}

/** `340 ms`, `4.2 s`, `3 min 5 s`, `1 h 2 min`, `2 d 3 h` */
export function duration(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds < 0) return MINUS + duration(-seconds);
  if (seconds === 0) return "0 s";
  if (seconds < 0.9995) return `${trimmed((seconds * 1000).toPrecision(3))} ms`;
  if (seconds < 10) return `${trimmed(seconds.toFixed(1))} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  const parts: [number, string][] = [
    [Math.floor(whole / 86400), "d"],
    [Math.floor((whole % 86400) / 3600), "h"],
    [Math.floor((whole % 3600) / 60), "min"],
    [whole % 60, "s"],
  ];
  const first = parts.findIndex(([count]) => count > 0);
  return parts
    .slice(first, first + 2)
    .filter(([count]) => count > 0)
    .map(([count, unit]) => `${count} ${unit}`)
    .join(" ");
}

/** `1.2 GB`, by powers of 1,000 */
export function bytes(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let step = 0;
  while (value >= 1000 && step < units.length - 1) {
    value /= 1000;
    step += 1;
  }
  return `${trimmed(value.toPrecision(3))} ${units[step]}`;
}

/** `1 step`, `3 steps` */
export function count(value: number, word: string, words = `${word}s`): string {
  return `${number(value)} ${value === 1 ? word : words}`;
}

/** Calls `action` once it has not been asked for during `wait_ms`. */
export function debounce<A extends unknown[]>(action: (...args: A) => void, wait_ms: number): (...args: A) => void {
  let timer = 0;
  return (...args) => {
    window.clearTimeout(timer);
    timer = window.setTimeout(() => action(...args), wait_ms);
  };
}

const colors = new Map<string, string>();

/** The colour of a CSS variable as the browser resolves it in the current theme, for a canvas. */
export function color(variable: string): string {
  let found = colors.get(variable);
  if (found === undefined) {
    const probe = el("span", { hidden: true, style: { color: `var(${variable})` } });
    document.body.append(probe);
    found = getComputedStyle(probe).color;
    probe.remove();
    colors.set(variable, found);
  }
  return found;
}

/** The theme has changed. */
export function forgetColors(): void {
  colors.clear();
}

let ids = 0;

/** An id that no other element has. */
export function newId(): string {
  ids += 1;
  return `id${ids}`;
}

/** A question mark that opens an explanation. Works by mouse, touch and keyboard. */
export function hint(label: string, text: string): HTMLElement {
  const id = newId();
  const bubble = el("span", { class: "bubble", id, role: "note", popover: "auto" }, text);
  const button = el(
    "button",
    { type: "button", class: "hint", "aria-label": `What is “${label}”?`, popovertarget: id },
    "?",
  );
  bubble.addEventListener("beforetoggle", () => {
    const at = button.getBoundingClientRect();
    const width = Math.min(320, document.documentElement.clientWidth - 16);
    bubble.style.setProperty("width", `${width}px`);
    bubble.style.setProperty("top", `${at.bottom + 6}px`);
    bubble.style.setProperty("left", `${Math.max(8, Math.min(at.left - 12, document.documentElement.clientWidth - width - 8))}px`);
  });
  return el("span", { class: "hint-box" }, button, bubble);
}

/** A button that copies a text. */
export function copyButton(text: string, what: string): HTMLElement {
  const button = el("button", { type: "button", class: "quiet", "aria-label": `Copy ${what}` }, "Copy");
  button.addEventListener("click", () => {
    void copy(text).then((done) => {
      button.textContent = done ? "Copied" : "Select and copy by hand";
      window.setTimeout(() => (button.textContent = "Copy"), 2000);
    });
  });
  return button;
}

async function copy(text: string): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text); // not there on plain http but on localhost
    return true;
  } catch {
    const area = el("textarea", { class: "sr-only" });
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

/** A command line with its copy button. */
export function command(text: string): HTMLElement {
  return el("div", { class: "command" }, el("code", null, text), copyButton(text, "the command"));
}

/** What a view shows where there is nothing yet. */
export function empty(title: string, text: string): HTMLElement {
  return el("div", { class: "empty" }, el("p", { class: "empty-title" }, title), el("p", null, text));
}

const kept = new WeakMap<Element, string>();

/** Fills an element if its value has changed, so that focus and open notes stay where nothing has. */
export function keep<T>(node: Element, value: T, build: (value: T) => Child): void {
  const text = JSON.stringify(value);
  if (kept.get(node) === text) return;
  kept.set(node, text);
  fill(node, build(value));
}

/** With a capital letter at its start. */
export function sentence(text: string): string {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/** A coloured square with its meaning. */
export function key(variable: string, label: string): HTMLElement {
  return el("span", { class: "key" }, el("i", { "aria-hidden": "true", style: { background: `var(${variable})` } }), label);
}

/** A part of a whole for `shares`. */
export interface Part {
  name: string;
  value: number;
  text: string;
  note?: string;
  color?: string;
}

const PART_COLORS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6"];

/** A bar of parts, and the list of the parts with their shares. */
export function shares(parts: Part[], hasShares = true): HTMLElement {
  const total = parts.reduce((sum, one) => sum + one.value, 0) || 1;
  const background = (one: Part, i: number): string => `var(${one.color ?? PART_COLORS[i % PART_COLORS.length]})`;
  return el(
    "div",
    { class: "shares" },
    el("div", { class: "stacked", "aria-hidden": "true" }, parts.filter((one) => one.value > 0).map((one) => el("i", { style: { width: `${(100 * one.value) / total}%`, background: background(one, parts.indexOf(one)) } }))),
    el(
      "ul",
      null,
      parts.map((one, i) =>
        el(
          "li",
          null,
          el("span", { class: "key" }, el("i", { "aria-hidden": "true", style: { background: background(one, i) } }), el("span", null, one.name, one.note ? el("span", { class: "muted" }, ` ${one.note}`) : null)),
          hasShares ? el("span", { class: "value" }, percent(one.value / total)) : null,
          el("span", { class: hasShares ? "value muted" : "value" }, one.text),
        ),
      ),
    ),
  );
}

/** A box in which a wide or long table scrolls, by the keyboard too. */
export function scrollBox(label: string, ...children: Child[]): HTMLElement {
  return el("div", { class: "table-box", tabindex: "0", role: "region", "aria-label": label }, children);
}

/** A titled part of a view, with an explanation. */
export function card(title: string, text: string, ...children: Child[]): HTMLElement {
  return el("section", { class: "card" }, el("div", { class: "card-head" }, el("h2", null, title), hint(title, text)), children);
}
