// Shows a conversation: messages as bubbles, with thinking, tool calls and tool results folded.
import { count, el, fixed, number } from "./dom";
import type { Detail, Turn } from "./rollouts_model";

const LONG = 3000; // characters of a text that are shown at first
const KNOWN = new Set([
  "role",
  "content",
  "tool_calls",
  "reasoning_content",
  "reasoning",
  "thinking",
  "tool_call_id",
  "name",
]);

/** The conversation of a rollout; of one without messages, its turns' texts. */
export function conversation(detail: Detail, tokensLink: (turn: number) => string): HTMLElement {
  const { messages, turns } = detail;
  if (messages.length === 0 && turns.length === 0)
    return el("p", { class: "muted" }, "Nothing was said: it ended before the first answer.");
  if (messages.length === 0)
    return el(
      "ol",
      { class: "chat" },
      turns.map((turn, n) =>
        bubble("assistant", `Answer ${n + 1}`, [longText(turn.text ?? "")], turnNote(turn, n, tokensLink)),
      ),
    );
  const assistants = messages.filter((message) => message.role === "assistant").length;
  const hasTurnEach = assistants === turns.length;
  const calls = new Map<string, string>();
  let answers = 0;
  const items = messages.map((message) => {
    const role = typeof message.role === "string" ? message.role : "message";
    for (const call of toolCalls(message)) calls.set(call.id, call.name);
    if (role === "tool") return bubble("tool", "tool", [toolResult(message, calls)]);
    const parts = [
      ...thinking(message),
      ...content(message.content),
      ...toolCalls(message).map(toolCall),
      ...others(message),
    ];
    if (role !== "assistant") return bubble(role, role, parts);
    const turn = turns[answers];
    answers += 1;
    const note = hasTurnEach && turn !== undefined ? turnNote(turn, answers - 1, tokensLink) : null;
    return bubble("assistant", hasTurnEach ? `model · turn ${answers}` : "model", parts, note);
  });
  const chat = el("ol", { class: "chat" }, items);
  if (hasTurnEach) return chat;
  const note = `The model answered ${count(turns.length, "time")}; this conversation, as the agent handed it over, has ${number(assistants)} of the answers. `;
  return el(
    "div",
    null,
    el("p", { class: "muted chat-note" }, note, el("a", { href: tokensLink(0) }, "All turns and branches")),
    chat,
  );
}

function bubble(role: string, title: string, parts: (Node | string)[], note: Node | null = null): HTMLElement {
  const kind = ["system", "user", "assistant", "tool"].includes(role) ? role : "user";
  const body = parts.length > 0 ? parts : [el("p", { class: "muted" }, "(empty)")];
  return el("li", { class: `message ${kind}` }, el("div", { class: "speaker" }, title, note), body);
}

function turnNote(turn: Turn, n: number, tokensLink: (turn: number) => string): HTMLElement {
  const facts = [turn.reward === null ? null : `reward ${fixed(turn.reward)}`, endWords(turn)].filter(
    (fact) => fact !== null,
  );
  return el(
    "span",
    { class: "note" },
    facts.length > 0 ? `${facts.join(" · ")} · ` : null,
    el(
      "a",
      { href: tokensLink(n), "aria-label": `${count(turn.num_tokens, "token")} of turn ${n + 1}` },
      count(turn.num_tokens, "token"),
    ),
  );
}

/** How a completion ended, where it is worth a word. */
export function endWords(turn: Turn): string | null {
  if (turn.finish_reason === "length") return "cut at the token limit";
  if (turn.finish_reason === "abort") return "interrupted";
  return null;
}

function content(value: unknown): HTMLElement[] {
  if (value === null || value === undefined || value === "") return [];
  if (typeof value === "string") return [longText(value)];
  if (!Array.isArray(value)) return [longText(json(value))];
  return value.map((part: unknown) => {
    const text = field(part, "text");
    return longText(typeof text === "string" ? text : json(part));
  });
}

function thinking(message: Record<string, unknown>): HTMLElement[] {
  const text = message.reasoning_content ?? message.reasoning ?? message.thinking;
  if (text === null || text === undefined || text === "") return [];
  const words = typeof text === "string" ? text : json(text);
  return [
    el(
      "details",
      { class: "fold" },
      el("summary", null, `Thinking (${count(words.length, "character")})`),
      longText(words),
    ),
  ];
}

interface Call {
  id: string;
  name: string;
  arguments: unknown;
}

function toolCalls(message: Record<string, unknown>): Call[] {
  if (!Array.isArray(message.tool_calls)) return [];
  return message.tool_calls.map((call: unknown) => {
    const of = field(call, "function") ?? call;
    return {
      id: String(field(call, "id") ?? ""),
      name: String(field(of, "name") ?? "tool"),
      arguments: field(of, "arguments"),
    };
  });
}

function toolCall(call: Call): HTMLElement {
  let words = typeof call.arguments === "string" ? call.arguments : json(call.arguments);
  try {
    if (typeof call.arguments === "string") words = json(JSON.parse(call.arguments));
  } catch {
    // the model wrote arguments that are not JSON: shown as they are
  }
  return fold("Calls", call.name, words);
}

function toolResult(message: Record<string, unknown>, calls: Map<string, string>): HTMLElement {
  const name = message.name ?? calls.get(String(message.tool_call_id ?? "")) ?? "tool";
  const words = typeof message.content === "string" ? message.content : json(message.content);
  return fold("Result of", String(name), words);
}

/** A fold whose first line says what is in it. */
function fold(verb: string, name: string, words: string): HTMLElement {
  const line = words.replace(/\s+/g, " ").trim();
  const start = line.length > 80 ? `${line.slice(0, 80)} …` : line;
  return el(
    "details",
    { class: "fold" },
    el("summary", null, `${verb} `, el("b", null, cut(name, 80)), " ", el("code", { class: "start" }, start)),
    longText(words),
  );
}

function others(message: Record<string, unknown>): HTMLElement[] {
  const rest = Object.fromEntries(Object.entries(message).filter(([key, value]) => !KNOWN.has(key) && value !== null));
  return Object.keys(rest).length === 0 ? [] : [fold("Other fields:", Object.keys(rest).join(", "), json(rest))];
}

/** A text with its line breaks. Of a long one, the start and a button for the rest. */
export function longText(text: string): HTMLElement {
  if (text.length <= LONG) return el("div", { class: "text" }, text);
  const shown = el("div", { class: "text" }, `${text.slice(0, LONG)} …`);
  const more = el("button", { type: "button", class: "quiet" }, `Show all ${number(text.length)} characters`);
  more.addEventListener("click", () => {
    shown.replaceWith(el("div", { class: "text" }, text));
    more.remove();
  });
  return el("div", null, shown, more);
}

/** JSON as a person reads it. */
export function json(value: unknown): string {
  return JSON.stringify(value, null, 2) ?? "";
}

function field(value: unknown, name: string): unknown {
  return typeof value === "object" && value !== null ? (value as Record<string, unknown>)[name] : undefined;
}

function cut(text: string, length: number): string {
  return text.length > length ? `${text.slice(0, length)} …` : text;
}
