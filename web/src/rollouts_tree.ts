// Shows the turns of a rollout as a tree: a chain of turns is one list, and each branch a list of its own.
import { count, el } from "./dom";
import { roving, type Turn } from "./rollouts_model";

/** A chain of turns that extend each other, and the chains that go on from its last turn. */
export interface Chain {
  turns: number[];
  branches: Chain[];
}

/** The chains that begin without a parent. */
export function chains(turns: { parent: number | null }[]): Chain[] {
  const children = new Map<number | null, number[]>();
  turns.forEach(({ parent }, n) => {
    const known = parent !== null && parent < n ? parent : null;
    children.set(known, [...(children.get(known) ?? []), n]);
  });
  return (children.get(null) ?? []).map(chainFrom);

  function chainFrom(first: number): Chain {
    const own = [first];
    for (;;) {
      const next = children.get(own.at(-1) ?? -1) ?? [];
      const only = next[0];
      if (next.length !== 1 || only === undefined) return { turns: own, branches: next.map(chainFrom) };
      own.push(only);
    }
  }
}

/** The tree as nested lists of buttons. */
export function turnTree(turns: Turn[], choose: (turn: number) => void): HTMLElement {
  const roots = chains(turns);
  const isChain = roots.length === 1 && roots[0]?.branches.length === 0;
  const title = isChain ? "Turns" : "Turns and branches";
  const node = el("nav", { class: "turn-tree", "aria-label": title }, el("h3", null, title));
  if (!isChain)
    node.append(
      el(
        "p",
        { class: "muted small" },
        "A branch begins where the agent changed or dropped what was said before: it is a training sequence of its own.",
      ),
    );
  node.append(
    isChain
      ? items(roots[0])
      : el(
          "ul",
          { class: "branches" },
          roots.map((chain, n) => branch(chain, n, roots.length)),
        ),
  );
  node.addEventListener("click", (event) => {
    const button = event.target instanceof Element ? event.target.closest<HTMLElement>("[data-turn]") : null;
    if (button !== null) choose(Number(button.dataset.turn));
  });
  roving(node, "[data-turn]");
  return node;

  function branch(chain: Chain, n: number, of: number): HTMLElement {
    const label = of > 1 ? el("span", { class: "branch-name" }, `Branch ${n + 1} of ${of}`) : null;
    const below =
      chain.branches.length > 0
        ? el(
            "ul",
            { class: "branches" },
            chain.branches.map((one, k) => branch(one, k, chain.branches.length)),
          )
        : null;
    return el("li", null, label, items(chain), below);
  }

  function items(chain: Chain | undefined): HTMLElement {
    return el(
      "ol",
      null,
      (chain?.turns ?? []).map((n) => {
        const turn = turns[n];
        const push = turn?.advantage ? (turn.advantage > 0 ? " ▲" : " ▼") : "";
        const words = turn?.is_seen === false ? "dropped" : count(turn?.num_tokens ?? 0, "token");
        return el(
          "li",
          null,
          el(
            "button",
            { type: "button", data: { turn: String(n) } },
            el("b", null, `Turn ${n + 1}`),
            el("span", { class: "muted" }, `${words}${push}`),
          ),
        );
      }),
    );
  }
}
