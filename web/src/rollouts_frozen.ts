// Filters a report's rollouts by the parameters of /api/runs/r/rollouts, as the server would.
import type { Brief, Page } from "./rollouts_model";

const KEYS: Record<string, (row: Brief) => number | null> = {
  step: (row) => row.step,
  reward: (row) => row.reward,
  tokens: (row) => row.tokens,
  age: (row) => row.age_max,
  advantage: (row) => row.advantage,
};

export function filterRollouts(all: unknown, query: URLSearchParams): Page {
  const page = all as Page;
  const words = query.get("q")?.toLowerCase() ?? "";
  const matches = [
    equal("split", (row) => row.split),
    equal("step", (row) => String(row.step)),
    equal("group", (row) => row.group_id),
    equal("problem", (row) => row.problem_id),
    equal("status", (row) => row.status),
    equal("chosen", (row) => row.chosen ?? ""),
    bound("step_min", (row) => row.step, 1),
    bound("step_max", (row) => row.step, -1),
    bound("reward_min", (row) => row.reward, 1),
    bound("reward_max", (row) => row.reward, -1),
    bound("age_min", (row) => row.age_max, 1),
  ];
  const rows = page.rows.filter(
    (row) =>
      matches.every((match) => match(row)) &&
      (words === "" || `${row.excerpt} ${row.problem_id} ${row.rollout_id}`.toLowerCase().includes(words)),
  );
  sort(rows, query.get("sort") ?? "-step");
  const offset = Number(query.get("offset") ?? 0);
  return { ...page, total: rows.length, rows: rows.slice(offset, offset + Number(query.get("limit") ?? 100)) };

  function equal(name: string, of: (row: Brief) => string): (row: Brief) => boolean {
    const wanted = query.get(name);
    return (row) => !wanted || of(row) === wanted;
  }

  function bound(name: string, of: (row: Brief) => number | null, sign: 1 | -1): (row: Brief) => boolean {
    const limit = query.get(name);
    return (row) => {
      if (!limit) return true;
      const value = of(row);
      return value !== null && sign * value >= sign * Number(limit);
    };
  }
}

/** Sorts in place; rows without the value come last. */
function sort(rows: Brief[], by: string): void {
  const sign = by.startsWith("-") ? -1 : 1;
  const key = KEYS[by.replace("-", "")] ?? ((row: Brief) => row.n);
  rows.sort((a, b) => {
    const [x, y] = [key(a), key(b)];
    if (x === null || y === null) return Number(x === null) - Number(y === null) || a.n - b.n;
    return sign * (x - y) || a.n - b.n;
  });
}
