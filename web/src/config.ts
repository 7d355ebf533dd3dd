// What a run was started with: fields, differences between runs, machine, versions, commands.
import type { Ctx, View } from "./api";
import { bytes, card, command, count, debounce, el, empty, fill, number, scrollBox } from "./dom";

interface Config {
  fields: Record<string, unknown>;
  command: string | null;
  resume_command: string | null;
  resume_note: string;
  versions: Record<string, string> | null;
  machine: { host?: string; cores?: number; memory_bytes?: number; devices?: unknown[] } | null;
  plan: string[] | null;
  telemetry: string | null;
}

export default function view(): View {
  return {
    async render(root, ctx) {
      const all = await Promise.all(ctx.runs.map((one) => (one.run === ctx.run ? ctx.get<Config>("config") : ctx.get<Config>(`/api/runs/${one.run}/config`).catch(() => null))));
      const config = all[ctx.runs.findIndex((one) => one.run === ctx.run)];
      if (!config) throw new Error("The configuration could not be read.");
      root.append(
        el(
          "div",
          { class: "config-grid" },
          el("div", { class: "stack" }, ctx.runs.length > 1 ? differences(ctx, all) : null, fields(ctx, config)),
          el("div", { class: "stack" }, commands(config), machine(config), versions(config), plan(config)),
        ),
      );
    },
  };
}

function show(value: unknown): HTMLElement {
  if (value === undefined) return el("span", { class: "muted" }, "not there");
  if (value === null) return el("span", { class: "muted" }, "none");
  if (value === "") return el("span", { class: "muted" }, "empty");
  if (Array.isArray(value) && value.length === 0) return el("span", { class: "muted" }, "empty list");
  return el("code", null, typeof value === "string" ? value : JSON.stringify(value));
}

function differences(ctx: Ctx, all: (Config | null | undefined)[]): HTMLElement {
  const names = [...new Set(all.flatMap((one) => Object.keys(one?.fields ?? {})))].sort();
  const differing = names.filter((name) => new Set(all.map((one) => JSON.stringify(one?.fields[name]))).size > 1);
  const body =
    differing.length === 0
      ? el("p", { class: "muted" }, "All fields are equal.")
      : scrollBox(
          "Differences between the runs",
          el(
            "table",
            null,
            el("thead", null, el("tr", null, el("th", { scope: "col" }, "Field"), ctx.runs.map((run) => el("th", { scope: "col" }, run.name)))),
            el("tbody", null, differing.map((name) => el("tr", null, el("th", { scope: "row" }, el("code", null, name)), all.map((one) => el("td", null, show(one?.fields[name])))))),
          ),
        );
  body.classList.add("differences");
  return card("Differences between the runs", "The fields that do not have the same value in all runs of this page.", body);
}

function fields(ctx: Ctx, config: Config): HTMLElement {
  const entries = Object.entries(config.fields);
  if (entries.length === 0) return card("Configuration", "Every field of the configuration, after files and options were applied.", empty("Not recorded", "This run has no identity.json."));
  const filter = el("input", { type: "search", value: ctx.query.get("q") ?? "", placeholder: "field or value", autocomplete: "off", size: 26 });
  const found = el("span", { class: "muted small", role: "status" });
  const body = el("div");
  const draw = (): void => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = entries.filter(([name, value]) => {
      const text = `${name} ${JSON.stringify(value)}`.toLowerCase();
      return words.every((word) => text.includes(word));
    });
    const groups = new Map<string, [string, unknown][]>();
    for (const [name, value] of shown) {
      const group = name.includes(".") ? name.slice(0, name.indexOf(".")) : "run";
      groups.set(group, [...(groups.get(group) ?? []), [name, value]]);
    }
    const ordered = [...groups].sort(([a], [b]) => Number(b === "run") - Number(a === "run"));
    fill(found, words.length > 0 ? `${number(shown.length)} of ${count(entries.length, "field")}` : count(entries.length, "field"));
    fill(
      body,
      shown.length === 0 ? empty("No field matches", "The filter looks at names and values; each word must occur.") : null,
      ordered.map(([group, rows]) =>
        el(
          "section",
          { class: "fields" },
          el("h3", null, group),
          el("dl", null, rows.map(([name, value]) => el("div", null, el("dt", null, el("code", null, name)), el("dd", null, show(value))))),
        ),
      ),
    );
  };
  filter.addEventListener("input", debounce(() => {
    const query = new URLSearchParams(ctx.query);
    if (filter.value.trim()) query.set("q", filter.value.trim());
    else query.delete("q");
    ctx.replaceQuery(query);
    draw();
  }, 20));
  draw();
  return card("Configuration", "Every field of the configuration, after files and options were applied. Each is an option of the command line: --rollout.group_size 16.", el("div", { class: "toolbar" }, el("label", null, "Filter", filter), found), body);
}

function commands(config: Config): HTMLElement | null {
  if (config.command === null && config.resume_command === null) return null;
  return card(
    "Commands",
    "For a terminal, in the folder from which the run was started.",
    config.command === null ? null : el("div", { class: "labelled" }, el("h3", null, "It was started by"), command(config.command)),
    config.resume_command === null ? null : el("div", { class: "labelled" }, el("h3", null, "Resume it with"), command(config.resume_command), el("p", { class: "muted small" }, config.resume_note)),
    config.telemetry === null ? null : el("p", null, el("a", { href: safeLink(config.telemetry), rel: "noopener noreferrer", target: "_blank" }, "Monarch's telemetry pages"), el("span", { class: "muted small" }, " on the machine of the run, while it is running")),
  );
}

/** The address if it is one of a web page; a run's files could name a script. */
function safeLink(address: string): string | null {
  return /^https?:\/\//.test(address) ? address : null;
}

function machine(config: Config): HTMLElement | null {
  const { machine: found } = config;
  if (found === null) return null;
  const devices = (found.devices ?? []).map((one) => (typeof one === "string" ? one : JSON.stringify(one)));
  const rows: [string, string][] = [
    ["Host", found.host ?? "–"],
    ["CPU cores", number(found.cores)],
    ["Memory", bytes(found.memory_bytes)],
    ["Accelerators", devices.length > 0 ? devices.join(", ") : "none"],
  ];
  return card("Machine", "The machine on which the controller of the run was started.", pairs(rows));
}

function versions(config: Config): HTMLElement | null {
  if (config.versions === null) return null;
  return card("Versions", "Of the packages that the run used.", pairs(Object.entries(config.versions)));
}

function plan(config: Config): HTMLElement | null {
  if (config.plan === null || config.plan.length === 0) return null;
  return card("Plan", "What the command prints with --dry-run: processes, batches, and estimates.", el("ul", { class: "sentences" }, config.plan.map((line) => el("li", null, line))));
}

function pairs(rows: [string, string][]): HTMLElement {
  return el("dl", { class: "numbers" }, rows.map(([name, value]) => el("div", null, el("dt", null, name), el("dd", null, value))));
}
