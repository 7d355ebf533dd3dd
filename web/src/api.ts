// Fetches answers of the server or, in a report, finds them in the page itself.
import { filterRollouts } from "./rollouts_frozen";

export interface Run {
  run: number;
  name: string;
  dir: string;
  kind: "train" | "eval";
  is_live: boolean;
  step: number;
  num_steps: number | null;
}

/** What has changed since a view was told the last time. */
export interface Changed {
  run: number;
  metrics: boolean;
  rollouts: boolean;
  now: boolean;
  trace: boolean;
}

export type Params = Record<string, string | number | boolean | null | undefined> | URLSearchParams;

/** What a view gets to work with; made new for each visit. */
export interface Ctx {
  /** The first part of the address: `rollouts` of `#/rollouts/123?colour=ratio`. */
  view: string;
  /** The parts after it: `["123"]`. */
  parts: string[];
  run: number;
  runs: Run[];
  query: URLSearchParams;
  /** Whether this is a report: one file, without a server. */
  frozen: boolean;
  /** Aborted when the visit ends. */
  signal: AbortSignal;
  /** `get("rollouts", {step: 5})` asks about the run, `get("/api/catalogue")` the server. */
  get<T>(path: string, params?: Params, signal?: AbortSignal): Promise<T>;
  /** Goes to a view, keeping the run. */
  go(path: string, query?: Params): void;
  /** Changes the address without a new visit. */
  replaceQuery(query: URLSearchParams): void;
  /** The address of a view, for `href`. */
  link(path: string, query?: Params): string;
}

export interface View {
  render(root: HTMLElement, ctx: Ctx): Promise<void> | void;
  onChange?(changed: Changed): void;
  dispose?(): void;
}

/** The server's answer is an error, or there is none. */
export class ApiError extends Error {}

const frozenNode = document.getElementById("frozen");
const frozenAnswers: Record<string, unknown> | null =
  frozenNode === null ? null : (JSON.parse(frozenNode.textContent ?? "{}") as Record<string, unknown>);

export const isFrozen = frozenAnswers !== null;

/** When the report was made, in words. */
export function frozenAt(): string {
  const at = frozenAnswers?.["at_unix_s"];
  return typeof at === "number" ? new Date(at * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" }) : "";
}

export async function get<T>(path: string, params: Params, signal: AbortSignal): Promise<T> {
  const query = search(params);
  if (frozenAnswers !== null) return fromFrozen(frozenAnswers, path, query) as T;
  const text = query.toString();
  let response: Response;
  try {
    response = await fetch(text ? `${path}?${text}` : path, { signal, credentials: "same-origin" });
  } catch (error) {
    if (signal.aborted) throw error;
    throw new ApiError("The page's server does not answer. Is the command that started it still running?");
  }
  if (!response.ok) {
    const answer = (await response.json().catch(() => null)) as { error?: string } | null;
    throw new ApiError(answer?.error ?? `The server answered ${response.status} to ${path}.`);
  }
  return (await response.json()) as T;
}

export function search(params: Params): URLSearchParams {
  if (params instanceof URLSearchParams) return params;
  const found = new URLSearchParams();
  for (const [name, value] of Object.entries(params))
    if (value !== null && value !== undefined && value !== "") found.set(name, String(value));
  return found;
}

function fromFrozen(answers: Record<string, unknown>, path: string, query: URLSearchParams): unknown {
  const found = answers[path];
  if (found === undefined) throw new ApiError("This report does not contain it. The page of the run does.");
  if (path.endsWith("/rollouts")) return filterRollouts(found, query);
  return found;
}
