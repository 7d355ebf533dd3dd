// The frame of the page: header, addresses, live changes, theme. The views fill the rest.
import { frozenAt, get, isFrozen, search, type Changed, type Ctx, type Params, type Run, type View } from "./api";
import config from "./config";
import curves from "./curves";
import { debounce, el, fill, forgetColors, number } from "./dom";
import now from "./now";
import overview from "./overview";
import rollouts from "./rollouts";
import timeline from "./timeline";

const VIEWS: Record<string, { label: string; make: () => View; needsServer?: true }> = {
  overview: { label: "Overview", make: overview },
  curves: { label: "Curves", make: curves },
  rollouts: { label: "Rollouts", make: rollouts },
  timeline: { label: "Timeline", make: timeline },
  now: { label: "Now", make: now, needsServer: true },
  config: { label: "Configuration", make: config },
};

let runs: Run[] = [];
let visit: { ctx: Ctx; view: View; end: AbortController } | null = null;

// ---- Addresses

function parse(hash: string): { view: string; parts: string[]; query: URLSearchParams } {
  const [path = "", query = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  const [view = "", ...parts] = path.split("/").map(decode);
  return { view: Object.hasOwn(VIEWS, view) ? view : "overview", parts, query: new URLSearchParams(query) };
}

function decode(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

function address(path: string, run: number, params: Params = {}): string {
  const query = new URLSearchParams(search(params));
  if (run !== 0) query.set("run", String(run));
  else query.delete("run");
  const text = query.toString().replaceAll("%2C", ",").replaceAll("%2F", "/");
  return `#/${path.replace(/^\//, "")}${text ? `?${text}` : ""}`;
}

function runOf(query: URLSearchParams): number {
  const found = Number(query.get("run") ?? "0");
  return runs.some((one) => one.run === found) ? found : (runs[0]?.run ?? 0);
}

// ---- A visit of a view

async function show(isFirst: boolean): Promise<void> {
  visit?.end.abort();
  visit?.view.dispose?.();
  const { view: name, parts, query } = parse(location.hash);
  const run = runOf(query);
  const end = new AbortController();
  const ctx: Ctx = {
    view: name,
    parts,
    run,
    runs,
    query,
    frozen: isFrozen,
    signal: end.signal,
    get: (path, params = {}, signal = end.signal) =>
      get(path.startsWith("/") ? path : `/api/runs/${run}/${path}`, params, signal),
    go: (path, params) => {
      location.hash = address(path, run, params);
    },
    replaceQuery: (changed) => {
      ctx.query = changed;
      history.replaceState(null, "", address([name, ...parts.map(encodeURIComponent)].join("/"), run, changed));
    },
    link: (path, params) => address(path, run, params),
  };
  const { label, make } = VIEWS[name] ?? VIEWS["overview"]!;
  const view = make();
  visit = { ctx, view, end };
  document.title = `${label} · ${runs.find((one) => one.run === run)?.name ?? "torchtitan-rl"}`;
  showHeader();
  const heading = el("h1", { class: "sr-only", tabindex: "-1" }, label);
  const root = el("div", { class: `view view-${name}` });
  main.setAttribute("aria-busy", "true");
  fill(main, heading, root);
  if (!isFirst) {
    window.scrollTo(0, 0);
    heading.focus({ preventScroll: true });
  }
  try {
    if (runs.length === 0) throw new Error("There is no run to show.");
    await view.render(root, ctx);
  } catch (error) {
    if (!end.signal.aborted) fill(root, errorBox(error));
  }
  if (!end.signal.aborted) main.setAttribute("aria-busy", "false");
}

function errorBox(error: unknown): HTMLElement {
  const again = el("button", { type: "button", on: { click: () => void show(true) } }, "Try again");
  const text = error instanceof Error ? error.message : String(error);
  return el("div", { class: "empty error", role: "alert" }, el("p", { class: "empty-title" }, "This view could not be shown"), el("p", null, text), again);
}

// ---- Header

const nav = el("nav", { "aria-label": "Views" });
const who = el("div", { class: "who" });
const status = el("div", { class: "status", role: "status" });
const spoken = el("p", { class: "sr-only", role: "status" });
const main = el("main", { id: "main", "aria-busy": "true" });

function showHeader(): void {
  const current = visit?.ctx;
  const run = runs.find((one) => one.run === current?.run);
  fill(
    nav,
    Object.entries(VIEWS)
      .filter(([, { needsServer }]) => !(isFrozen && needsServer))
      .map(([name, { label }]) =>
        el("a", { href: address(name, current?.run ?? 0), "aria-current": current?.view === name ? "page" : null }, label),
      ),
  );
  const link = nav.querySelector<HTMLElement>("[aria-current]");
  if (link !== null) nav.scrollLeft = link.offsetLeft - nav.offsetLeft - 60; // on a narrow window
  fill(who, run === undefined ? null : [picker(run), state(run)]);
}

function picker(run: Run): HTMLElement {
  if (runs.length === 1) return el("span", { class: "run-name", title: run.dir }, run.name);
  const select = el(
    "select",
    { class: "run-name", "aria-label": "Run", title: run.dir },
    runs.map((one) => el("option", { value: one.run, selected: one.run === run.run }, one.name)),
  );
  select.addEventListener("change", () => {
    const { view } = parse(location.hash);
    location.hash = address(view, Number(select.value));
  });
  return select;
}

function state(run: Run): HTMLElement {
  const of = run.num_steps === null ? "" : ` of ${number(run.num_steps)}`;
  const steps = run.kind === "eval" ? "evaluation" : `step ${number(run.step)}${of}`;
  const isLive = run.is_live && !isFrozen;
  const word = isLive ? "Live" : isFrozen ? `Report ${frozenAt()}`.trim() : "Ended";
  return el("span", { class: `state ${isLive ? "live" : ""}` }, el("i", { class: "dot", "aria-hidden": "true" }), `${word} · ${steps}`);
}

const THEMES = ["auto", "light", "dark"] as const;

function theme(): HTMLButtonElement {
  let chosen = stored();
  const button = el("button", { type: "button", class: "quiet theme" });
  const apply = (): void => {
    if (chosen === "auto") delete document.documentElement.dataset["theme"];
    else document.documentElement.dataset["theme"] = chosen;
    fill(button, `Theme: ${chosen}`);
  };
  button.addEventListener("click", () => {
    chosen = THEMES[(THEMES.indexOf(chosen) + 1) % THEMES.length] ?? "auto";
    try {
      localStorage.setItem("theme", chosen);
    } catch {
      // A page from disk may have no storage; the choice then ends with it.
    }
    apply();
    changeTheme();
  });
  apply();
  return button;
}

/** Canvases are drawn in the colours of the theme. */
function changeTheme(): void {
  forgetColors();
  void show(true);
}

function stored(): (typeof THEMES)[number] {
  try {
    const found = localStorage.getItem("theme");
    return THEMES.find((one) => one === found) ?? "auto";
  } catch {
    return "auto";
  }
}

// ---- Live changes

type Counters = Record<"metrics" | "rollouts" | "now" | "trace", number>;
const KINDS = ["metrics", "rollouts", "now", "trace"] as const;

/** Listens for changes. `ready` is called once the present state of every run is known: what is asked
 * for after that misses no change. A hidden tab does not listen: a browser opens only six connections to
 * one address, and each tab that listens has one of them. */
function listen(ready: () => void): void {
  const seen = new Map<number, Counters>();
  let lost = 0;
  let wasLost = false;
  const source = new EventSource("/api/events");
  const onVisibility = (): void => {
    if (document.hidden) return stop();
    document.removeEventListener("visibilitychange", onVisibility);
    listen(changeAll);
  };
  const stop = (): void => {
    source.close();
    window.clearTimeout(lost);
  };
  document.addEventListener("visibilitychange", onVisibility);
  source.addEventListener("open", () => {
    window.clearTimeout(lost);
    lost = 0;
    fill(status);
    if (wasLost) seen.clear(); // the server may be another one, which counts from 0
  });
  source.addEventListener("error", () => {
    wasLost = true;
    if (lost === 0) lost = window.setTimeout(() => fill(status, "Connection lost. Reconnecting …"), 1500);
    if (source.readyState === EventSource.CLOSED) {
      document.removeEventListener("visibilitychange", onVisibility);
      window.setTimeout(() => listen(changeAll), 3000);
    }
  });
  source.addEventListener("change", (event) => {
    const data = JSON.parse((event as MessageEvent<string>).data) as Counters & { run: number };
    const before = seen.get(data.run);
    seen.set(data.run, data);
    if (before === undefined && !wasLost) {
      if (seen.size === runs.length) ready();
      if (seen.size === runs.length && document.hidden) stop();
      return;
    }
    const changed: Changed = { run: data.run, metrics: false, rollouts: false, now: false, trace: false };
    for (const kind of KINDS) changed[kind] = before === undefined || before[kind] !== data[kind];
    if (changed.metrics || changed.now) refreshRuns();
    visit?.view.onChange?.(changed);
  });
}

/** After a loss of the connection anything may have changed. */
function changeAll(): void {
  refreshRuns();
  for (const { run } of runs) visit?.view.onChange?.({ run, metrics: true, rollouts: true, now: true, trace: true });
}

let spokenAt = 0;

/** Shows the state of the run, and says it aloud at most once a minute. */
function tell(shown: HTMLElement): void {
  who.querySelector(".state")?.replaceWith(shown);
  if (Date.now() - spokenAt < 60_000) return;
  spokenAt = Date.now();
  fill(spoken, shown.textContent);
}

const refreshRuns = debounce(() => {
  void get<Run[]>("/api/runs", {}, new AbortController().signal).then(
    (found) => {
      runs.splice(0, runs.length, ...found);
      const run = runs.find((one) => one.run === visit?.ctx.run);
      if (run !== undefined) tell(state(run));
    },
    () => undefined, // the line about the lost connection says it
  );
}, 300);

async function start(): Promise<void> {
  const skip = el("a", { class: "skip", href: "#main" }, "Skip to the content");
  skip.addEventListener("click", (event) => {
    event.preventDefault();
    main.querySelector<HTMLElement>("h1")?.focus();
  });
  const brand = el("span", { class: "brand", "aria-hidden": "true" }, "torchtitan-rl");
  document.body.append(skip, el("header", { class: "top" }, el("div", { class: "bar" }, brand, who, status, theme()), nav), spoken, main);
  try {
    runs = await get<Run[]>("/api/runs", {}, new AbortController().signal);
  } catch (error) {
    fill(main, errorBox(error));
    main.setAttribute("aria-busy", "false");
    return;
  }
  window.addEventListener("hashchange", () => void show(false));
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changeTheme);
  if (!isFrozen) await Promise.race([new Promise<void>(listen), new Promise((done) => window.setTimeout(done, 200))]);
  await show(true);
}

void start();
